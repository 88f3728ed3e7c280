"""One window of a replica that starts cold under load, in a process of its own:

    python -m firsttoken_studies.nb61_five_at_once.trial SPEC

Prints one line of JSON. The first request arrives when the libraries are imported; every time is in seconds from then.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption import PreemptionPolicy
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.progressiveserve.staged_serving.stage_versions import FusedBeside, StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain
from firsttoken.study.dtypes import named
from firsttoken.study.system.cgroup_limits import stay_on
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals, follow
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.prefix_offer import PrefixOffer
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica
from firsttoken_studies.probes.fast_exit import tell_and_end

STAGES, BORROWING, CHUNKS, CROSS_POINT, FOREIGN = "ProgressiveServe", "PETALS", "Sarathi-Serve", "CPS", "DroidSpeak"
IDEAS = (STAGES, BORROWING, CHUNKS, CROSS_POINT, FOREIGN)
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class WindowSpec:
    """The window of an arm that has ``ideas``.

    ``staged`` holds the model in the report's stages, ``ends_first`` whole, its ends first; either comes over
    ``gbit_per_s`` (0: at once) by ``readers``. The file ``workload`` holds the requests. ``store`` holds the prefixes
    of ``sender``, of which layers ``group`` are computed again and hidden states are kept at ``edges``; they come over
    ``prefix_gbit_per_s``. ``neighbour`` is the lender's address. At most ``requests`` run in ``blocks`` KV blocks with
    four times as many on the host, in steps of ``token_budget`` tokens where prompts are cut. A request that has not
    ended after ``limit_s`` is cancelled. All compute in ``dtype``.
    """

    ideas: tuple[str, ...]
    staged: str
    ends_first: str
    workload: str
    store: str
    sender: Mapping[str, Any]
    receiver: Mapping[str, Any]
    group: tuple[int, int]
    edges: tuple[int, ...]
    gbit_per_s: float
    prefix_gbit_per_s: float
    neighbour: str
    requests: int
    blocks: int
    token_budget: int
    limit_s: float
    readers: int
    threads: int
    cores: tuple[int, ...]
    dtype: str


class ColdReplica(Protocol):
    """A replica that serves while it starts: it borrows layers, or has its own alone."""

    engine: Engine

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling = ...,
        arrival_s: float | None = None,
        *,
        offer: PrefixOffer | None = None,
    ) -> Request:
        """Take a request that has arrived at ``arrival_s``, with what a sender has of how it begins."""

    def step(self) -> list[tuple[Request, int]]:
        """Take over layers or a stage that has come, and process one batch."""

    def close(self) -> None:
        """Give back the leases and memory that the replica holds."""


class StagedReplica:
    """A replica that computes with a stage of its model as soon as that is whole and fused, and moves open requests to
    the next stage between two steps. At each stage a request takes the whole of what a sender offers, and computes the
    group again."""

    def __init__(
        self, executor: LiveExecutor, first: StageView, config: EngineConfig, policy: PreemptionPolicy
    ) -> None:
        self._executor, self._fused = executor, FusedBeside()
        executor.version = self._last = self._version(first)
        self._last.decoder.pack_head()
        self.engine = Engine(executor, config, policy=policy)
        self.stages: queue.SimpleQueue[StageView | Exception] = queue.SimpleQueue()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        arrival_s: float | None = None,
        *,
        offer: PrefixOffer | None = None,
    ) -> Request:
        """Take a request that moves with the stages. Raises RequestError as ``Engine.submit``."""
        source = None if offer is None else offer.source_of(offer.group)
        return self.engine.submit(prompt, sampling, arrival_s, moves=True, source=source)

    def step(self) -> list[tuple[Request, int]]:
        """Take over a stage that has come, and process one batch. Raises what ended the load."""
        while not self.stages.empty():
            came = self.stages.get()
            if isinstance(came, Exception):
                raise came
            version = self._version(came)
            version.decoder.share_head(self._last.decoder)
            self._last = version
            if lost := self.engine.publish(version, moving(PrefillAgain())):
                raise lost[0][1]
        return self.engine.step()

    def _version(self, stage: StageView) -> StagedModelVersion:
        version = StagedModelVersion(self._executor.model, stage, PrefillAgain())
        for _ in version.fuse_beside(self._fused):
            pass
        return version

    def close(self) -> None:
        """Give the model its own attention back, and end the swap path's threads."""
        self._executor.close()


