"""Servers of mixtures: which published runs are taken, and what becomes of one that no table covers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb46_on_the_stated_gpus import operator_error as study
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import (
    MixtureRun,
    ServerRun,
    mixture_error,
    mixture_runs,
)

HEAD = "backend,mode,system,model_path,gemm_quant_mode,isl,osl,batch_size,tp_size,moe_tp_size,moe_ep_size,"
HEAD += "silicon_ttft_ms,silicon_tpot_ms\n"
ROW = "vllm,agg,h200_sxm,MiniMaxAI/MiniMax-M2.5,fp8,1024,512,8,4,4,1,100,10\n"


@dataclass
class Constant(Costs):
    """Every step takes a second."""

    blocks: int = 10_000
    beyond: tuple[str, ...] = ()

    def step_s(self, prefills, contexts):
        return 1.0

    swap_out_s = swap_in_s = None


@pytest.fixture
def runs(tmp_path, monkeypatch):
    path = tmp_path / "runs.csv"
    monkeypatch.setattr(study, "asset_path", lambda name: path)

    def written(text):
        path.write_text(HEAD + text)
        return mixture_runs()

    return written


def test_a_run_has_its_layout(runs):
    (run,) = runs(ROW)
    assert run == MixtureRun(ServerRun("h200-sxm", "minimax-m2.5", "fp8_block", 4, 1024, 512, 8, 100.0, 10.0), 4, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm", "sglang"),
        (",agg,", ",disagg,"),
        ("h200_sxm", "b300_sxm"),
        ("MiniMax-M2.5", "MiniMax-M3"),
        (",fp8,", ",nvfp4,"),
        (",8,4,4,1,", ",8,4,1,16,"),  # attention of four batches apart
    ],
)
def test_other_runs_are_left_out(runs, old, new):
    assert runs(ROW.replace(old, new)) == []


def test_a_run_that_no_table_covers_is_counted(monkeypatch):
    server = ServerRun("h200-sxm", "minimax-m2.5", "fp8_block", 4, 64, 4, 1, 2000.0, 1000.0)
    monkeypatch.setattr(study, "mixture_runs", lambda: [MixtureRun(server, split, 1) for split in (4, 8, 8)])

    def costs(tables, shape, split, spread, *, routing):
        if split == 8:
            raise ProfileError("no experts split 8 ways")
        return Constant()

    monkeypatch.setattr(study, "mixture_costs", costs)
    found = mixture_error(load_profile("full"))
    assert [(row["source"], row["tpot_ms"]) for row in found.rows] == [("vllm", 1000.0), ("simulated", 1000.0)]
    assert found.rows[1]["ttft_ms"] == pytest.approx(1000) and found.rows[1]["latency_ms"] == pytest.approx(4000)
    assert found.provenance["left_out"] == "2 runs: no experts split 8 ways"
