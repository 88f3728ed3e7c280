"""Files of requests: traces, conversations, and their copy in the cache."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from gpu_profiles import write_profile

from firsttoken.simulation.costs.profiled import ProfiledCosts
from firsttoken.simulation.workload.conversations import _load, first_pairs
from firsttoken.simulation.workload.traces import load_trace
from fuzzing import mutators
from fuzzing.property import Format
from fuzzing.studies import sound

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{i:02}.009930+00:00,{100 + i},{i + 1}\n" for i in range(9)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 * i},ChatGPT,{400 + i},{i + 1},{401 + 2 * i},API log\n" for i in range(9)
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 * i, "input_length": 60 + i, "output_length": i + 1, "hash_ids": [i]}) + "\n"
    for i in range(9)
)
TURNS = [{"from": who, "value": said} for who, said in (("human", "Who is it?"), ("gpt", "It is I."))]
SHAREGPT = json.dumps([{"id": str(i), "conversations": TURNS} for i in range(4)])


def trace(folder: Path) -> list[tuple[Any, ...]]:
    return [astuple(item) for item in load_trace(folder / "trace.csv").items]


def legal_trace(intact: Any, found: list[tuple[Any, ...]]) -> bool:
    """A trace may hold any requests: times that do not run back, tokens that a service may count."""
    times = [item[0] for item in found]
    return sound(found) and times == sorted(times) and all(0 < n <= 10**8 for item in found for n in item[1:3])


def make_kept(folder: Path) -> None:
    ids, starts = np.arange(12, dtype=np.int32), np.array([0, 5, 12])
    np.savez(folder / "kept.npz", ids=ids, starts=starts, output_tokens=np.array([4, 6]))


def kept(folder: Path) -> list[list[int]] | None:
    found = _load(folder / "kept.npz")
    return None if found is None else [found.ids.tolist(), found.starts.tolist(), found.output_tokens.tolist()]


def priced(folder: Path) -> list[float]:
    """Seconds of some steps: a prompt, decodes, both, and more of them than were profiled."""
    costs = ProfiledCosts.read(folder, layers=2)
    return [costs.step_s(*step) for step in (([(16, 40)], []), ([], [30, 50]), ([(0, 9)], [16]), ([], [64] * 20))]


FORMATS = (
    *(
        Format(
            name,
            lambda folder, text=text: (folder / "trace.csv").write_text(text),
            ("trace.csv",),
            trace,
            legal=legal_trace,
        )
        for name, text in (("azure", AZURE), ("burstgpt", BURST), ("mooncake", MOONCAKE))
    ),
    # text is data, and a list may break off behind any of its records
    Format(
        "sharegpt",
        lambda folder: (folder / "s.json").write_text(SHAREGPT),
        ("s.json",),
        lambda folder: first_pairs(folder / "s.json"),
        legal=lambda intact, found: sound(found),
    ),
    # a table may hold any measurement
    Format(
        "gpu profile",
        write_profile,
        ("attention.csv", "dense.csv", "per_sequence.csv", "meta.yaml"),
        priced,
        legal=lambda intact, found: sound(found),
    ),
    # what is damaged there is made again, by None
    Format("conversations", make_kept, ("kept.npz",), kept, mutators.BYTES, legal=lambda intact, found: found is None),
)
