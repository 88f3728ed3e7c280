#!/usr/bin/env bash
# Make .venv-clients, where other people's clients of OpenAI's interface are: they pull in a hundred packages that the
# rest of this clone does not need. Nothing of this package is there: they ask a service that runs beside them.
# .venv-clients/firsttoken.stamp remembers which lock it holds, so that a second run costs nothing.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/env/venv.sh"
lock="$root/env/clients/requirements.lock"
venv="$root/.venv-clients"
python="$venv/bin/python"
stamp="$venv/firsttoken.stamp"

holds="$(sha256sum <"$lock")"
fits() { [[ -f "$stamp" && "$(cat "$stamp")" == "$holds" ]] && "$python" -c 'import openai' 2>/dev/null; }
! fits || exit 0
firsttoken_alone "$root" "$venv"
! fits || exit 0 # somebody else has made it meanwhile
rm -f "$stamp"
echo "firsttoken: installing other people's clients into .venv-clients; some minutes"
bare_venv "$venv" 13
"$python" -m pip install --no-deps -r "$lock" ||
    fail "pip could not install env/clients/requirements.lock (see above); check the network, then run this again"
echo "$holds" >"$stamp"
