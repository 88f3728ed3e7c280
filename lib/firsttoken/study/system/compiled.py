"""C++ that is built once for the machine it runs on, by the compiler that is there, and whether it is to be used.

A library carries its own sha256 in its name. One that is not what was built is built again before anybody loads it: of
half a file, to load it ended the process.
"""

import fcntl
import functools
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.errors import ProfileError

ACCELERATOR = "FIRSTTOKEN_ACCELERATOR"  # the environment variable
KERNELS, ONEDNN, NONE = "kernels", "onednn", "none"
ACCELERATORS = {
    KERNELS: "the engine's own CPU kernels where they are right",
    ONEDNN: "the same, but oneDNN multiplies bfloat16, as it does on processors with AMX",
    NONE: "torch alone, as without a C++ compiler",
}

# what Apple's clang would read is C++98; sums may be reordered, which vector registers need; infinities and NaN stay
# what they are
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
# of the following, the first that the compiler takes. Clang on arm64 did without -march=native for long, and has -mcpu
PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
# finds the threads of torch's own runtime, which is loaded before, if it is of the same make. Apple's clang has no such
# option and no runtime, but knows the pragmas; torch brings the runtime
OPEN_MP = (("-fopenmp",), ("-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"))


class TorchAlone(OSError):
    """Nothing is built, as the environment asks for torch alone."""


def accelerator_name() -> str:
    """One of ``ACCELERATORS``, which the environment names. Raises ProfileError for any other word."""
    name = os.environ.get(ACCELERATOR, "").strip() or KERNELS
    if name not in ACCELERATORS:
        offered = "; ".join(f"{choice} ({meaning})" for choice, meaning in ACCELERATORS.items())
        raise ProfileError(f"{ACCELERATOR} is {name!r}; give it one of: {offered}")
    return name


@functools.cache
def say_once(line: str) -> None:
    """Print ``line`` on the terminal's error output, once in a process."""
    print(f"firsttoken: {line}", file=sys.stderr, flush=True)


def shared_library(source: Path) -> Path:
    """The library of ``source`` and of the headers beside it, built where it is not yet there (seconds) and kept in the
    cache folder. Of several processes and threads that want it one builds it, and the others wait.

    Raises OSError, of one line, without a compiler, where it fails, and within :func:`build_beside` where it is still
    to be built; TorchAlone where the environment wants none.
    """
    if accelerator_name() == NONE:
        raise TorchAlone(f"{ACCELERATOR} is {NONE}")
    cxx = compiler()
    if cxx is None:
        raise OSError("there is no C++ compiler (c++, or what CXX names)")
    try:
        command, macros = _taken(cxx)
        texts = [file.read_text("utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
        key = hashlib.sha256("\n".join([*texts, *command, macros]).encode()).hexdigest()[:16]
        name = f"{source.stem}-{key}"
        if (library := _intact(name)) is not None:
            return library
        if _BESIDE.is_set():
            _begin_beside(source)
            again = " again, as its library was cut or altered" if _altered(name) else ""
            raise OSError(f"{source.name} is being compiled{again}; the next start has it")
        with _alone(source):
            return _intact(name) or _built(source, command, name)
    except subprocess.CalledProcessError as error:
        raise OSError((error.stderr.strip() or str(error)).splitlines()[-1]) from error


_BESIDE = threading.Event()


@contextmanager
def build_beside() -> Iterator[None]:
    """Let nobody in this process wait for a compiler within the block: a service answers without what is still to be
    built, and a process beside it builds that for the next start."""
    _BESIDE.set()
    try:
        yield
    finally:
        _BESIDE.clear()


@functools.cache
def _begin_beside(source: Path) -> None:
    threading.Thread(target=_build_beside, args=(source,), name="building", daemon=True).start()


def _build_beside(source: Path) -> None:
    """Build the library in a process of its own, which ends by itself; its compiler takes what others leave idle."""
    command = [sys.executable, "-m", __name__, str(source)]
    environment = os.environ | {"FIRSTTOKEN_CACHE": str(paths.CACHE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        say_once(f"{source.name} cannot be compiled: {(done.stderr.strip() or 'no word').splitlines()[-1]}")


@contextmanager
def _alone(source: Path) -> Iterator[None]:
    """Keep other processes and threads from building ``source`` within the block; where files cannot be locked, all
    build it, and the last one's library stays."""
    with source.open("rb") as opened:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def compiler() -> list[str] | None:
    """The machine's C++ compiler, with arguments that ``CXX`` may give it: what that names, or ``c++``."""
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return words if shutil.which(words[0]) else None


def _intact(name: str) -> Path | None:
    """The library called ``name`` in the cache; None where there is none whose bytes are those that were built."""
    files = (paths.CACHE / "native").glob(f"{name}-*.so")
    return next((file for file in files if file.stem == f"{name}-{_digest(file)}"), None)


def _altered(name: str) -> list[Path]:
    """The libraries called ``name`` in the cache, where none is :func:`_intact`."""
    return [*(paths.CACHE / "native").glob(f"{name}-*.so")]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _built(source: Path, command: list[str], name: str) -> Path:
    """The shared library of ``source``, in the cache under ``name`` and its digest; written whole or not at all."""
    folder = paths.CACHE / "native"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (altered := _altered(name)):
        say_once(f"{file} is cut or altered; it is compiled again")
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-", ignore_cleanup_errors=True) as work:
        made = Path(work, "made.so")
        _run([*command, "-shared", "-fPIC", str(source), "-o", str(made)])
        made.chmod(0o644)
        for file in altered:
            file.unlink()
        return made.rename(folder / f"{name}-{_digest(made)}.so")


def _taken(cxx: list[str]) -> tuple[list[str], str]:
    """The compiler with the flags that it takes, and its macros: they name its version, and what the processor can do.

    Raises CalledProcessError, that of the flags which are tried first.
    """
    refused = []
    for processor, open_mp in itertools.product(PROCESSOR, OPEN_MP):
        command = [*cxx, *FLAGS, *processor, *open_mp]
        try:
            return command, _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
        except subprocess.CalledProcessError as error:
            refused.append(error)
    raise refused[0]


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


if __name__ == "__main__":
    os.nice(19)
    try:
        shared_library(Path(sys.argv[1]))
    except OSError as fault:
        sys.exit(str(fault))
