"""Executors carry a scheduler's decisions out. The live one runs a model, the simulated one charges a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken.engine.request import LayerRecompute, Request, ScheduledChunk

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """The limits of an executor: tokens of one request, ids of the vocabulary."""

    context: int
    vocabulary: int


class SwapTime(Protocol):
    """Seconds that one way of a swap took: making the list of copies, and copying (CPS 3.2.1)."""

    prep_s: float
    copy_s: float


class SwapIn(Protocol):
    """A request's keys and values on their way back."""

    @property
    def done(self) -> bool:
        """Return whether the keys and values have arrived."""

    def wait(self) -> SwapTime:
        """Wait until the keys and values have arrived, and return the seconds that this took."""


class Version(Protocol):
    """A model as it is now, which requests compute with. ``key`` tells it from every other, ``stage`` (0: it has none)
    says how far it has grown, ``depth`` how many layers it has, ``arrived`` how many of the first ones compute already,
    and ``whole`` that it verifies what others draft."""

    key: int | str
    stage: int
    depth: int
    arrived: int
    whole: bool

    def redo(self, request: Request, layers: range) -> LayerRecompute:
        """Return what ``request``, which computes with this version, has to compute again through ``layers`` when it
        moves. Raises RequestError where no hidden states are kept there."""

    def adopt(self, request: Request) -> None:
        """Keep from now on what the request's own version has kept of it so far."""


Transition = Callable[[Version, Version], range | None]
"""Which layers a request computes again when it moves from one version to another; None where it stays."""


class Executor(Protocol):
    """An executor runs steps and moves keys and values, on a clock of its own."""

    limits: Limits
    block_tokens: int
    blocks: int
    version: Version | None
    """What a request computes with that has begun with no other; None where nothing is computed."""
    write_through: bool
    """Whether blocks are copied to host memory as they fill, so that a swap has little left to copy."""

    @property
    def salt(self) -> str:
        """Return what decides keys and values beside the tokens, and may change while no request is open: the
        adapter."""

    def now(self) -> float:
        """Return the executor's clock, in seconds since some moment."""

    def wait_until(self, moment_s: float) -> None:
        """Let the time pass, as nothing can run before ``moment_s``."""

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Process the tokens of ``chunks``; return the next token after each (meaningless after a partial one)."""

    def swap_out(self, request: Request) -> SwapTime | None:
        """Copy the request's blocks to host memory and set ``request.host``; None when there is no room for them."""

    def swap_in(self, request: Request) -> SwapIn:
        """Begin to copy ``request.host`` into the request's blocks."""

    def drop(self, host: Any) -> None:
        """Give up a copy in host memory."""

    def fill(self, request: Request, layer: int, kv: Tensor) -> None:
        """Write keys and values [2, 1, kv_heads, tokens, head_dim] of the request's first tokens into its blocks at
        ``layer``."""

    def hidden_states_of(self, hidden: Tensor, tokens: int) -> Tensor:
        """Return the first ``tokens`` of ``hidden`` [1, tokens or more, hidden], where they are computed with."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of the request beside blocks and copies, as it is over."""

    def close(self) -> None:
        """Give back what the executor holds."""
