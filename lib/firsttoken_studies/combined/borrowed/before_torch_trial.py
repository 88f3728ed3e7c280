"""One start that borrows before torch is imported: ``python -m firsttoken_studies.combined.borrowed.before_torch_trial
SPEC``.

Prints one line of JSON. Times are in seconds from when numpy and gRPC are imported, but ``ttft_process_s`` is from the
creation of the process.
"""

from __future__ import annotations

import time

INTERPRETER_UP = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import grpc  # noqa: E402, F401

from firsttoken.lean.lean_config import OtherWay  # noqa: E402
from firsttoken.link.shaped import Link, LinkConfig  # noqa: E402
from firsttoken.study.system.cgroup_limits import stay_on  # noqa: E402
from firsttoken.study.system.fast_exit import tell_and_end  # noqa: E402
from firsttoken_extras.layer_borrowing.before_torch import EndsWeights, LentLayers, LentModel  # noqa: E402
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name  # noqa: E402
from firsttoken_extras.layer_borrowing.lender import Lender, Lending, OpenSession  # noqa: E402
from firsttoken_extras.layer_borrowing.torch_behind import BorrowedAnswer  # noqa: E402
from firsttoken_studies.combined.borrowed.spec import BORROWED, BorrowSpec  # noqa: E402
from firsttoken_studies.progressiveserve.coldstart.spec import prompt_ids  # noqa: E402


def main(spec: BorrowSpec) -> dict[str, Any]:
    """Run the trial and return its row; with torch first, after a line on stderr, for a model that needs torch."""
    stay_on(spec.cores)
    arrived, folder, link = time.monotonic(), Path(spec.staged), Link(LinkConfig(spec.gbit_per_s))
    threads = spec.threads or None
    try:
        weights = EndsWeights(folder, [link], dtype=spec.dtype, readers=spec.readers, threads=threads, verify=False)
    except OtherWay as reason:
        print(f"firsttoken: {folder.name} starts with torch: {reason}", file=sys.stderr)
        from firsttoken_studies.combined.borrowed import trial

        row = trial.main(replace(spec, variant=BORROWED))
        return row | {"torch_at_first_token": True, "before_torch": 0}
    config, manifest = weights.packer.config, weights.manifest
    lender = Lender(spec.neighbour, range(config.num_hidden_layers))
    lent = LentLayers(Lending(lender, neighbours_name(folder, manifest), config.hidden_size))
    session, prompt = lent.session, prompt_ids(spec)
    answer = BorrowedAnswer(LentModel(weights, lent, len(prompt) + spec.tokens, threads), [link])
    said, times, torch_there = [], [], False
    for token in answer.answer(prompt, spec.tokens):
        torch_there = torch_there if said else "torch" in sys.modules
        said.append(token)
        times.append(time.monotonic())
    load = answer.made().load
    load.wait()
    return _lent(answer, session, arrived) | {
        "ttft_request_s": times[0] - arrived,
        "ttft_process_s": times[0] - spec.spawned_s,
        "arrived_at_s": arrived,
        "loaded_s": load.arrived_s - arrived,
        "torch_at_first_token": torch_there,
        "before_torch": answer.tokens or len(said),
        "bytes": link.bytes_moved,
        "prompt_tokens": len(prompt),
        "tokens": said,
        "times_s": [at - arrived for at in times],
    }


def _lent(answer: BorrowedAnswer, session: OpenSession, arrived: float) -> dict[str, Any]:
    """When ``answer`` took layers over, since it ``arrived``, and what was lent; all is ended."""
    replica, lent = answer.replica, answer.model.lent
    if replica is None:  # all was said before torch was there
        answer.close()
        told = {"lent_steps": session.call.steps, "lent_bytes": session.call.moved_bytes, "gone": lent.gone}
        return told | {"taken": [], "local_s": None}
    replica.settle()
    answer.close()
    between = time.monotonic() - time.perf_counter()  # the clocks
    taken = [(at + between - arrived, layers) for at, layers in replica.taken]
    lease = replica.lease
    told = {"lent_steps": lease.steps, "lent_bytes": lease.moved_bytes, "gone": lease.gone}
    return told | {"taken": taken, "local_s": taken[-1][0]}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    tell_and_end({"variant": asked["variant"]} | main(BorrowSpec(**asked)))
