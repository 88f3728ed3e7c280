#!/usr/bin/env bash
# Everything that must pass before a change is kept: style, unit tests (seconds), then every notebook at the quick
# profile, its outputs held against the committed ones. `tests/run.sh --unit` leaves the notebooks out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    "" | --unit) ;;
    *) echo "usage: tests/run.sh [--unit]" >&2 && exit 2 ;;
esac

source env/setup.sh
"$FIRSTTOKEN_PYTHON" -m firsttoken fetch
"$FIRSTTOKEN_PYTHON" -m ruff check .
"$FIRSTTOKEN_PYTHON" -m ruff format --check .
"$FIRSTTOKEN_PYTHON" -m pytest -q tests
[[ "${1:-}" == --unit ]] || "$FIRSTTOKEN_PYTHON" -m pytest -q --nbval notebooks
