"""A first token over another model's cache that is still on its way (DroidSpeak, 4.3 and Figure 20).

Those that send run the same code in the same order; they differ in what is sent and in what is waited for, so their
logits are equal bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from firsttoken.droidspeak.entry import e_cache_name, layer_name
from firsttoken.droidspeak.forward import Forward, cache_of, check_shape, fill
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.kv_transfer import Buffers, Transfer
from firsttoken.droidspeak.pipeline.schedule import Schedule, SendingOrder, e_cache_first
from firsttoken.droidspeak.prefix import LayerKV, Prefix
from firsttoken.droidspeak.tensor_bytes import CachePiece
from firsttoken.engine.kv import KVShape
from firsttoken.link.shaped import Link
from firsttoken.study.errors import LinkError, RequestError


@dataclass
class ReuseMarks:
    """Seconds since the request at which something was done; None for what did not happen.

    ``last_byte_s`` is that of the last piece. After a fallback ``bytes_moved`` had come in vain, and the rest is of the
    full prefill.
    """

    edge_s: float | None = None
    recompute_start_s: float | None = None
    recompute_end_s: float | None = None
    last_byte_s: float | None = None
    first_token_s: float = 0.0
    bytes_moved: int = 0


@dataclass(frozen=True)
class FirstToken:
    """Next-token ``logits`` [1, vocabulary] and the ``cache`` of prefix and suffix, for the tokens that follow.

    ``fell_back`` is empty, or why the link's bytes were dropped and everything was computed from the tokens.
    """

    logits: Tensor
    cache: DynamicCache
    marks: ReuseMarks
    fell_back: str = ""


def sent_pieces(
    pieces: Mapping[str, CachePiece], group: Group, depth: int, schedule: Schedule, order: SendingOrder = e_cache_first
) -> list[CachePiece]:
    """Return the pieces that ``schedule`` sends, in ``order``.

    Raises RequestError when ``pieces`` lacks some of them, or ``order`` leaves out or adds one.
    """
    edge, layers = ["E"] if schedule.sends_e_cache(group) else [], schedule.layers(group, depth)
    ordered = order(edge, layers)
    if sorted(map(str, ordered)) != sorted(map(str, [*edge, *layers])):
        raise RequestError(f"the order of sending has {[*ordered]}; it must have each of {[*edge, *layers]} once")
    names = [e_cache_name(group.lo) if piece == "E" else layer_name(piece) for piece in ordered]
    lacking = [name for name in names if name not in pieces]
    if lacking:
        raise RequestError(f"no {', '.join(lacking)} was stored for this prefix; store it, or choose another group")
    return [pieces[name] for name in names]


@torch.inference_mode()
def first_token(
    model: PreTrainedModel,
    prefix: Prefix,
    pieces: Mapping[str, CachePiece],
    group: Group,
    link: Link,
    suffix: Tensor,
    schedule: Schedule = Schedule.PIPELINED,
    *,
    buffers: Buffers | None = None,
    order: SendingOrder = e_cache_first,
) -> FirstToken:
    """The first token behind a ``prefix`` of one row and ``suffix`` [1, tokens]: ``group`` recomputed, the rest reused.

    Pipelined, the group's computation starts as soon as the E-cache is there, and the pass over the suffix waits at
    each reused layer for that layer only. ``pieces`` are a sender's, by name (the ``spans`` of what a store locates);
    of pieces with more tokens than the prefix the first are used. ``buffers`` serve again once this returns. ``order``
    says in which order the pieces go over the link.

    A link that dies costs time, never the answer: the result is then that of a full prefill, and says so.
    Raises RequestError for a group or piece that is not there, CacheError for a piece that does not fit the model.
    """
    start, depth = time.perf_counter(), model.config.num_hidden_layers
    everything = Group(0, depth)
    if schedule is Schedule.RECOMPUTE:
        group = everything
    sent = sent_pieces(pieces, group.check(depth), depth, schedule, order)
    _check_fit(model, prefix, sent)
    transfer = Transfer(sent, link, buffers or Buffers(sent, prefix.ids.device))
    try:
        with transfer:
            return _received(model, prefix, transfer, group, suffix, schedule, start)
    except LinkError as error:
        nothing = Transfer([], link, Buffers([]))
        result = _received(model, prefix, nothing, everything, suffix, Schedule.RECOMPUTE, start)
        result.marks.bytes_moved = transfer.bytes_moved
        return replace(result, fell_back=str(error))


def _received(
    model: PreTrainedModel,
    prefix: Prefix,
    transfer: Transfer,
    group: Group,
    suffix: Tensor,
    schedule: Schedule,
    start: float,
) -> FirstToken:
    marks = ReuseMarks()
    # masks and rotary tables of both passes: made while the first piece is on its way
    forward, behind = Forward(model, prefix), Forward(model, prefix.followed_by(suffix), new=suffix.shape[1])
    cache = cache_of([None] * forward.depth)
    if schedule is not Schedule.PIPELINED:
        for piece in transfer.pieces:
            transfer.wait(piece.name)
    if len(group):
        hidden = forward.embed()
        if group.needs_e_cache:
            hidden = transfer.wait(e_cache_name(group.lo))[:, : prefix.tokens]
            marks.edge_s = transfer.arrival_s(e_cache_name(group.lo)) - start
        marks.recompute_start_s = time.perf_counter() - start
        forward.run(hidden, group.layers, cache)
        marks.recompute_end_s = _done(prefix) - start

    def receive(layer: int, _: Tensor) -> None:
        if layer not in group:
            fill(cache, layer, LayerKV(*transfer.wait(layer_name(layer))[..., : prefix.tokens, :]))

    logits = behind.logits(behind.run(behind.embed(), range(behind.depth), cache, receive)[:, -1])
    marks.first_token_s = _done(prefix) - start
    if transfer.pieces:
        marks.last_byte_s = transfer.arrival_s(transfer.pieces[-1].name) - start
    marks.bytes_moved = transfer.bytes_moved
    return FirstToken(logits, cache, marks)


def _done(prefix: Prefix) -> float:
    """The time once the current stream is empty: not the device, whose copies from the link go on beside it."""
    if prefix.ids.is_cuda:
        torch.cuda.current_stream(prefix.ids.device).synchronize()
    return time.perf_counter()


def _check_fit(model: PreTrainedModel, prefix: Prefix, sent: Sequence[CachePiece]) -> None:
    """Raise CacheError for the first piece that is of another shape or dtype than the model computes."""
    shape = KVShape.of(model.config, model.dtype)
    for piece in sent:
        length = max(piece.shape[-2], prefix.tokens)
        kv, hidden = (2, 1, shape.kv_heads, length, shape.head_dim), (1, length, model.config.hidden_size)
        check_shape(model, piece.name, piece, kv if piece.name.startswith("layer") else hidden)
