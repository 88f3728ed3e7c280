"""How long prompts and answers are: the paper's own sample where it was brought, else the pinned conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from firsttoken.assets.brought import brought
from firsttoken.engine.costs.tables import number, rows
from firsttoken.engine.workload.arrivals import Arrivals
from firsttoken.engine.workload.conversations import conversations
from firsttoken.engine.workload.items import Item
from firsttoken.study.errors import CorpusError

PINNED = "sharegpt"


def lengths(source: str) -> np.ndarray:
    """(prompt, answer) tokens [n, 2] of ``source``: ``PINNED``, the name of a file that was brought, or a path.

    Raises AssetError for what is not there, CorpusError for a file without num_prefill_tokens and num_decode_tokens.
    """
    if source == PINNED:
        pool = conversations(None)
        return np.column_stack([pool.prompt_tokens, pool.output_tokens])
    path = brought(source)
    table = next(iter(sorted(path.glob("*.csv"))), path) if path.is_dir() else path
    return np.array([_pair(table, line, row) for line, row in rows(table, ("num_prefill_tokens", "num_decode_tokens"))])


def workload(pairs: np.ndarray, count: int, seed: int, rate_per_s: float) -> tuple[Item, ...]:
    """``count`` requests with lengths drawn from ``pairs`` and Poisson arrivals; a seed's draws are the same at every
    rate, closer together. Raises CorpusError when there are fewer."""
    if count > len(pairs):
        raise CorpusError(f"{len(pairs):,} conversations are there and {count:,} asked for; ask for fewer")
    drawn = pairs[np.random.default_rng(seed).choice(len(pairs), size=count, replace=False)].tolist()
    times = (Arrivals(1.0, seed=seed).times_s(count) / rate_per_s).tolist()
    return tuple(Item(at, prompt, answer, (0,) * prompt) for at, (prompt, answer) in zip(times, drawn, strict=True))


def _pair(path: Path, line: int, row: dict[str, str]) -> tuple[int, int]:
    names = "num_prefill_tokens", "num_decode_tokens"
    prompt, answer = (int(number(path, line, row, name, least=1)) for name in names)
    return prompt, answer
