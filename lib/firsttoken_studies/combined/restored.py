"""A stored prefix comes over a link, in the engine beside running requests, and alone: what either side pays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.pipeline.live import first_token, pieces_of, sent_pieces
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.pipeline.transfer import Buffers
from firsttoken.droidspeak.prefill import Group, full_prefill
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.study.errors import LinkError
from firsttoken.study.record import Rows
from firsttoken_studies.droidspeak.wire import random_request

PLAIN_STEPS = 40


def over_a_link(
    model: PreTrainedModel,
    served: PreTrainedModel,
    folder: Path,
    *,
    tokens: int,
    group: Group,
    gbit_per_s: float,
    running: int,
    new_tokens: int,
    budget: int,
    rounds: int,
) -> Rows:
    """Rows {round, alone_s, beside_s, tbt_s, plain_tbt_s} of a prefix of ``tokens`` tokens kept in ``folder``.

    ``alone_s`` is the pipelined first token with nobody else there, ``beside_s`` the same in the engine beside
    ``running`` requests; ``tbt_s`` the 99th percentile of these requests' times between tokens meanwhile, and
    ``plain_tbt_s`` that of steps before in which they only decode. ``served`` is ``model`` as the engine runs it. It is
    its own sender: bytes and operations are those of any other of its shape. Raises LinkError when the link fails.
    """
    prefix, suffix = random_request(model, tokens, torch.Generator().manual_seed(0))
    identity = identify(model, None, "one model")
    context = prefix.ids[0].tolist()
    sent = full_prefill(model, prefix, {group.lo} if group.needs_edge else set())
    room = 2 * (sum(kv.nbytes for kv in sent.kv) + sum(edge.nbytes for edge in sent.edges.values()))
    store = KVStore(folder, memory_bytes=0, disk_bytes=room)
    store.store(context, identity, sent)
    pieces = pieces_of(store.locate(context, identity, group.lo if group.needs_edge else None))
    link = LinkConfig(gbit_per_s)
    buffers = Buffers(sent_pieces(pieces, group, model.config.num_hidden_layers, Schedule.PIPELINED))
    config = EngineConfig(scheduler="sarathi", watermark=0.0, requests=running + 1, token_budget=budget)
    blocks = running * -(-(16 + new_tokens) // 16) + -(-(tokens + 16) // 16)
    asked = [*context, *suffix[0].tolist()]
    rows: Rows = []
    with closing(LiveExecutor(served, blocks)) as executor:
        for number in range(-1, rounds):  # the first to warm up
            told = first_token(model, prefix, pieces, group, Link(link), suffix, Schedule.PIPELINED, buffers=buffers)
            engine = Engine(executor, config)
            others = [engine.submit([other + 1] * 16, Sampling(new_tokens)) for other in range(running)]
            while not all(len(request.times_s) > PLAIN_STEPS for request in others):
                engine.step()
            plain = _gaps(others, [PLAIN_STEPS // 2] * running)
            begun = [len(request.times_s) - 1 for request in others]
            source = StoredPrefix(store, asked, sender=identity, receiver=identity, group=group, link=Link(link))
            request = engine.submit(asked, Sampling(1), source=source)
            while not request.finished:
                engine.step()
            if request.fell_back:
                raise LinkError(f"the prefix was computed after all: {request.fell_back}")
            row = {"round": number, "alone_s": told.marks.first_token_s, "beside_s": request.ttft_s}
            meanwhile = _gaps(others, begun)
            row |= {"tbt_s": float(np.percentile(meanwhile, 99)), "plain_tbt_s": float(np.percentile(plain, 99))}
            for other in others:
                engine.cancel(other)
            if number >= 0:
                rows.append(row)
    return rows


def _gaps(requests: Sequence[Request], first: Sequence[int]) -> np.ndarray:
    """Seconds between tokens of each of ``requests`` from its token number ``first`` on."""
    return np.concatenate([np.diff(request.times_s[n:]) for request, n in zip(requests, first, strict=True)])
