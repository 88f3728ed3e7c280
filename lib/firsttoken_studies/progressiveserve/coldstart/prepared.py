"""Starts of which a part is paid beforehand: a copy of a process that has imported everything, and a process that CRIU
restores with its model. Both are prepared within their trial; then the files are dropped from memory, and the clock
begins. A process is restored under its own process and thread ids, which are free again so soon after it was dumped.

``python -m firsttoken_studies.progressiveserve.coldstart.prepared SPEC ADDRESS`` is the process that is restored.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NoReturn, TextIO

from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.kernel_forkserver import ask, listening
from firsttoken.study.system.footprint import resident
from firsttoken.study.system.sockets import remove_folder, socket_folder
from firsttoken_studies.progressiveserve.coldstart.harness import make_cold, make_warm, touch_memory
from firsttoken_studies.progressiveserve.coldstart.spec import TRIAL, TrialSpec, read_weights_ahead

IMPORTS = (  # all that a lean start imports, but for its first module, which each copy runs anew
    "firsttoken_studies.progressiveserve.coldstart.trial_variants",
    "firsttoken_studies.progressiveserve.device_memory",
    "firsttoken.engine.engine",
    "firsttoken.engine.fused",
    "firsttoken.engine.live_executor",
    "firsttoken.engine.torch_behind",
    "firsttoken.progressiveserve.loading.rival_loaders",
    "tokenizers",
)
_PARENT_DIES = 1  # of prctl: which signal then comes


def no_snapshots() -> str:
    """Why no process can be restored here, in one line that names the mend; "" where CRIU says that it can be."""
    if os.geteuid():
        return "CRIU restores processes for root alone; measure as root"
    if not (criu := shutil.which("criu")):
        return "criu is not installed; apt-get install criu"
    try:
        done = subprocess.run([criu, "check"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"criu cannot be run: {error}; apt-get install criu"
    told = [line for line in done.stderr.splitlines() if line.startswith("Error") and "exited, status" not in line]
    said = (told or ["no message"])[0]
    return f"criu check fails: {said}; a newer criu may know this kernel (4.2 knows 6.18)" if done.returncode else ""


def start_copy(spec: TrialSpec, variant: str) -> dict[str, Any]:
    """The row of ``variant``, run by a copy of a process that has imported everything and loaded nothing.

    Its seconds count from the request for a copy; ``paid_s`` and ``kept_bytes`` say what that process took to start and
    holds in memory. Raises StageError when it does not start, or the copy fails.
    """
    begun = time.monotonic()
    with listening(IMPORTS, os.environ) as warm, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        if not warm:
            raise StageError("the fork server did not start; run again")
        paid = {"paid_s": time.monotonic() - begun, "kept_bytes": resident(warm.process)}
        paid["resident_before_pct"] = _unread(_weights(spec))
        with socket.socket(socket.AF_UNIX) as client, open(os.devnull) as nothing:
            client.connect(warm.address)
            asked = replace(spec, variant=variant, spawned_s=time.monotonic())
            ask(client, TRIAL, [json.dumps(asdict(asked))], [nothing.fileno(), out.fileno(), err.fileno()])
            while client.recv(64):  # its process id, its status, and then the end
                pass
        for file in (out, err):
            file.seek(0)
        said = [["", *_lines(file)][-1] for file in (out, err)]
    if not said[0]:
        raise StageError(f"a copy of the fork server failed: {said[1]}")
    return json.loads(said[0]) | paid | {"variant": spec.variant}


def restore(spec: TrialSpec) -> dict[str, Any]:
    """The row of a process that has loaded the model and given an answer, was dumped by CRIU, and is restored from
    files that are not in memory.

    Its seconds count from the call of ``criu restore`` to its first token's arrival here; the weights, which it has
    mapped, are read ahead meanwhile. ``paid_s`` is what it took until it was dumped, ``kept_bytes`` its image. Raises
    StageError when it cannot be dumped or restored.
    """
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=paths.CACHE, prefix="snapshot-") as kept, _short_folder() as folder:
        address, begun = str(folder / "asked"), time.monotonic()
        with _process([sys.executable, "-m", __name__, json.dumps(asdict(spec)), address]) as resides:
            if not resides.stdout.readline():
                raise StageError(f"the process to dump ended: {['killed', *_lines(resides.stderr)][-1]}")
            resides.stdout.close()
            resides.stderr.close()
            _dump(resides.pid, kept)
        image = [path for path in Path(kept).iterdir() if path.suffix == ".img"]
        row = {"paid_s": time.monotonic() - begun, "kept_bytes": sum(path.stat().st_size for path in image)}
        row["resident_before_pct"] = _unread([*image, *_weights(spec)])
        Path(address).unlink(missing_ok=True)
        begun = time.monotonic()
        read_weights_ahead(spec)
        with _process(_words("restore", kept)) as restored:
            client = _connected(address, restored, kept)
            asked = time.monotonic()
            said = client.makefile().readline()
            ended = time.monotonic()
            client.close()
            if not said:
                raise StageError("the restored process gave no answer; run again")
    answered = json.loads(said)
    times = {"ttft_process_s": ended - begun, "ttft_request_s": ended - asked}
    phases = {"phase_restore_s": ended - begun - answered["prefill_s"], "phase_prefill_s": answered["prefill_s"]}
    return row | times | phases | {"token_id": answered["token_id"]}


def _weights(spec: TrialSpec) -> list[Path]:
    return sorted(Path(spec.stock).glob("*.safetensors"))


def _unread(files: Sequence[Path]) -> float | None:
    """Make ``files`` cold as every other trial finds them, which have been in memory until then; the largest share of
    one that is still there in %, None where unknown.

    What the harness freed before the preparation the host of a virtual machine has taken back meanwhile: to read into
    that takes the processor 0.2 s longer.
    """
    make_warm(files)
    left = make_cold(files)
    touch_memory(sum(path.stat().st_size for path in files))
    return None if left is None else round(100 * left, 1)


def _lines(file: TextIO) -> list[str]:
    return file.read().strip().splitlines()


@contextmanager
def _short_folder() -> Iterator[Path]:
    folder = socket_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen]:
    """The process of ``command``, killed with the block."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, preexec_fn=_tie, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def _tie() -> None:
    """Have this process killed when its parent ends; a restored one is tied to the CRIU that restores it, too."""
    ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)


