"""C++ that is built once for the machine it runs on, by the compiler that is there."""

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.files import replacing

# what Apple's clang would read is C++98; sums may be reordered, which vector registers need; infinities and NaN stay
# what they are
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
# of the following, the first that the compiler takes. Clang on arm64 did without -march=native for long, and has -mcpu
PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
# finds the threads of torch's own runtime, which is loaded before, if it is of the same make. Apple's clang has no such
# option and no runtime, but knows the pragmas; torch brings the runtime
OPEN_MP = (("-fopenmp",), ("-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"))


def shared_library(source: Path) -> Path:
    """The library of ``source`` and of the headers beside it, built where it is not yet there (seconds) and kept in the
    cache folder.

    Raises OSError, of one line, without a compiler and where it fails.
    """
    found = compiler()
    if found is None:
        raise OSError("there is no C++ compiler (c++, or what CXX names)")
    try:
        return _built(source, found, paths.CACHE / "native")
    except subprocess.CalledProcessError as error:
        raise OSError((error.stderr.strip() or str(error)).splitlines()[-1]) from error


def compiler() -> list[str] | None:
    """The machine's C++ compiler, with arguments that ``CXX`` may give it: what that names, or ``c++``."""
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return words if shutil.which(words[0]) else None


def _built(source: Path, cxx: list[str], folder: Path) -> Path:
    """The shared library of this source, compiler and processor; written whole or not at all."""
    command, macros = _taken(cxx)
    texts = [file.read_text("utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\n".join([*texts, *command, macros]).encode()).hexdigest()[:16]
    file = folder / f"{source.stem}-{key}.so"
    if not file.exists():
        with replacing(file) as made:
            _run([*command, "-shared", "-fPIC", str(source), "-o", str(made)])
    return file


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
