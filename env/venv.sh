# What the environments beside .venv have in common; sourced by clients/setup.sh and vllm/setup.sh, which set root.

readonly PIP="26.3"

fail() {
    echo "firsttoken: $*" >&2
    exit 2
}

source "$root/env/alone.sh"

# bare_venv VENV NEWEST: an environment of Python 3.11 to 3.NEWEST that has the pinned pip. Keeps one that is there.
bare_venv() {
    local venv="$1" newest="$2" base="${PYTHON:-python3}"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$base" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null ||
            fail "$base is no Python 3.11 to 3.$newest; set PYTHON=/path/to/python3.11"
        "$base" -m venv --clear "$venv" ||
            fail "$base cannot make $venv; Debian and Ubuntu need \`apt install python3-venv\`"
    fi
    "$venv/bin/python" -m pip install --disable-pip-version-check "pip==$PIP"
}