def main(spec: WindowSpec) -> dict[str, Any]:
    """Serve the window and return its row; ``tokens`` are the answers."""
    stay_on(spec.cores)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    import grpc  # noqa: F401

    requests = json.loads(Path(spec.workload).read_text(encoding="utf-8"))
    used, begun = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        replica, loaded = started(spec)
        served = serve(replica, requests, offers(spec), begun, spec.limit_s)
    ended = time.perf_counter()
    row = seen(served, begun, ended - begun)
    row |= {"replica_s": time.process_time() - used, "ended_s": ended - begun, "loaded_s": loaded() - begun}
    replica.close()
    return row


def started(spec: WindowSpec) -> tuple[ColdReplica, Callable[[], float]]:
    """The replica as soon as it can answer, or be asked to wait for its neighbour, and what tells when all of the model
    was here (``time.perf_counter``; waits for it)."""
    borrows, stages = BORROWING in spec.ideas, STAGES in spec.ideas
    folder = Path(spec.staged if stages and not borrows else spec.ends_first)
    manifest, link = read_manifest(folder), Link(LinkConfig(spec.gbit_per_s))
    meta_model = MetaModel(folder, manifest, "cpu", named(spec.dtype), build_model)

    def load_of(stage: int, previous: StageView) -> StageLoad:
        options = {"threads": spec.readers, "verify": False}
        return StageLoad(folder, manifest, [stage], [link], meta_model, previous, **options)

    load = load_of(1, meta_model.empty_view())
    load.view.activate(meta_model.model)
    up = time.perf_counter() - time.monotonic()  # between the clocks
    cross_point = CROSS_POINT in spec.ideas
    if not borrows:
        load.wait()  # before the executor takes memory: a request needs it all
    executor = LiveExecutor(
        meta_model.model,
        spec.blocks,
        block_tokens=BLOCK_TOKENS,
        host_blocks=4 * spec.blocks if cross_point else 0,
        device=meta_model.device,
    )
    config = engine_config(spec.ideas, spec.token_budget, spec.requests)
    policy = make_policy("online" if cross_point else "recompute")
    if borrows:
        depth, width = meta_model.model.config.num_hidden_layers, meta_model.model.config.hidden_size
        name = neighbours_name(folder, manifest)
        arrivals = follow(load, depth) if stages else all_at_once(load, depth)
        lease = Lease([Lender(spec.neighbour, range(depth))], name, depth, width)

        def arrived() -> float:
            load.wait()
            return load.arrived_s + up

        return BorrowingReplica(executor, load.view.layers, arrivals, lease, config, policy=policy), arrived
    replica, times = StagedReplica(executor, load.view, config, policy), [load.arrived_s]

    def bring() -> None:
        previous = load.view
        try:
            for stage in range(2, len(manifest.stages) + 1):
                more = load_of(stage, previous)
                previous = more.wait()
                times.append(more.arrived_s)
                replica.stages.put(previous)
        except Exception as error:
            replica.stages.put(error)

    bringing = threading.Thread(target=bring, name="firsttoken-stages", daemon=True)
    bringing.start()

    def whole() -> float:
        bringing.join()
        return times[-1] + up

    return replica, whole


def engine_config(ideas: Sequence[str], token_budget: int, requests: int) -> EngineConfig:
    """Return the engine's settings in an arm that has ``ideas``."""
    scheduler = "sarathi" if CHUNKS in ideas else "prefill_first"
    return EngineConfig(scheduler=scheduler, token_budget=token_budget, requests=requests, watermark=0.0)


