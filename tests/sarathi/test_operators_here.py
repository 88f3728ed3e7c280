"""Published operators beside those of a card at hand: which card, which sizes, how far apart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from changed_mechanisms import rings

from firsttoken.simulation.costs.operator_tables import OperatorTables
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken_studies import ledger
from firsttoken_studies.nb42_the_simulator_and_a_gpu import operators_here as study
from firsttoken_studies.nb48_measured_on_a_gpu import study as shown

CPU = torch.device("cpu")


def test_another_card_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    study._check_card("h200-sxm", torch.device("cuda"))
    with pytest.raises(ProfileError, match=r"h100-sxm is not the GPU here, which is 'NVIDIA H200'; name its own card"):
        study._check_card("h100-sxm", torch.device("cuda"))
    study._check_card("h100-sxm", CPU)  # which only tries the code


def test_products_are_drawn_from_the_table_once_and_fit_a_card():
    tables = OperatorTables.read("h200-sxm")
    drawn = list(study._drawn(tables, 200, random.Random(0)))
    assert len({point[:3] for point in drawn}) > 190  # a size may have been measured by two kernels
    assert all(n * k <= study._LARGEST and m * max(n, k) <= study._LARGEST for m, n, k, _ in drawn)
    assert drawn == list(study._drawn(tables, 200, random.Random(0)))


def test_a_measured_size_is_the_tables_own():
    """Of several kernels the fastest; between two sizes a power of the rows."""
    tables = OperatorTables.read("h200-sxm")
    (sizes, seconds), _ = tables.product("bfloat16", 4096, 4096)
    assert study._published_s(tables, int(sizes[3]), 4096, 4096) == pytest.approx(seconds[3])
    between = study._published_s(tables, int(sizes[-2] + sizes[-1]) // 2, 4096, 4096)
    assert seconds[-2] < between < seconds[-1]


def test_what_is_timed_takes_time():
    assert study._product_s(4, 64, 32, torch.float32, CPU, 2) > 0
    kernel, seconds = study._attention_s(16, (4, 2, 32), torch.float32, CPU, 2)
    assert kernel in {one.name for one in study._KERNELS}
    assert seconds > 0


def test_the_summary_says_how_far_the_published_times_are():
    rows = [{"what": study.PREFILL, "published_us": 80.0 + n, "here_us": 100.0} for n in range(5)]
    summary = study.operators_here_summary(rows, {})
    where = {"case": study.PREFILL, "costs": study.OPERATORS, "than": study.GPU_HERE}
    assert summary.value("off_pct", **where, across="median") == pytest.approx(18)
    assert summary.value("off_pct", **where, across="mean") == pytest.approx(-18)
    assert summary.value("off_pct", **where, across="worst") == pytest.approx(20)


def test_the_record_of_a_gpu_is_shown_beside_the_processor(monkeypatch):
    lines = list(shown.beside_rows(ledger.claims()))
    assert all(line[shown.RECORDED_ON] != "not measured" for line in lines)
    assert not any("yours" in line for line in lines)
    assert [line["report"] for line in lines if "257" in line["what"]] == ["1.32 x"], "as the ledger has it"
    recorded, now = shown.on_a_gpu("operators_here")
    assert recorded is now
    assert np.isfinite(recorded.duration_s)
    with pytest.raises(FirstTokenError, match="layer_profile was not recorded on nvidia-h200; recorded there: machine"):
        shown.on_a_gpu("layer_profile")


def test_a_changed_swap_is_ringed_beside_the_one_that_is_reckoned():
    cps, machine = (shown.on_a_gpu(name)[0] for name in ("recovery_latency", "machine"))
    assert not rings(shown.recovery(cps, cps, machine, shown.swap_s))
    (dearer,) = rings(shown.recovery(cps, cps, machine, lambda *prices: 2 * shown.swap_s(*prices)))
    measured, prices = shown.block_by_block(cps, machine)
    assert 2e3 * shown.swap_s(1024, *prices) == pytest.approx(dearer[2 * list(measured.index).index(1024) + 2])
