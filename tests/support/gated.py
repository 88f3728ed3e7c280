"""`firsttoken serve` as a process of its own, in which the import of torch waits at a gate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from services import free_port, until

KEY = "a-key"
GATED = """
import itertools, json, sys, threading, time
from importlib.machinery import PathFinder
from pathlib import Path

place = Path(sys.argv[1])

class Gate:
    # asked about every module that is not there yet
    reached = False

    def find_spec(self, name, path=None, target=None):
        if Gate.reached and threading.current_thread().name != "loading":
            with open(place / "strays", "a") as file:
                print(threading.current_thread().name, name, file=file)
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def held(module):  # and not here, where the one lock of all imports is held
            Gate.reached = True
            (place / "modules.json").write_text(json.dumps(sorted(set(sys.modules) - {'torch'})))
            while not (place / "open").exists():
                time.sleep(0.01)
            if (place / "broken").exists():
                raise ImportError("libtorch.so: cannot open shared object file")
            run(module)

        spec.loader.exec_module = held
        return spec

sys.meta_path.insert(0, Gate())
from firsttoken_cpu.before_torch.numpy_answers import NumpyAnswers
from firsttoken_cpu.before_torch.numpy_model import NumpyModel

over, calls = threading.Event(), itertools.count()

def paced(self, tokens, right=NumpyModel.logits, pace_s=float(sys.argv[2])):
    time.sleep(pace_s)
    if pace_s and (place / "open").exists():  # an engine is there before the answer ends, however slow its import is
        assert next(calls) < 100 or over.wait(300), "no engine goes on"
    return right(self, tokens)

NumpyModel.logits = paced
NumpyAnswers.end = lambda self, right=NumpyAnswers.end: (over.set(), right(self))
sys.argv[1:] = sys.argv[3:]
from firsttoken.__main__ import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Gated:
    """A service whose import of torch waits until ``open`` lies in ``place``."""

    process: subprocess.Popen
    place: Path
    url: str

    def open(self) -> None:
        """Let torch be imported."""
        (self.place / "open").touch()

    @property
    def strays(self) -> str:
        """What another thread than the loading one has imported since the gate was reached."""
        file = self.place / "strays"
        return file.read_text() if file.exists() else ""


@contextmanager
def gated(folder: Path, place: Path, *options: str, pace_s: float = 0.0) -> Iterator[Gated]:
    """One that listens already, and stands at the gate; before torch each token takes ``pace_s`` more."""
    place.mkdir()
    port = free_port()
    (place / "key").write_text(KEY)
    command = [sys.executable, "-c", GATED, str(place), str(pace_s), "serve", str(folder), "--port", str(port)]
    command += [*options, "--api-key-file", str(place / "key")]
    out = (place / "out").open("w"), (place / "errors").open("w")
    process = subprocess.Popen(command, stdout=out[0], stderr=out[1])
    service = Gated(process, place, f"http://127.0.0.1:{port}")

    def answers() -> bool:
        assert process.poll() is None, (place / "errors").read_text()
        try:
            return httpx.get(f"{service.url}/health").status_code == 503 and (place / "modules.json").exists()
        except httpx.TransportError:
            return False

    try:
        until(answers, "the port answers and the gate is reached")
        yield service
    finally:
        service.open()
        process.kill()
        process.wait()
        for file in out:
            file.close()
