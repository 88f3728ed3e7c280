"""Builds ``kernels.cpp`` once with the machine's C++ compiler, and calls it with tensors.

Without a compiler, or where it fails, ``kernels`` is None and torch's own operations do the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from firsttoken.study import paths

SOURCE = Path(__file__).with_name("kernels.cpp")
# what Apple's clang would read is C++98; sums may be reordered, which vector registers need; infinities and NaN stay
# what they are
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
# of the following, the first that the compiler takes. Clang on arm64 did without -march=native for long, and has -mcpu
PROCESSOR = (("-march=native",), ("-mcpu=native",), ())
# finds the threads of torch's own runtime, which is loaded before, if it is of the same make. Apple's clang has no such
# option and no runtime, but knows the pragmas; torch brings the runtime
OPEN_MP = (("-fopenmp",), ("-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"))
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WIDTHS = (16, 32, 64, 128)  # of a head: what kernels.cpp is compiled for
_POINTER, _COUNT, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER]
    + [_COUNT] * 7
    + [_REAL, _THREADS],
    "rms_norm": [_POINTER] * 3 + [_COUNT] * 2 + [_REAL, _THREADS],
    "gated": [_POINTER] * 2 + [_COUNT] * 2 + [_THREADS],
    "rotate": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _THREADS],
}


class Kernels:
    """The compiled functions. Tensors lie on the CPU, in one of ``NAMES``' dtypes; they are contiguous but ``query``
    and ``states`` of ``rotate``, whose tokens may be further apart."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._calls = {}
        for name, arguments in _ARGUMENTS.items():
            for dtype, suffix in NAMES.items():
                call = getattr(library, f"{name}_{suffix}")
                call.argtypes, call.restype = arguments, None
                self._calls[name, dtype] = call

    def attend(
        self, query: Tensor, pool: Tensor, layer: int, tables: Tensor, works: Tensor, contexts: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``query`` [tokens, heads, head_dim] over ``pool`` (``KVPool.rows``) -> the shape of ``query``.

        ``tables`` [works, blocks] are block tables; ``works`` and ``contexts`` [tokens] say whose table a token reads,
        and how many tokens it sees; all three are int64.
        """
        tokens, heads, width = query.shape
        _, _, _, block_tokens, kv_heads, _ = pool.shape
        out = query.new_empty(tokens, heads, width)
        self._calls["attend", query.dtype](
            query.data_ptr(),
            query.stride(0),
            pool.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            works.data_ptr(),
            contexts.data_ptr(),
            out.data_ptr(),
            tokens,
            kv_heads,
            heads // kv_heads,
            width,
            block_tokens,
            pool.stride(0),
            layer,
            scale,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``states`` [..., width] over their root mean square, times ``weight`` [width]."""
        out, width = torch.empty_like(states), states.shape[-1]
        self._calls["rms_norm", states.dtype](
            states.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            states.numel() // width,
            width,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def gated(self, states: Tensor) -> Tensor:
        """silu of the first half of ``states`` [..., 2 * width], times the second half -> [..., width]."""
        width = states.shape[-1] // 2
        out = states.new_empty(*states.shape[:-1], width)
        rows, threads = out.numel() // width, torch.get_num_threads()
        self._calls["gated", states.dtype](states.data_ptr(), out.data_ptr(), rows, width, threads)
        return out

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``states`` [tokens, heads, head_dim] in place by ``cos`` and ``sin`` [tokens, head_dim]."""
        tokens, heads, width = states.shape
        self._calls["rotate", states.dtype](
            states.data_ptr(),
            states.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            width,
            torch.get_num_threads(),
        )


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, built at the first call (seconds) and kept in the cache folder; None, with a warning, without."""
    found = compiler()
    try:
        if found is None:
            raise OSError("there is no C++ compiler (c++, or what CXX names)")
        return Kernels(_built(found, paths.CACHE / "native"))
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        reason = ((getattr(error, "stderr", None) or "").strip() or str(error)).splitlines()[-1]
        warnings.warn(f"the engine runs without its own CPU kernels, slower: {reason}", stacklevel=2)
        return None


def compiler() -> list[str] | None:
    """The machine's C++ compiler, with arguments that ``CXX`` may give it: what that names, or ``c++``."""
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return words if shutil.which(words[0]) else None


def _built(cxx: list[str], folder: Path) -> Path:
    """The shared library of this source, compiler and processor; written whole or not at all."""
    command, macros = _taken(cxx)
    key = hashlib.sha256("\n".join([SOURCE.read_text("utf-8"), *command, macros]).encode()).hexdigest()[:16]
    file = folder / f"kernels-{key}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / file.name
            _run([*command, "-shared", "-fPIC", str(SOURCE), "-o", str(made)])
            made.replace(file)
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
