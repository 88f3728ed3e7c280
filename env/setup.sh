#!/usr/bin/env bash
# Find or make the environment. Sourced by run_all.sh and tests/run.sh, which then call "$FIRSTTOKEN_PYTHON"; run alone
# it only sets up. An active environment in which this clone is installed is used as it is; otherwise .venv is made from
# env/requirements.lock and .venv/firsttoken.stamp remembers which lock it holds, so that a second run costs nothing.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went

readonly FIRSTTOKEN_PIP="26.3"
firsttoken_root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

firsttoken_fail() {
    echo "firsttoken: $*" >&2
    exit 2
}

source "$firsttoken_root/env/alone.sh"

# Is this clone installed, with its dependencies, where this interpreter looks?
firsttoken_installed() {
    "$1" - "$firsttoken_root" >/dev/null 2>&1 <<'PY'
import importlib.metadata, importlib.util, pathlib, sys
importlib.metadata.version("firsttoken")
here = pathlib.Path(importlib.util.find_spec("firsttoken").origin).resolve()
needed = ("torch", "transformers", "peft", "ipywidgets", "papermill", "nbval", "ruff")
sys.exit(pathlib.Path(sys.argv[1]).resolve() not in here.parents or not all(map(importlib.util.find_spec, needed)))
PY
}

# The first interpreter that the pinned packages have builds for; PYTHON=/path goes first.
firsttoken_base_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    firsttoken_fail "no Python 3.11 to 3.14 found; install one, or set PYTHON=/path/to/python3.11"
}

firsttoken_stamp() {
    "$1" -c 'import hashlib, pathlib, sys
files = (pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(sys.version.split()[0], hashlib.sha256(b"".join(files)).hexdigest())' \
        "$firsttoken_root/env/requirements.lock" "$firsttoken_root/pyproject.toml"
}

# Does the environment in .venv hold what the lock names?
firsttoken_fits() {
    local python="$firsttoken_root/.venv/bin/python" stamp="$firsttoken_root/.venv/firsttoken.stamp"
    [[ -f "$stamp" ]] && [[ "$(cat "$stamp")" == "$(firsttoken_stamp "$python" 2>/dev/null)" ]] &&
        firsttoken_installed "$python"
}

firsttoken_make_venv() {
    local venv="$firsttoken_root/.venv" base python="$firsttoken_root/.venv/bin/python"
    local stamp="$venv/firsttoken.stamp"
    [[ -w "$firsttoken_root" ]] || firsttoken_fail \
        "$firsttoken_root cannot be written and .venv in it does not fit; copy the clone to a folder of yours and run it there"
    firsttoken_alone "$firsttoken_root" "$venv"
    ! firsttoken_fits || { firsttoken_done && return; } # somebody else has made it meanwhile
    rm -f "$stamp"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base="$(firsttoken_base_python)"
        "$base" -m venv --clear "$venv" ||
            firsttoken_fail "$base cannot make $venv; Debian and Ubuntu need \`apt install python3-venv\`"
    fi
    echo "firsttoken: installing the pinned packages into .venv; a minute, or several where torch brings CUDA"
    # no build isolation: the lock pins setuptools, and a build of this package needs nothing else
    "$python" -m pip install --disable-pip-version-check "pip==$FIRSTTOKEN_PIP" &&
        "$python" -m pip install --no-compile -r "$firsttoken_root/env/requirements.lock" &&
        "$python" -m pip install --no-deps --no-build-isolation -e "$firsttoken_root" ||
        firsttoken_fail "pip could not install env/requirements.lock (see above); check the network, then run this again"
    # pip compiles 20,000 modules one after the other; some are of other versions of Python and cannot be compiled. Half are
    # tests, architectures and what else hardly ever is imported: those are when they are
    local seldom='/tests/|/transformers/models/|/ray/(data|llm|rllib|train|tune)/|/torch/(_inductor|testing)/'
    seldom+='|/site-packages/(debugpy|fontTools|networkx|pip|setuptools)/|/pygments/lexers/|/sympy/physics/'
    "$python" -m compileall -qq -j 0 -x "$seldom" "$venv"/lib/python*/site-packages || true
    firsttoken_stamp "$python" >"$stamp"
    firsttoken_done
}

FIRSTTOKEN_PYTHON="$(command -v python || command -v python3 || true)"
if [[ -z "$FIRSTTOKEN_PYTHON" ]] || ! firsttoken_installed "$FIRSTTOKEN_PYTHON"; then
    firsttoken_fits || firsttoken_make_venv
    FIRSTTOKEN_PYTHON="$firsttoken_root/.venv/bin/python"
fi
export FIRSTTOKEN_PYTHON

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    echo "firsttoken: ready in $FIRSTTOKEN_PYTHON"
fi
