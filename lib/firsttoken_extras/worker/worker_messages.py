"""What goes between engine and worker: msgpack, never pickle, of bounded size, its parts held against their types.

Both ends are this program, of this user, over a socket that nobody else can reach; a fault here is one of ours, and is
found where it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from firsttoken.engine.request import Sampling, TokenLogprob
from firsttoken.study.errors import WorkerError

MOST_BYTES = 1 << 26


class NewRequest(NamedTuple):
    """A request that the worker does not know yet: its prompt's tokens, how many of these are judged, its sampling, and
    the name of the variant that answers, "" for the model itself."""

    prompt_tokens: int
    judged: int
    sampling: tuple[Any, ...]
    variant: str


class ChunkMessage(NamedTuple):
    """A ``ScheduledChunk`` in numbers, with what is new of its request: from ``told`` on it has ``tokens``, from block
    ``kept`` on ``blocks``."""

    number: int
    start: int
    end: int
    computed: int
    told: int
    tokens: list[int]
    kept: int
    blocks: list[int]
    fresh: NewRequest | None


class WorkerOrder(NamedTuple):
    """What a worker is to do, after it has forgotten requests that are ``over`` and given up ``dropped`` (start,
    blocks) spans of its host pool."""

    serial: int
    what: str
    over: list[int]
    dropped: list[tuple[int, int]]
    content: Any


class WorkerReply(NamedTuple):
    """To the order of this ``serial``: its ``content``, or the name of an exception and its text."""

    serial: int
    fault: str
    content: Any


def pack(message: tuple[Any, ...]) -> bytes:
    """The bytes of an order or a reply. Raises WorkerError for more than ``MOST_BYTES``."""
    data = msgpack.packb(message)
    if len(data) > MOST_BYTES:
        raise WorkerError(f"a message of {len(data):,} bytes; at most {MOST_BYTES:,} go between engine and worker")
    return data


def order_of(data: bytes) -> WorkerOrder:
    """Raises WorkerError for what is no order."""
    return WorkerOrder(*_parts(data, (int, str, list, list, object)))


def reply_of(data: bytes) -> WorkerReply:
    """Raises WorkerError for what is no reply."""
    return WorkerReply(*_parts(data, (int, str, object)))


def works_of(content: Any, blocks: int) -> list[ChunkMessage]:
    """The works of a step over a pool of ``blocks``. Raises WorkerError for what is none, and for blocks that are not
    of the pool: kernels write where they are told."""
    try:
        chunks = [ChunkMessage(*one) for one in content]
        for one in chunks:
            numbers = (*one[:5], *one.tokens, one.kept, *one.blocks)
            if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(one.blocks, default=0) >= blocks:
                raise ValueError(f"request {one.number}: a number is missing, below 0, or names no block")
        return [one if one.fresh is None else one._replace(fresh=NewRequest(*one.fresh)) for one in chunks]
    except (TypeError, ValueError) as error:
        raise WorkerError(f"a step cannot be read: {error}") from error


def blocks_of(content: Any, blocks: int) -> list[int]:
    """Numbers of blocks of a pool of ``blocks``. Raises WorkerError for what is none: keys and values go there."""
    if not (isinstance(content, list) and all(type(one) is int and 0 <= one < blocks for one in content)):
        raise WorkerError(f"blocks {str(content)[:80]} are none of a pool of {blocks}")
    return content


def sampling_of(told: Sequence[Any]) -> Sampling:
    """The sampling that ``sampling_told`` has told."""
    return Sampling(*told[:3], tuple(told[3]), *told[4:])


def sampling_told(sampling: Sampling) -> tuple[Any, ...]:
    """Its fields in turn."""
    return tuple(vars(sampling).values())


def logprobs_of(told: Sequence[Any]) -> list[TokenLogprob]:
    """Chances as a reply holds them."""
    return [
        TokenLogprob(logprob, tuple((token, share) for token, share in top_logprobs)) for logprob, top_logprobs in told
    ]


def _parts(data: bytes, kinds: tuple[type, ...]) -> list[Any]:
    try:
        parts = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise WorkerError(f"a message is no msgpack: {error}") from error
    if not isinstance(parts, list) or len(parts) != len(kinds) or not all(map(isinstance, parts, kinds)):
        raise WorkerError("a message has other parts than it should")
    return parts