def all_at_once(load: StageLoad, depth: int) -> LayerArrivals:
    """The arrivals of a ``load`` whose layers are taken over together, when the last of them has come."""
    arrivals = LayerArrivals(depth)

    def watch() -> None:
        try:
            load.await_part(0)
            arrivals.come()
            load.wait()
            arrivals.come(depth)
        except Exception as error:
            arrivals.fail(error)

    threading.Thread(target=watch, name="firsttoken-arrivals", daemon=True).start()
    return arrivals


def offers(spec: WindowSpec) -> Callable[[Mapping[str, Any]], PrefixOffer | None]:
    """Return the function that gives the sender's offer for a request of the workload: None where the request has no
    stored prefix, or the arm takes none."""
    if FOREIGN not in spec.ideas:
        return lambda request: None
    store = KVStore(Path(spec.store), memory_bytes=0, disk_bytes=1 << 40, block_tokens=BLOCK_TOKENS)
    between = {"sender": ModelIdentity(**spec.sender), "receiver": ModelIdentity(**spec.receiver)}
    link = Link(LinkConfig(spec.prefix_gbit_per_s))

    def offer(request: Mapping[str, Any]) -> PrefixOffer | None:
        if not request["stored"]:
            return None

        def source_of(group: Group) -> StoredPrefix:
            return StoredPrefix(store, request["prompt"], **between, group=group, link=link)

        return PrefixOffer(Group(*spec.group), spec.edges, source_of)

    return offer


def serve(
    replica: ColdReplica,
    requests: Sequence[Mapping[str, Any]],
    offer: Callable[[Mapping[str, Any]], PrefixOffer | None],
    begun: float,
    limit_s: float,
) -> list[Request | None]:
    """Serve requests {prompt, new_tokens, arrival_s, ...} from ``begun`` on, on the clock of the replica's executor;
    None for those that had not arrived when the window was over."""
    served: list[Request | None] = [None] * len(requests)
    following, clock = 0, replica.engine.executor
    while following < len(requests) or replica.engine.busy:
        now = clock.now() - begun
        if now > limit_s:
            break
        while following < len(requests) and requests[following]["arrival_s"] <= now:
            next_request = requests[following]
            sampling, arrival_s = Sampling(next_request["new_tokens"]), begun + next_request["arrival_s"]
            served[following] = replica.submit(next_request["prompt"], sampling, arrival_s, offer=offer(next_request))
            following += 1
        if replica.engine.busy:
            replica.step()
        else:
            clock.wait_until(begun + requests[following]["arrival_s"])
    for request in served:
        if request is not None:
            replica.engine.cancel(request)
    return served


def seen(served: Sequence[Request | None], begun: float, ended_s: float) -> dict[str, Any]:
    """Return what clients saw, lists by request: the first and the last token, P99 of the gaps between tokens (None
    where there is none), preemptions and the answers; ``tbt_p99_s`` is the P99 of all gaps of the window.

    A request that was still being answered when the window was over after ``ended_s`` has a gap from the last token to
    then.
    """
    times = [[] if request is None else [time_s - begun for time_s in request.times_s] for request in served]
    gaps = [
        np.diff(
            [*times_of_request, ended_s]
            if times_of_request and len(times_of_request) < request.sampling.max_tokens
            else times_of_request
        )
        for request, times_of_request in zip(served, times, strict=True)
    ]
    every = np.concatenate(gaps)
    return {
        "first_s": [round(times_of_request[0], 4) if times_of_request else None for times_of_request in times],
        "last_s": [round(times_of_request[-1], 4) if times_of_request else None for times_of_request in times],
        "gap_p99_s": [
            round(float(np.percentile(times_of_request, 99)), 4) if len(times_of_request) else None
            for times_of_request in gaps
        ],
        "tbt_p99_s": round(float(np.percentile(every, 99)), 4) if len(every) else None,
        "preemptions": [0 if request is None else request.preemptions for request in served],
        "own_prefill": [request is not None and bool(request.fell_back) for request in served],
        "tokens": [[] if request is None else request.output for request in served],
    }


if __name__ == "__main__":
    tell_and_end(main(WindowSpec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
