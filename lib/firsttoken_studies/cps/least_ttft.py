"""The least mean TTFT that any policy could have on a workload that a pool cannot hold at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firsttoken.engine.costs.published import PAPER_SHAPE
from firsttoken.engine.workload.items import Item

PAPER_TPOT_MS = 36.55  # mean TPOT of CPS (4.2.2), to which the price of a decode step is set
BOUND = "bound"  # policy and costs of a row that no run made


def least_mean_ttft_s(items: Sequence[Item], blocks: int, step_s: float) -> float:
    """A bound on the mean TTFT of requests that all arrive at once, whatever the policy, where a step takes ``step_s``.

    A request holds prompt + k tokens in its k-th step, and a pool of C tokens serves at most C token-steps a step, so
    the i-th request to end cannot end before the i smallest needs are served. A mean TTFT is the mean end less the mean
    time from first token to last, taken as a step for each token between them: ``step_s`` is the TPOT, and a request
    that waits between two tokens has a longer one. Shorter steps with long waits in between lower the bound.
    """
    capacity = blocks * PAPER_SHAPE.block_tokens
    needs = sorted(sum(range(item.prompt_tokens, item.total_tokens)) for item in items)
    ends = np.cumsum(needs) / capacity
    return max(0.0, float(ends.mean() - np.mean([item.output_tokens - 1 for item in items]))) * step_s


def bound_row(items: Sequence[Item], blocks: int) -> dict[str, Any]:
    """The bound on the mean TTFT of a workload as a row like those of its runs."""
    least_s = least_mean_ttft_s(items, blocks, PAPER_TPOT_MS / 1e3)
    return {"costs": BOUND, "policy": BOUND, "decode_ms": PAPER_TPOT_MS, "mean_ttft_ms": least_s * 1e3}
