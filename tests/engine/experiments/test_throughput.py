"""The throughput table: what it measures with, and a vLLM that answers in turn or fails."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from interpreters import answering

from firsttoken.engine.accelerator import fuse
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError
from firsttoken_studies.nb20_the_engine import throughput
from firsttoken_studies.nb20_the_engine.throughput import _Case, _Vllm

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8] * 12]
ANSWERS = """
import json, sys
print("a line that is no answer")
print(json.dumps({"vllm": "9.9", "threads": 2}), flush=True)
for _ in sys.stdin:
    print(json.dumps({"seconds": 1.0, "tokens": [[1, 2], [3, 4]]}), flush=True)
"""


@pytest.fixture
def case(llama) -> _Case:
    model = copy.deepcopy(llama.model)
    return _Case(copy.deepcopy(model), fuse(model), PROMPTS, 6, "float32")


@pytest.fixture
def vllm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in the place of vLLM's interpreter."""

    def make(script: str) -> None:
        monkeypatch.setattr(throughput, "VLLM_PYTHON", answering(tmp_path, script))
        monkeypatch.setattr(paths, "CACHE", tmp_path)

    return make


def test_every_way_says_the_same(case: _Case) -> None:
    names = ["generate", "generate_fused", "engine_stock", "engine"]
    rows = throughput._timed({name: throughput._SYSTEMS[name](case) for name in names}, 18, 2, seed=0)
    assert sorted(row["system"] for row in rows) == sorted(2 * names)
    assert {row["same_tokens"] for row in rows} == {1.0}
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_the_floor_reads_every_weight_once_for_each_token(case: _Case) -> None:
    tied = copy.deepcopy(case.stock)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    whole = sum(parameter.nbytes for parameter in case.stock.parameters())
    assert throughput._weight_bytes(case.stock) == whole
    assert throughput._weight_bytes(tied) == whole - tied.lm_head.weight.nbytes, "a weight of two layers counts once"
    answers = throughput._weights_read(case)
    assert answers.tokens == [] and answers.step_ms > 0


def test_a_step_stands_beside_its_floor(case: _Case) -> None:
    systems = {name: throughput._SYSTEMS[name](case) for name in (throughput.FLOOR, "generate", "engine")}
    rows = [{"dtype": "float32", "requests": 3} | row for row in throughput._timed(systems, 18, 2, seed=0)]
    summary = throughput.throughput_summary(rows, {})
    at = {"dtype": "float32", "requests": 3}
    steps = {row["system"]: row["step_ms"] for row in rows if row["repeat"] == 0 and "step_ms" in row}
    assert set(steps) == {throughput.FLOOR, "engine"}
    assert summary.get("step_ms", engine="engine", **at)["n"] == 2
    shares = [steps[throughput.FLOOR] / steps["engine"]]
    shares += [row["step_ms"] for row in rows if row["repeat"] == 1 and row["system"] == throughput.FLOOR]
    shares[1] /= next(row["step_ms"] for row in rows if row["repeat"] == 1 and row["system"] == "engine")
    assert summary.value("step_of_floor", engine="engine", **at) == pytest.approx(sum(shares) / 2)


def test_the_model_is_as_it_was_afterwards(case: _Case) -> None:
    before = case.stock.config._attn_implementation
    throughput._SYSTEMS["engine"](case)()
    assert case.fused.config._attn_implementation == case.stock.config._attn_implementation == before


def test_vllm_answers_in_turn(vllm_is, case: _Case, tmp_path: Path) -> None:
    vllm_is(ANSWERS)
    asked = _Vllm(case)
    assert asked.versions == {"version": "9.9"}
    assert [asked().tokens, asked().tokens] == [[[1, 2], [3, 4]]] * 2
    asked.close()
    assert not list(tmp_path.glob("vllm-*"))


def test_a_vllm_that_fails_says_why(vllm_is, case: _Case) -> None:
    vllm_is("import sys; sys.exit('no such device')")
    with pytest.raises(FirstTokenError, match="vLLM failed: no such device"):
        _Vllm(case)


def test_without_vllm_s_environment_it_says_what_to_run(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "VLLM_PYTHON", Path("nowhere/python"))
    with pytest.raises(FirstTokenError, match="environment is missing"):
        _Vllm(case)
