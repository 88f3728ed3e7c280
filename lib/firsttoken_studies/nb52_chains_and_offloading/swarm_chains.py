"""Table 3 at this scale: measured layers and offloading, chains over the paper's networks, its own numbers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check
from firsttoken.petals.routing import Hop, Reachable, best_chain, chain_s
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch, timed
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BLOCKS,
    BLOOM_BYTES,
    BLOOM_HIDDEN,
    HEAD,
    NETWORKS,
    OFFLOADING_GBIT_PER_S,
    PUBLISHED_SERVERS,
    PUBLISHED_STEPS_PER_S,
    block_seconds,
    bloom_block,
    clients_step_s,
    crossover_bytes,
    decode_step,
    fourteen,
    offload_s,
    offloaded,
    published_compute_s,
    swarm_s,
    twelve,
)
from firsttoken_studies.probes.pagecache import evict
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

SLOW = "100 Mbit/s, 100 ms"
NODE_BYTES = 8e9
ADAM_BYTES = 2 + 2 + 4 + 4 + 4  # a parameter: weight, gradient, and in 32 bits a copy and two moments
RAM, DISK = "memory", "disk"
BLOOM, OFFLOADING = "bloom-176b", "offloading"
BOUNDS_GBIT_PER_S = 256, 128  # of offloading, that a chain is held to


@dataclass(frozen=True)
class ChainsConfig:
    """Steps after ``contexts`` tokens, ``repeats`` times, offloading from disk ``disk_repeats`` times; forward passes
    of ``forwards`` rows of ``forward_tokens``; as many simulated ``clients``; a block of BLOOM ``block_hidden`` wide in
    each of ``block_bits``, ``block_repeats`` times. ``model`` overrides the profile's ("" keeps it). ProfileError for
    none.
    """

    contexts: tuple[int, ...]
    repeats: int
    disk_repeats: int
    forwards: tuple[int, ...]
    forward_tokens: int
    clients: int
    block_hidden: int
    block_bits: tuple[int, ...]
    block_repeats: int
    model: str = ""

    def __post_init__(self) -> None:
        counts = (self.repeats, self.disk_repeats, self.forward_tokens, self.clients, self.block_repeats)
        if min(*self.contexts, *self.forwards, *counts) < 1:
            raise ProfileError("chains: every number must be at least 1")
        if self.block_hidden < HEAD or self.block_hidden % HEAD:
            raise ProfileError(f"chains.block_hidden must be a multiple of {HEAD}, not {self.block_hidden}")
        if 8 not in self.block_bits or not set(self.block_bits) <= {8, 16}:
            raise ProfileError("chains.block_bits must be [8], or [8, 16] where there is memory for both")

    def needs(self) -> list[Need]:
        """Require a context that holds the longest prompt and a step."""
        longest = max(*self.contexts, self.forward_tokens) + 1
        return [Need("chains.contexts", longest, CONTEXT)]


def swarm_chains(profile: Profile, *, search: Callable[..., Any] = best_chain) -> Outcome:
    """Rows {what: step | forward | offload, repeat, seconds, ...} of this model, {what: simulated, ...} of BLOOM.

    Simulated clients find their chain by ``search``, the library's or a function (servers, blocks) that returns seconds
    and [(server's name, first block, end)]; of such a one {what: search, round_trips} says what it counts of a chain of
    three servers.
    """
    config = profile.section("chains", ChainsConfig)
    name, longest = config.model or profile.model, max(*config.contexts, config.forward_tokens) + 1
    check(config.needs(), ModelFacts(name))
    loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device(), with_tokenizer=False)
    model = loaded.model
    draw = torch.Generator().manual_seed(profile.seed)
    ids = torch.randint(model.config.vocab_size, (1, longest), generator=draw).to(model.device)
    rows: Rows = []
    with torch.inference_mode():
        for context in config.contexts:
            step = decode_step(model, ids[:, : context + 1])
            seconds = timed(step, repeats=config.repeats, warmup=2, device=ids.device)
            rows += [{"what": "step", "context": context, "repeat": n, "seconds": s} for n, s in enumerate(seconds)]
        for count in config.forwards:
            batch, repeats = ids[:, : config.forward_tokens].expand(count, -1), max(1, config.repeats // 10)
            seconds = timed(partial(model.model, batch, use_cache=False), repeats=repeats, device=ids.device)
            columns = {"rows": count, "tokens": config.forward_tokens}
            rows += [{"what": "forward", **columns, "repeat": n, "seconds": s} for n, s in enumerate(seconds)]
    rows += _offloading(model, ids[:, : config.contexts[0] + 1], config)
    rows += [*_simulated(config, search), *_blocks(config, profile)]
    if search is not best_chain:
        seconds, _ = search(_threes_and_twelves(), BLOOM_BLOCKS)
        rows.append({"what": "search", "round_trips": round(seconds, 3)})
    shape = {"hidden": model.config.hidden_size, "layers": len(layers_of(model))}
    return Outcome([{"what": "shape", **shape}, *rows], provenance=loaded.provenance.as_dict())


def _offloading(model: nn.Module, ids: Tensor, config: ChainsConfig) -> Rows:
    """Steps with all layers brought, and how long bringing alone takes."""
    rows: Rows = []
    paths.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.CACHE, prefix="offloaded-") as folder:
        for storage, repeats, file in (
            (RAM, config.repeats, None),
            (DISK, config.disk_repeats, Path(folder) / "layers"),
        ):
            with offloaded(model, file) as resting, torch.inference_mode():
                cache = model.model(ids[:, :-1], use_cache=True).past_key_values
                for repeat in range(-1, repeats):  # the first only warms up
                    how = evict(file) if file else "copied in memory"
                    with Stopwatch(ids.device) as watch:
                        model.model(ids[:, -1:], past_key_values=cache, use_cache=True)
                    cache.crop(-1)
                    how = evict(file) if file else how
                    with Stopwatch(ids.device) as bringing:
                        resting.bring_all()
                    row = {"what": "offload", "from": storage, "repeat": repeat, "seconds": watch.seconds}
                    row |= {"bringing_s": bringing.seconds, "bytes": resting.step_bytes, "how": how}
                    rows += [row] if repeat >= 0 else []
    return rows


def _blocks(config: ChainsConfig, profile: Profile) -> Iterator[dict[str, Any]]:
    """Seconds of a token in one block of BLOOM after the first of the contexts, by the bits of its weights."""
    for bits in config.block_bits:
        block = bloom_block(config.block_hidden, profile.torch_dtype(), profile.torch_device(), bits)
        seconds = block_seconds(block, config.contexts[0], config.block_repeats)
        yield from ({"what": "block", "bits": bits, "repeat": n, "seconds": s} for n, s in enumerate(seconds))


def _threes_and_twelves() -> list[Reachable]:
    """Three servers of a third of the blocks each, and twelve of a twelfth, who compute in no time and are a second
    away."""
    edges = {count: [BLOOM_BLOCKS * part // count for part in range(count + 1)] for count in (PUBLISHED_SERVERS, 12)}
    return [
        Reachable(f"{first} to {stop}", range(first, stop), 1.0, 1e12)
        for borders in edges.values()
        for first, stop in pairwise(borders)
    ]


def _found(search: Callable[..., Any], servers: Sequence[Reachable]) -> list[Hop]:
    """The chain through all blocks that ``search`` finds."""
    if search is best_chain:
        return best_chain(servers, range(BLOOM_BLOCKS))
    by_name, (_, path) = {server.name: server for server in servers}, search(servers, BLOOM_BLOCKS)
    return [Hop(by_name[name], range(first, end)) for name, first, end in path]


def _simulated(config: ChainsConfig, search: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Seconds of a step of BLOOM with clients at once, on the 14 servers and on the 12 of the slow network."""
    for swarm, servers in (("fourteen", fourteen()), ("twelve", twelve(NETWORKS[SLOW]))):
        chain = _found(search, servers)
        for clients in dict.fromkeys((1, config.clients)):
            seconds = clients_step_s(chain, clients)
            row = {"what": "simulated", "swarm": swarm, "clients": clients, "hops": len(chain), "seconds": seconds}
            yield row | {"alone_s": chain_s(chain)}


def chains_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """This model: steps a second by context and network through three servers, beside offloading, forward passes, and
    where both cross. BLOOM: the paper's arithmetic, its slow row foreseen from its fast one and from blocks measured
    here, simulated clients."""
    (shape,) = rows_where(rows, what="shape")
    summary, hidden = _published(), shape["hidden"]
    for context, steps in frame_of(rows, what="step").groupby("context", sort=False):
        summary.by(steps, {}, {"step_s": ("seconds", "median", "s")}, context_tokens=context)
        for network in NETWORKS:
            rate = bootstrap(
                steps.seconds, lambda sample, network_link=network: 1 / _swarm_s(sample, hidden, network_link)
            )
            summary.add("steps_per_s", rate.summary("steps/s"), context_tokens=context, link=network)
    for origin, steps in frame_of(rows, what="offload").groupby("from", sort=False):
        labels_of_ratio = {"variant": OFFLOADING, "machine": origin}
        rate = bootstrap(steps.bytes / steps.bringing_s / 1e9, "median")
        summary.by(steps, {}, {"step_s": ("seconds", "median", "s")}, **labels_of_ratio)
        summary.add("bringing_gb_per_s", rate.summary("GB/s"), **labels_of_ratio)
        for network, link in NETWORKS.items():
            size = crossover_bytes(8 * rate.estimate, PUBLISHED_SERVERS, hidden, link)
            summary.add("crossover_gb", {"value": size / 1e9, "unit": "GB"}, machine=origin, link=network)
    for (count, length), passes in frame_of(rows, what="forward").groupby(["rows", "tokens"], sort=False):
        tokens = int(count * length)
        for network in NETWORKS:
            rate = bootstrap(
                passes.seconds, lambda s, n=tokens, network_link=network: n / _swarm_s(s, hidden, network_link, n)
            )
            summary.add("forward_tokens_per_s", rate.summary("tokens/s"), batch=count, link=network)
    for bits, passes in frame_of(rows, what="block").groupby("bits", sort=False):
        origin = {"model": BLOOM, "bits": bits}
        summary.by(passes, {}, {"block_s": ("seconds", "median", "s")}, **origin)
        for network, gbit in product(NETWORKS, BOUNDS_GBIT_PER_S):
            step_s = offload_s(BLOOM_BYTES, gbit)
            speedup = bootstrap(  # of a step through all blocks of BLOOM on three servers as fast as this machine
                passes.seconds,
                lambda s, by=step_s, network_link=network: by / _swarm_s(BLOOM_BLOCKS * s, BLOOM_HIDDEN, network_link),
            ).summary("x")
            labels_of_ratio = {"link": network, "source": "measured", "than": OFFLOADING, "gbit_per_s": gbit}
            summary.add("steps_per_s_x", speedup, **origin, **labels_of_ratio)
    for row in rows_where(rows, what="simulated"):
        slower = 100 * (1 - row["alone_s"] / row["seconds"])
        origin = {"model": BLOOM, "source": "simulated", "case": row["swarm"], "clients": row["clients"]}
        summary.add("steps_per_s", {"value": 1 / row["seconds"], "unit": "steps/s"}, **origin)
        summary.add("slower_pct", {"value": slower, "unit": "%"}, than="alone", **origin)
    return summary


def _swarm_s(seconds: np.ndarray, hidden: int, network: str, tokens: int = 1) -> float:
    return swarm_s(float(np.median(seconds)), PUBLISHED_SERVERS, hidden, NETWORKS[network], tokens)


def _published() -> Summary:
    """Summarize what follows from the paper's numbers alone."""
    summary, reckoned = Summary(), {"model": BLOOM, "source": "arithmetic"}
    summary.add("weights_gb", {"value": 2 * BLOOM_BYTES / 1e9, "unit": "GB"}, bits=16, **reckoned)
    for bits in (16, 8):
        nodes = math.ceil(bits / 8 * BLOOM_BYTES / NODE_BYTES)
        summary.add("nodes", {"value": nodes, "unit": "nodes"}, bits=bits, **reckoned)
    summary.add("adam_tb", {"value": ADAM_BYTES * BLOOM_BYTES / 1e12, "unit": "TB"}, **reckoned)
    for link, gbit in OFFLOADING_GBIT_PER_S.items():
        seconds = {"value": offload_s(BLOOM_BYTES, gbit), "unit": "s"}
        summary.add("step_s", seconds, variant=OFFLOADING, link=link, **reckoned)
    for network, published in PUBLISHED_STEPS_PER_S.items():
        seconds = swarm_s(published_compute_s(), PUBLISHED_SERVERS, BLOOM_HIDDEN, NETWORKS[network])
        labels = {"model": BLOOM, "link": network}
        for source, rate in (("foreseen", 1 / seconds), ("published", published)):
            summary.add("steps_per_s", {"value": rate, "unit": "steps/s"}, source=source, **labels)
        for gbit in BOUNDS_GBIT_PER_S:
            entry = {"value": offload_s(BLOOM_BYTES, gbit) / seconds, "unit": "x"}
            summary.add("steps_per_s_x", entry, source="foreseen", than=OFFLOADING, gbit_per_s=gbit, **labels)
    return summary
