#!/usr/bin/env bash
# Make .venv-vllm, where vLLM and this package run together: vLLM wants older transformers than the rest of this clone.
# .venv-vllm/firsttoken.stamp remembers which lock it holds, so that a second run costs nothing.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere, and says where it went

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/env/venv.sh"
lock="$root/env/vllm/requirements.lock"
venv="$root/.venv-vllm"
python="$venv/bin/python"
stamp="$venv/firsttoken.stamp"

if [[ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]]; then
    fail "the pinned vLLM is built for Linux on x86-64; this is $(uname -s) on $(uname -m)"
fi
holds="$(cat "$lock" "$root/pyproject.toml" | sha256sum)"
fits() { [[ -f "$stamp" && "$(cat "$stamp")" == "$holds" ]] && "$python" -c 'import firsttoken' 2>/dev/null; }
! fits || exit 0
firsttoken_alone "$root" "$venv"
! fits || exit 0 # somebody else has made it meanwhile
rm -f "$stamp"
echo "firsttoken: installing vLLM into .venv-vllm; some minutes"
# torch alone brings what it needs (CUDA libraries, in some builds); of the rest, the lock names every package
bare_venv "$venv" 14
"$python" -m pip install "$(grep '^torch==' "$lock")" &&
    "$python" -m pip install --no-deps -r "$lock" &&
    "$python" -m pip uninstall --yes -qq torchvision torchaudio torchcodec &&
    "$python" -m pip install --no-deps --no-build-isolation -e "$root" ||
    fail "pip could not install env/vllm/requirements.lock (see above); check the network, then run this again"
echo "$holds" >"$stamp"
