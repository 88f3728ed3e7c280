#!/usr/bin/env bash
# Make .venv-clients, where other people's clients of OpenAI's interface are: they pull in a hundred packages that the
# rest of this clone does not need. Nothing of this package is there: they ask a service that runs beside them.
# .venv-clients/firsttoken.stamp remembers which lock it holds, so that a second run costs nothing.
set -euo pipefail

readonly PIP="26.3"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
lock="$root/env/clients/requirements.lock"
venv="$root/.venv-clients"
python="$venv/bin/python"
stamp="$venv/firsttoken.stamp"

fail() {
    echo "firsttoken: $*" >&2
    exit 2
}

holds="$(sha256sum <"$lock")"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$holds" ]] && "$python" -c 'import openai' 2>/dev/null; then
    exit
fi
rm -f "$stamp"
if ! "$python" -m pip --version >/dev/null 2>&1; then
    base="${PYTHON:-python3}"
    "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
        fail "$base is no Python 3.11 to 3.13; set PYTHON=/path/to/python3.11"
    "$base" -m venv --clear "$venv" ||
        fail "$base cannot make $venv; Debian and Ubuntu need \`apt install python3-venv\`"
fi
echo "firsttoken: installing other people's clients into .venv-clients; some minutes"
"$python" -m pip install --disable-pip-version-check "pip==$PIP" &&
    "$python" -m pip install --no-deps -r "$lock" ||
    fail "pip could not install env/clients/requirements.lock (see above); check the network, then run this again"
echo "$holds" >"$stamp"
