"""One start of a replica, in a process of its own.

``python -m firsttoken_studies.nb56_a_start_that_borrows.borrow_trial SPEC``

Prints one line of JSON. The request arrives when the libraries are imported; every time is in seconds from then on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from firsttoken.engine.accelerator import build_model
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.petals.timeouts import Timeouts
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.study.dtypes import DTYPES, named
from firsttoken.study.system.cgroup_limits import stay_on
from firsttoken_extras.layer_borrowing.arrivals import follow
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.replica import CONFIG, BorrowingReplica, as_they_come
from firsttoken_studies.nb56_a_start_that_borrows.borrow_spec import BORROWED, BorrowSpec, StartSpec
from firsttoken_studies.probes.fast_exit import tell_and_end
from firsttoken_studies.progressiveserve.coldstart.trial_variants import tokenize
from firsttoken_studies.progressiveserve.coldstart.variants import VARIANTS

Lenders: TypeAlias = "Callable[[int], Sequence[Lender]]"
"""Who lends layers of a model of so many."""


def main(spec: BorrowSpec) -> dict[str, Any]:
    """Run the trial and return its row."""
    prepare(spec)

    def neighbour(depth: int) -> list[Lender]:
        return [Lender(spec.neighbour, range(depth))]

    return start(spec, time.perf_counter(), neighbour if spec.variant == BORROWED else None)


def prepare(spec: StartSpec) -> None:
    """Prepare the process before the request arrives: keep to its cores and import its libraries."""
    stay_on(spec.cores)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    import grpc  # noqa: F401
    import tokenizers  # noqa: F401


def start(
    spec: StartSpec, arrived: float, lenders: Lenders | None = None, timeouts: Timeouts | None = None
) -> dict[str, Any]:
    """The row of a start for a request that has ``arrived`` (``time.perf_counter``), borrowing where there are
    ``lenders``: they are asked for when own layers have begun to come. ``ends_s``: when what nobody lends was there."""
    prompt = tokenize(spec, VARIANTS["whole_streamed"])[0].tolist()
    folder, link = Path(spec.staged), Link(LinkConfig(spec.gbit_per_s))
    manifest = read_manifest(folder)
    meta_model = MetaModel(
        folder, manifest, spec.device, named(spec.dtype) if spec.dtype in DTYPES else None, build_model
    )
    load = StageLoad(
        folder, manifest, [1], [link], meta_model, meta_model.empty_view(), threads=spec.readers, verify=False
    )
    load.view.activate(meta_model.model)
    blocks = -(-(len(prompt) + spec.tokens) // 16) + 1
    local_segments = [LocalSegment(load.view.layers)]
    executor = LiveExecutor(meta_model.model, blocks, segments=local_segments, device=meta_model.device, touched=False)
    with torch.inference_mode():
        if lenders is not None:
            config = meta_model.model.config
            depth, name = config.num_hidden_layers, neighbours_name(folder, manifest)
            arrivals = follow(load, depth)
            lease = Lease(lenders(depth), name, depth, config.hidden_size, timeouts=timeouts)
            rule = (lambda come, _: spec.taken[come]) if spec.taken else as_they_come
            replica = BorrowingReplica(executor, load.view.layers, arrivals, lease, take_over=rule)
            built = time.perf_counter()
            arrivals.wait(lease.first)
            end_s = time.perf_counter()
            request, more = _borrowed(replica, prompt, spec.tokens, arrived)
            more |= {"built_s": built - arrived, "ends_s": end_s - arrived}
            replica.close()
        else:
            with load.streaming():
                request, more = _owned(executor, prompt, spec.tokens)
            executor.close()
    load.wait()
    up = time.monotonic() - time.perf_counter()  # between the clocks
    return {
        "ttft_request_s": request.times_s[0] - arrived,
        "ttft_process_s": request.times_s[0] + up - spec.spawned_s,
        "arrived_at_s": arrived + up,
        "loaded_s": load.arrived_s - arrived - up,
        "bytes": link.bytes_moved,
        "prompt_tokens": len(prompt),
        "tokens": list(request.output),
        "times_s": [time_s - arrived for time_s in request.times_s],
        **more,
    }


def _owned(executor: LiveExecutor, prompt: list[int], tokens: int) -> tuple[Request, dict[str, Any]]:
    engine = Engine(executor, CONFIG)
    request = engine.submit(prompt, Sampling(tokens))
    engine.run()
    return request, {"taken": [], "local_s": None, "lent_steps": 0, "lent_bytes": 0, "gone": ""}


def _borrowed(
    replica: BorrowingReplica, prompt: list[int], tokens: int, arrived: float
) -> tuple[Request, dict[str, Any]]:
    request = replica.submit(prompt, Sampling(tokens))
    replica.run()
    replica.settle()
    taken = [(time_s - arrived, layers) for time_s, layers in replica.taken]
    lease = replica.lease
    columns = {"taken": taken, "local_s": taken[-1][0], "lent_steps": lease.steps, "lent_bytes": lease.moved_bytes}
    return request, columns | {"gone": lease.gone}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    tell_and_end({"variant": arguments["variant"]} | main(BorrowSpec(**arguments)))
