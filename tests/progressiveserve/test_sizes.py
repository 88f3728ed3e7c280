"""Sizes by arithmetic: the shares and adapter sizes of named shapes, worked out by hand."""

from __future__ import annotations

import pytest

from firsttoken_studies.nb11_which_layers_can_wait.sizes import size_row, sizes_summary

HIDDEN, MLP = 4096, 11008
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * MLP + 2 * HIDDEN
ADAPTER_LAYER = 8 * (4 * 2 * HIDDEN + 3 * (HIDDEN + MLP))  # rank 8: in and out of seven projections


def test_llama_2_7b_as_the_report_prunes_it():
    row = size_row("llama-2-7b")
    total = 32 * LAYER + 2 * 32_000 * HIDDEN + HIDDEN
    assert (row["parameters"], row["fp16_bytes"]) == (total, 2 * total)
    assert (row["block_layers"], row["block_layers_pct"]) == (8, 25)
    assert row["block_bytes_pct"] == pytest.approx(100 * 8 * LAYER / total)
    assert (row["adapter_a_params"], row["adapter_all_params"]) == (24 * ADAPTER_LAYER, 32 * ADAPTER_LAYER)


def test_another_shape_loses_a_quarter_of_its_layers():
    row = size_row("tiny-8")
    assert (row["depth_layers"], row["block_layers"], row["block_layers_pct"]) == (8, 2, 25)
    assert row["block_bytes_pct"] < 25, "embeddings and the final norm stay"
    assert row["adapter_a_params"] * 8 == row["adapter_all_params"] * 6


def test_the_summary_is_of_the_reports_model_alone():
    shares = {"block_bytes_pct": 24.027, "adapter_a_params": 14_991_360, "adapter_all_params": 19_988_480}
    shares |= {"fp16_bytes": 14_250_000_000, "depth_layers": 32, "block_layers": 8}
    rows = [{"shape": "smollm2-135m"}, {"shape": "llama-2-7b"} | shares]
    summary = sizes_summary(rows, {})
    assert [entry["value"] for entry in summary] == [24.03, 14.25, 1.0, 14.99, 19.99]
    assert [entry["where"]["layers"] for entry in summary.all("adapter_params", model="llama-2-7b")] == [24, 32]
