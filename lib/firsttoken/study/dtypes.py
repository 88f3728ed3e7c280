"""Which dtype a device computes in, where it is here: bf16 where its products are as fast as fp32's, else float32.

A CPU without bf16 instructions multiplies bf16 at a hundredth of fp32's rate (1.1 against 112 GFLOP/s on two AVX2
cores), and some that have them gain nothing. So torch is asked first, and one short product decides, once a machine.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.files import write_text
from firsttoken.study.machine import identity
from firsttoken.study.parsing.schema import parse_as
from firsttoken.study.timing import timed

if TYPE_CHECKING:  # a profile is read, and a service listens, before anybody needs it
    import torch

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"
AS_STORED = "stored"
CHECKPOINT = "bfloat16"  # what checkpoints are written in where nobody says otherwise, whatever computes
SLOW = 0.5  # of fp32's rate: where bf16 is asked for and slower than that, a line says so
LARGEST = 2.0**24
"""The largest number, without its sign, that hidden states, keys and values from elsewhere may hold: 16,777,216.

Every layer adds numbers of about one to the states that enter it, and above this float32 is too coarse to add one: what
later layers compute would be lost. Models stay far below it: a few thousand is usual, and some 700,000 is the most that
has been reported (the massive activations of Gemma 3 with 27 billion parameters, which float16 cannot hold either).
"""
_PRODUCT = (256, 512, 512)  # rows, inner, columns: a prefill's; 0.1 s where bf16 is slow
_TURNS = 3  # of both dtypes, the fastest product counting: whatever else runs can only make one slower


@dataclass(frozen=True)
class ProductRates:
    """The rates at which a device multiplies, in GFLOP/s, and whether torch has bf16 instructions for it."""

    native_bf16: bool
    float32: float
    bfloat16: float

    @property
    def ratio(self) -> float:
        """Return bf16's rate over fp32's."""
        return self.bfloat16 / self.float32


def range_fault(low: float, high: float) -> str:
    """Say what no layer computes with between ``low`` and ``high``: NaN, infinity, or numbers of more than ``LARGEST``;
    "" where there is nothing of it."""
    if low >= -LARGEST and high <= LARGEST:
        return ""
    finite = max(-low, high) < float("inf")
    return f"{max(-low, high):.1e}, beyond {LARGEST:,.0f}" if finite else "NaN or infinity"


def computing(device: torch.device | str) -> torch.dtype:
    """The dtype that ``device`` computes in fastest: bfloat16 or float32."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    rates = cpu_rates()
    return torch.bfloat16 if rates.native_bf16 and rates.ratio >= 1 else torch.float32


def why(device: torch.device | str) -> str:
    """One line that says which dtype ``device`` computes in, and on what ground."""
    name = name_of(computing(device))
    if _kind(device) == "cuda":
        return f"{name}: this GPU has {'' if name == 'bfloat16' else 'no '}bf16 instructions"
    rates = cpu_rates()
    reason = f"torch has {'' if rates.native_bf16 else 'no '}bf16 instructions for this processor"
    return f"{name}: {reason}, a bf16 product runs at {rates.ratio:.2g} of fp32's ({rates.float32:.0f} GFLOP/s a core)"


def resolve(name: str, device: torch.device | str) -> torch.dtype:
    """The dtype called ``name``; "auto" is that of :func:`computing`. A line warns of bf16 on a CPU slow at it."""
    if name == AUTO:
        return computing(device)
    if name == "bfloat16" and _kind(device) == "cpu":
        _warn_if_slow()
    return named(name)


def _kind(device: torch.device | str) -> str:
    """Return the kind of a device, such as "cuda" of "cuda:1"."""
    return str(device).partition(":")[0]


def named(name: str) -> torch.dtype:
    """Return the dtype of a name that is one of ``DTYPES``, such as torch.bfloat16 of "bfloat16"."""
    import torch

    return {name_of_type: getattr(torch, name_of_type) for name_of_type in DTYPES}[name]


def serving(name: str, stored: torch.dtype, device: torch.device | str) -> torch.dtype:
    """The dtype that a checkpoint of ``stored`` weights computes in: "stored" as it is, "auto" as it is unless these
    are halves that a CPU is slow at, which are widened to float32, else the one called ``name``."""
    if name == AS_STORED or (name == AUTO and (_kind(device) != "cpu" or stored == computing(device))):
        return stored
    return named("float32") if name == AUTO else resolve(name, device)


def autocast(model: torch.nn.Module) -> AbstractContextManager:
    """Return the context in which training computes: bf16 autocast where the device is fast at it or the weights are
    halves, else fp32."""
    import torch

    weight = next(model.parameters())
    if weight.dtype == torch.float32 and computing(weight.device) == torch.float32:
        return nullcontext()
    return torch.autocast(weight.device.type, torch.bfloat16)


def check_device(name: str) -> None:
    """Raises StageError for a ``name`` that torch does not know, or that this machine does not have; imports torch."""
    import torch

    try:
        torch.empty(1, device=torch.device(name)).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # as torch was built
        reason = " ".join(str(error).split())[:120]
        raise StageError(f"no device {name!r} can be used here ({reason}); say cpu, or cuda where a GPU is") from error


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@cache
def cpu_rates() -> ProductRates:
    """The CPU's rates, measured once a machine and torch, and kept in the cache; a file of another is not believed."""
    file, machine = paths.CACHE / "cpu-rates.json", identity()
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.pop("machine") == machine:
            return parse_as(ProductRates, stored)
    rates = _measure()
    with suppress(OSError):  # a cache that cannot be written costs 0.3 s at the next start
        write_text(file, json.dumps({"machine": machine} | asdict(rates), indent=1) + "\n")
    return rates


def _measure() -> ProductRates:
    import torch

    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    rows, inner, columns = _PRODUCT
    gflop, fastest = 2 * rows * inner * columns / 1e9, {"float32": math.inf, "bfloat16": math.inf}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other on a busy machine measure the wait
    try:
        for _ in range(_TURNS):
            for name in fastest:
                first_factor, second_factor = (
                    torch.ones(shape, dtype=named(name)) for shape in ((rows, inner), (inner, columns))
                )
                fastest[name] = min(
                    fastest[name], *timed(lambda a=first_factor, b=second_factor: torch.mm(a, b), repeats=2)
                )
    finally:
        torch.set_num_threads(threads)
    return ProductRates(bool(native), **{name: gflop / seconds for name, seconds in fastest.items()})


@cache
def _warn_if_slow() -> None:
    if (ratio := cpu_rates().ratio) < SLOW:
        print(
            f"firsttoken: bfloat16 was asked for, and this processor multiplies it {1 / ratio:.0f} times slower than "
            "float32; dtype: auto would compute in float32",
            file=sys.stderr,
        )
