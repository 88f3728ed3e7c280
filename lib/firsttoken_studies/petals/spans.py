"""What the experiments on real servers share: a model as its folder, its spans, and what it says in this process."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import Loaded, load_model
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.petals.access import Access
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study import paths
from firsttoken.study.errors import SwarmError
from firsttoken.study.profile import Profile
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.fleet import ServerProcess
from firsttoken_studies.record import kernel_forkserver

_TOGETHER_S, _PAUSE_S = 60.0, 0.02
IMPORTS = ("firsttoken.options", "transformers.models.llama.modeling_llama")  # of a server that starts


def split_evenly(depth: int, servers: int) -> list[str]:
    """``depth`` blocks as ``servers`` spans a:b, as even as they can be."""
    edges = [depth * server // servers for server in range(servers + 1)]
    return [f"{a}:{b}" for a, b in pairwise(edges)]


@contextmanager
def running(
    folder: Path, spans: Sequence[str], trains: bool = False, threads: int = 0
) -> Iterator[list[ServerProcess]]:
    """Run a server process of each span, the first of which knows all. Raises SwarmError for one that does not start,
    and when they do not come together."""
    ups: list[ServerProcess] = []
    try:
        for span in spans:
            ups.append(
                ServerProcess(folder, span, [ups[0].ready().address] if ups else [], trains=trains, threads=threads)
            )
        for up in ups:
            up.ready()
        wait_for(_known(model_sha256(folder), ups))
        yield ups
    finally:
        for up in ups:
            up.close()


async def _known(model: str, ups: Sequence[ServerProcess]) -> None:
    """Wait until the first server has heard of all."""
    swarm, until = Swarm(model, [ups[0].address], 1, Access(), Timeouts()), time.monotonic() + _TOGETHER_S
    while len(swarm.servers()) < len(ups):
        if time.monotonic() > until:
            raise SwarmError(f"{len(swarm.servers())} of {len(ups)} servers came together")
        await swarm.refresh()
        await asyncio.sleep(_PAUSE_S)
    await swarm.close()


@contextmanager
def stored(profile: Profile) -> Iterator[tuple[Path, Loaded]]:
    """The model of ``profile`` in a folder of its own, stored in bfloat16, and loaded from there in float32, which all
    members compute in: what is rounded once is the same for all."""
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    loaded = load_model(profile.model, dtype=torch.bfloat16)
    with kernel_forkserver.warmed(IMPORTS), tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="swarm-") as folder:
        with quiet_transformers():
            loaded.model.save_pretrained(folder)
        own_model = load_model(folder, with_tokenizer=False)
        yield Path(folder), Loaded(own_model.model, loaded.tokenizer, loaded.provenance)


def prompt_of(loaded: Loaded, tokens: int, seed: int) -> list[int]:
    """The beginning of the held-out text; random ids for a model without a tokenizer."""
    if loaded.tokenizer is None:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(loaded.model.config.vocab_size, (tokens,), generator=draw).tolist()
    return token_windows(running_text("test"), loaded.tokenizer, tokens, 1)[0].tolist()


@contextmanager
def local_engine(model: nn.Module, tokens: int) -> Iterator[Engine]:
    """The engine over all blocks in this process, fused as servers fuse theirs, its head packed as a client's."""
    fused = LocalSegment([accelerator().fuse_layer(layer) for layer in layers_of(model)])
    executor = LiveExecutor(model, -(-tokens // 16), segments=[fused])
    executor.version.decoder.pack_head()
    try:
        yield Engine(executor)
    finally:
        executor.close()


def timed_steps(
    engine: Engine, prompt: Sequence[int], tokens: int, before: Any = None
) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of ``engine`` and the seconds of each step; ``before`` (token's place) is called before
    each."""
    request, seconds = engine.submit(prompt, Sampling(tokens)), []
    while not request.finished:
        if before is not None:
            before(len(request.output))
        with Stopwatch() as watch:
            engine.step()
        seconds.append(watch.seconds)
    return request.output, seconds
