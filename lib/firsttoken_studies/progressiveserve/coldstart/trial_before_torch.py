"""A trial whose first token is there before torch: numpy and the kernels say it, and an engine takes the answer over.

Nothing but the standard library is imported with this file.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from firsttoken.study.system.direct_io import read_ahead
from firsttoken.study.system.footprint import MemoryGrowth, cpu_seconds
from firsttoken_studies.progressiveserve.coldstart.spec import PhaseClock, TrialSpec

ANSWER, LAST = 160, 8  # tokens, of which the last wait for the engine, where a small model is quicker than the import


def start_before_torch(spec: TrialSpec, marks: PhaseClock) -> dict[str, Any] | None:
    """The row of a trial of the plain folder; None, after a line on stderr, for a model that needs torch.

    The answer goes on behind the first token, and is held against what the engine says alone. Raises ModelError for a
    folder that cannot be served.
    """
    for file in sorted(Path(spec.stock).glob("*.safetensors")):
        threading.Thread(target=read_ahead, args=(file,), daemon=True).start()
    from firsttoken.assets.servable import check_servable
    from firsttoken.engine.numpy_model import NumpyModel
    from firsttoken.engine.torch_behind import Takeover
    from firsttoken.lean.lean_config import OtherWay
    from firsttoken.lean.tokenizer import read_tokenizer

    marks.phase("imports")
    arrived, used, growth = marks.last, cpu_seconds(), MemoryGrowth()
    try:
        model = NumpyModel(check_servable(Path(spec.stock)), threads=spec.threads or None)
        if spec.dtype not in ("stored", model.dtype):
            raise OtherWay(f"it computes in {model.dtype}, and {spec.dtype} is asked for")
    except OtherWay as reason:
        print(f"firsttoken: {Path(spec.stock).name} starts with torch: {reason}", file=sys.stderr)
        return None
    ids = list(range(1, spec.prompt_tokens + 1))
    if spec.prompt:
        ids = read_tokenizer(Path(spec.stock)).encode(spec.prompt).ids
    marks.phase("config and tokenizer")
    takeover = Takeover(model)
    answer = takeover.answer(ids, ANSWER)
    said = [next(answer)]
    marks.phase("prefill")
    row = {
        "token_id": said[0],
        "torch_at_first_token": "torch" in sys.modules,
        "ttft_process_s": marks.last - spec.spawned_s,
        "ttft_request_s": marks.last - arrived,
        "cpu_s": cpu_seconds() - used,
        **{f"phase_{name.replace(' ', '_')}_s": seconds for name, seconds in marks.phases.items()},
        "lean": "transformers" not in sys.modules,
    }
    row["growth_bytes"] = growth.bytes()
    last, gaps = marks.last, []
    for token in answer:
        said.append(token)
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
        if len(said) == ANSWER - LAST:
            engine = takeover.engine()
    return row | {
        "torch_s": takeover.ready_s - spec.spawned_s,
        "tokens_before_torch": takeover.tokens,
        "takeover_s": takeover.took_s,
        "longest_gap_s": max(gaps),
        "answer_s": last - spec.spawned_s,
        "same_answer": said == _alone(engine, ids),
    }


def _alone(engine: Any, ids: list[int]) -> list[int]:
    """What ``engine`` says after ``ids`` where it computes everything."""
    from firsttoken.engine.request import Sampling

    request = engine.submit(ids, Sampling(ANSWER))
    while not request.finished:
        engine.step()
    return request.output