def _words(verb: str, folder: str) -> list[str]:
    return ["criu", verb, "--images-dir", folder, "--log-file", f"{verb}.log"]


def _dump(process: int, folder: str) -> None:
    command = [*_words("dump", folder), "--tree", str(process)]
    if subprocess.run(command, capture_output=True, check=False, preexec_fn=_tie).returncode:
        raise StageError(_fault("dump", folder))


def _fault(verb: str, folder: str) -> str:
    """What CRIU's log says went wrong first, and the mend."""
    log = Path(folder, f"{verb}.log")
    told = [line for line in log.read_text().splitlines() if "Error" in line] if log.is_file() else []
    return f"criu {verb} failed: {(told or ['it left no log'])[0]}; run again, or without criu on PATH"


def _connected(address: str, restored: subprocess.Popen, folder: str) -> socket.socket:
    """A connection to the restored process, as soon as its socket listens."""
    while restored.poll() is None:
        client = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            client.connect(address)
            return client
        client.close()
        time.sleep(0.001)
    raise StageError(_fault("restore", folder))


def reside(spec: TrialSpec, address: str) -> NoReturn:
    """Load the model, give an answer, and give one to whoever connects to ``address``, then end."""
    import torch

    from firsttoken_studies.progressiveserve.coldstart.trial_variants import answering

    if spec.threads:
        torch.set_num_threads(spec.threads)
    with torch.inference_mode(), socket.socket(socket.AF_UNIX) as heard:
        answer = answering(spec)
        answer()
        heard.bind(address)
        heard.listen()
        print("listening", flush=True)
        client, _ = heard.accept()
        begun = time.monotonic()
        token = answer()
        client.sendall(json.dumps({"token_id": token, "prefill_s": time.monotonic() - begun}).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    reside(TrialSpec(**json.loads(sys.argv[1])), sys.argv[2])
