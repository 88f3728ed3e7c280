"""The lengths of prompts and answers, and the times at which requests come.

Lengths are drawn from a sample (the paper's own where it was brought, a fit to what it states of it, or the pinned
conversations) with Poisson arrivals, or replayed from a trace of a real service.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.workload_items import Arrivals, Item
from firsttoken.simulation.costs.tables import number, rows
from firsttoken.simulation.workload.conversations import conversations
from firsttoken.simulation.workload.traces import RequestTrace
from firsttoken.study.errors import CorpusError

PINNED = "sharegpt"
_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")  # of a table of lengths


@dataclass(frozen=True)
class StatedLengths:
    """Median and 90th percentile of prompt and answer in tokens as a paper has them, and the most of both together."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    most: int

    def drawn(self, count: int = 8192) -> np.ndarray:
        """(prompt, answer) tokens [count, 2] of lognormal distributions with these two quantiles, none above ``most``
        together: those that are longer are drawn again. Always the same."""
        draw, pairs_drawn = np.random.default_rng(0), np.empty((0, 2), int)
        while len(pairs_drawn) < count:
            columns = [
                np.exp(draw.normal(np.log(median), np.log(p90 / median) / _P90, count))
                for median, p90 in (self.prompt, self.answer)
            ]
            pairs = np.maximum(np.rint(np.column_stack(columns)), 1).astype(int)
            pairs_drawn = np.concatenate([pairs_drawn, pairs[pairs.sum(1) <= self.most]])
        return pairs_drawn[:count]


STATED = {  # Sarathi-Serve, Table 2
    "openchat-sharegpt4-fit": StatedLengths((1730, 5696), (415, 834), 8192),
    "arxiv-summarization-fit": StatedLengths((7059, 12985), (208, 371), 16384),
}
_P90 = 1.2815515594  # deviations from the median of a normal distribution to its 90th percentile


def lengths(source: str) -> np.ndarray:
    """(prompt, answer) tokens [n, 2] of ``source``: ``PINNED``, one of ``STATED``, a file that was brought, or a path.

    Raises AssetError for what is not there, CorpusError for a file without num_prefill_tokens and num_decode_tokens.
    """
    if source == PINNED:
        pool = conversations(None)
        return np.column_stack([pool.prompt_tokens, pool.output_tokens])
    if source in STATED:
        return STATED[source].drawn()
    path = downloaded(source)
    table = next(iter(sorted(path.glob("*.csv"))), path) if path.is_dir() else path
    pairs = [[int(number(table, line, row, name, least=1)) for name in _COLUMNS] for line, row in rows(table, _COLUMNS)]
    return np.array(pairs)


def workload(pairs: np.ndarray, count: int, seed: int, rate_per_s: float) -> tuple[Item, ...]:
    """``count`` requests with lengths drawn from ``pairs`` and Poisson arrivals; a seed's draws are the same at every
    rate, closer together. Raises CorpusError when there are fewer."""
    if count > len(pairs):
        raise CorpusError(f"{len(pairs):,} conversations are there and {count:,} asked for; ask for fewer")
    sample = pairs[np.random.default_rng(seed).choice(len(pairs), size=count, replace=False)].tolist()
    times = (Arrivals(1.0, seed=seed).times_s(count) / rate_per_s).tolist()
    return tuple(
        Item(time_s, prompt, answer, (0,) * prompt) for time_s, (prompt, answer) in zip(times, sample, strict=True)
    )


def replayed(trace: RequestTrace, count: int, seed: int, rate_per_s: float) -> tuple[Item, ...]:
    """``count`` requests that follow each other in ``trace`` (all, where it has fewer) with their own lengths, the gaps
    between them stretched to ``rate_per_s`` on average; where the stretch begins is drawn by ``seed``.

    Raises CorpusError for requests that all come at once: their gaps cannot be stretched.
    """
    count = min(count, len(trace.items))
    begin = int(np.random.default_rng(seed).integers(len(trace.items) - count + 1))
    taken = trace.items[begin : begin + count]
    first_s = taken[0].arrival_s
    if not (span_s := taken[-1].arrival_s - first_s):
        raise CorpusError(f"{count:,} requests of the trace come at once, and no rate spreads them; use a longer trace")
    faster = span_s * rate_per_s / (count - 1)
    return tuple(
        Item((request.arrival_s - first_s) / faster, request.prompt_tokens, request.output_tokens, trace.prompt(index))
        for index, request in enumerate(taken, begin)
    )
