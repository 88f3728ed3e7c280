#!/usr/bin/env bash
# From a fresh clone to every figure: set up, fetch, run the notebooks, print the claims table.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./run_all.sh [--profile NAME] [--only NN ...] [--list]

  --profile NAME   quick (default; some 20 minutes on 2 CPU cores), review (one to three hours, to judge most claims),
                   full, gpu or paper
  --only NN ...    only the notebooks with these numbers, e.g. --only 01 12
  --list           list the notebooks and stop
  -h, --help       this text

The first run makes an environment in .venv, of some 900 MB of packages and a few GB more where torch brings CUDA, and
downloads about 350 MB of model and text into .cache. Afterwards .venv holds 2 GB, more with CUDA, and .cache 3 GB.
A second run makes and downloads nothing, and runs the notebooks again. FIRSTTOKEN_CACHE names another folder for model
and text, FIRSTTOKEN_OUT one for results, figures and executed notebooks, PYTHON the interpreter to start from.
TEXT
}

listing=""
arguments=("$@")
while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --list) listing=yes ;;
        --profile | --only)
            [[ $# -gt 1 && "$2" != -* ]] || { echo "firsttoken: $1 needs a value; see ./run_all.sh --help" >&2 && exit 2; }
            shift
            ;;
        --profile=* | --only=*) ;;
        -*) echo "firsttoken: no option $1; known: --profile, --only, --list, --help" >&2 && exit 2 ;;
    esac
    shift
done

source env/setup.sh
[[ -n "$listing" ]] || "$FIRSTTOKEN_PYTHON" -m firsttoken fetch
exec "$FIRSTTOKEN_PYTHON" -m firsttoken run ${arguments[@]+"${arguments[@]}"}
