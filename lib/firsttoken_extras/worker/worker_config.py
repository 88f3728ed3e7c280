"""What a worker process hosts, and how much patience there is with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from firsttoken.engine.swap import PATHS
from firsttoken.study.dtypes import DTYPES
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import at_least, between, unknown

_Count = Annotated[int, between(1, 1 << 40)]


@dataclass(frozen=True)
class WorkerConfig:
    """A ``model`` as ``load_model`` names it, in ``dtype`` on ``device``, and the pools of a LiveExecutor for it.

    ``threads`` compute on a CPU. ``weights`` is what ``seen`` says of the model's files: a worker that takes the place
    of another hosts the same, or none. ``variants`` are names and folders of LoRA adapters, whose files ``weights`` has
    too. With a ``first_stage`` the model is a staged checkpoint, of which the worker serves that stage first, with
    those below it, and then one after another; they come over a link of ``gbit_per_s`` (0: as fast as they come) by so
    many ``readers``, and ``weights`` is of its manifest. A worker that says nothing for ``start_s`` seconds while it
    starts, or ``step_s`` in a step or a swap, is taken for lost, as is one that dies. Its requests are begun again on a
    new one, each ``retries`` times at most without a token between. Raises ProfileError for what cannot be.
    """

    model: str
    blocks: _Count
    block_tokens: _Count = 16
    host_blocks: Annotated[int, at_least(0)] = 0
    swap: str = "coalesced"
    dtype: str = "float32"
    device: str = "cpu"
    weights: str = ""
    variants: tuple[tuple[str, str], ...] = ()
    threads: _Count = 1
    first_stage: Annotated[int, at_least(0)] = 0
    gbit_per_s: float = 0.0
    readers: _Count = 8
    start_s: float = 600.0
    step_s: float = 60.0
    retries: int = 2

    def __post_init__(self) -> None:
        for name, known in (("swap", PATHS), ("dtype", DTYPES)):
            if (value := getattr(self, name)) not in known:
                raise ProfileError(f"worker: no {name} {value!r}; {unknown(value, known)}")
        for name in ("blocks", "block_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ProfileError(f"worker: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("start_s", "step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ProfileError(f"worker: {name} must be seconds above 0, not {getattr(self, name)}")
        for name in ("host_blocks", "retries"):
            if getattr(self, name) < 0:
                raise ProfileError(f"worker: {name} must be at least 0, not {getattr(self, name)}")
