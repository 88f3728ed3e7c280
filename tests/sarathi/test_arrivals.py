"""`firsttoken capacity --arrivals FILE`: the requests of a trace, at the rates that the search tries."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from firsttoken.__main__ import USAGE, main
from firsttoken.simulation.lengths import replayed
from firsttoken.simulation.workload.traces import load_trace
from firsttoken.study.errors import CorpusError


@pytest.fixture
def bailian(tmp_path: Path) -> Path:
    """200 requests, 10 s apart on average, two of them longer than any KV cache here."""
    rng, now, lines = random.Random(0), 0.0, []
    for number in range(200):
        now += rng.expovariate(0.1)
        row = {"chat_id": number, "parent_chat_id": -1, "timestamp": round(now, 3), "type": "text", "turn": 1}
        tokens = 10**6 if number % 100 == 50 else rng.randint(100, 1500)
        lines.append(json.dumps(row | {"input_length": tokens, "output_length": 20, "hash_ids": [number]}))
    path = tmp_path / "qwen_traceA_blksz_16.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_stretch_of_the_trace_comes_at_another_rate(bailian: Path) -> None:
    trace = load_trace(bailian)
    for seed in range(5):
        slow, fast = (replayed(trace, 50, seed, rate) for rate in (1.0, 4.0))
        assert 49 / slow[-1].arrival_s == pytest.approx(1.0) and 49 / fast[-1].arrival_s == pytest.approx(4.0)
        lengths = [(item.prompt_tokens, item.output_tokens) for item in slow]
        begin = [(item.prompt_tokens, item.output_tokens) for item in trace.items].index(lengths[0])
        there = trace.items[begin : begin + 50]
        assert lengths == [(item.prompt_tokens, item.output_tokens) for item in there]
        own = [item.arrival_s - there[0].arrival_s for item in there]
        assert [item.arrival_s for item in slow] == pytest.approx([at * 49 / own[-1] for at in own])
    assert len({replayed(trace, 50, seed, 1.0)[0].prompt_tokens for seed in range(5)}) > 1
    assert len(replayed(trace, 500, 0, 1.0)) == 200
    with pytest.raises(CorpusError, match="come at once"):
        replayed(replace(trace, items=trace.items[:1]), 50, 0, 1.0)


def test_the_command_says_what_it_replays(bailian: Path, capsys) -> None:
    found = ["capacity", "--scheduler", "sarathi 512", "--profile", "quick", "--set", "capacity.requests=32"]
    assert main([*found, "--seeds", "2", "--arrivals", str(bailian)]) == 0
    said = capsys.readouterr().out
    assert f"{bailian}: a trace of Alibaba Bailian, times in s: 200 requests over" in said
    assert "32 requests a draw of a trace of Alibaba Bailian, times in s: 198 requests over" in said
    assert "2 of 200 requests left out: each has more than the 128,000 tokens that the KV blocks hold" in said
    assert "n=2  this run  sarathi 512\nat that rate all requests came within" in said, "32 of them are a burst"
    assert said.endswith("\nnothing is recorded for this trace\n")
    assert "lengths of" not in said


def test_a_trace_in_doubt_is_asked_about_and_the_answer_taken(tmp_path: Path, capsys) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 20 * n, "input_length": 1500, "output_length": 30} for n in range(16)]
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = ["capacity", "--scheduler", "sarathi 512", "--profile", "quick", "--seeds", "2", "--arrivals", str(path)]
    assert main(asked) == USAGE
    assert "say unit s or ms (--arrivals-unit)" in capsys.readouterr().err
    assert main([*asked, "--arrivals-unit", "s"]) == 0
    said = capsys.readouterr().out
    assert "times in s: 16 requests over 300 s" in said and "n=1" in said, "there is but one draw of it"
    assert main([*asked[:-2], "--arrivals-unit", "s"]) == USAGE
