#!/usr/bin/env bash
# Damage files of every format for so many minutes (60 by default) and say what came of it; the suite does it for seconds.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[[ "${1:-60}" =~ ^[0-9]+$ ]] || { echo "usage: tests/fuzz.sh [MINUTES]" >&2 && exit 2; }
source env/setup.sh
FUZZ_MINUTES="${1:-60}" exec "$FIRSTTOKEN_PYTHON" -m pytest -q -s tests/fuzz
