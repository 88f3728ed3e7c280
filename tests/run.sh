#!/usr/bin/env bash
# What a reviewer runs: style, the artifact's unit tests (minutes), then every notebook at the quick profile, its outputs
# held against the committed ones. `tests/run.sh --all` adds the tests of the server (tests/serve) and of the kernels
# (tests/cpu), and is what must pass before a change is kept; `tests/run.sh --unit` is `--all` without the notebooks.
# `tests/run.sh --vllm` runs only what needs vLLM, in an environment of its own, which it makes (env/vllm/setup.sh);
# `tests/run.sh --clients` asks the service with other people's clients (env/clients/setup.sh) and, where chromium-driver
# is installed, a browser, in which a notebook is run and changed, too;
# `tests/run.sh --mutations` makes every mechanism wrong and expects its notebook to say so.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    "") left_out=(--ignore=tests/serve --ignore=tests/cpu) ;;
    --all | --unit) left_out=() ;;
    --mutations)
        source env/setup.sh
        "$FIRSTTOKEN_PYTHON" -m firsttoken fetch
        FIRSTTOKEN_MUTATIONS=all exec "$FIRSTTOKEN_PYTHON" -m pytest -q -n 2 tests/test_mutations.py
        ;;
    --vllm)
        env/vllm/setup.sh
        # one thread: two that wait for each other on busy cores took 20 to 100 times as long for this tiny model
        export OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR
        exec .venv-vllm/bin/python -m pytest -q --disable-warnings -o addopts=--import-mode=importlib tests/vllm
        ;;
    --clients)
        source env/setup.sh
        env/clients/setup.sh
        "$FIRSTTOKEN_PYTHON" -m firsttoken fetch
        exec .venv-clients/bin/python -m pytest -q --noconftest -o addopts=--import-mode=importlib tests/clients
        ;;
    *) echo "usage: tests/run.sh [--all | --unit | --mutations | --vllm | --clients]" >&2 && exit 2 ;;
esac

source env/setup.sh
"$FIRSTTOKEN_PYTHON" -m firsttoken fetch
"$FIRSTTOKEN_PYTHON" -m ruff check .
"$FIRSTTOKEN_PYTHON" -m ruff format --check .
echo "firsttoken: unit tests, 18 minutes on two cores that have AVX2 alone"
# Two processes that compute on one thread each; the files go to them in the order of tests/conftest.py. A process that
# hangs or dies ends the run: pytest-xdist 3.8 may wait for ever for one that takes its place (its issues 1323 and 1327).
two_processes=(-n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
"$FIRSTTOKEN_PYTHON" -m pytest -q "${two_processes[@]}" tests ${left_out[@]+"${left_out[@]}"}
[[ "${1:-}" != --unit ]] || exit 0
echo "firsttoken: the notebooks, 19 minutes on two cores that have AVX2 alone"
# Each kernel is a copy of one process that has imported what they need. Notebooks that start processes and wait for links
# have all cores, one after the other, and leave half of them idle; the others run meanwhile, a core each, the longest first.
with_processes=(13 15 17 50 52 56)
on_a_core=(22 14 12 16 35 33 30 41 20 51)
notebooks() { local number && for number; do echo notebooks/"$number"_*.ipynb; done; }
for notebook in notebooks/*.ipynb; do
    number="${notebook#notebooks/}" && number="${number%%_*}"
    [[ " ${with_processes[*]} ${on_a_core[*]} " == *" $number "* ]] || on_a_core+=("$number")
done
check() { exec "$FIRSTTOKEN_PYTHON" -m firsttoken_studies.record.kernel_forkserver pytest -q --nbval "$@"; }
said="$(mktemp)"
set -m  # a group of its own, which can be ended as a whole
(check "${two_processes[@]}" -p a_core_each $(notebooks "${on_a_core[@]}")) >"$said" 2>&1 &
beside=$!
set +m
trap 'kill -- -"$beside" 2>/dev/null || true; rm -f "$said"' EXIT
failed=0
(check $(notebooks "${with_processes[@]}")) || failed=$?
wait "$beside" || failed=$?
cat "$said"
exit "$failed"
