"""What is saved and what is added: the bytes of the removed block and the parameters of the adapters, by arithmetic.

Models are built on the meta device, so that the 7-billion-parameter shapes cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.shapes import shape_config
from firsttoken.progressiveserve.healing import attach
from firsttoken.progressiveserve.recipe import REPORT
from firsttoken.progressiveserve.stages import REPORT_PLAN, StagePlan
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows

SHAPES = ("llama-2-7b", "tinyllama-1.1b", "qwen2.5-0.5b", "smollm2-135m")
PUBLISHED_START_S = 114  # the whole model, from the creation of the process to the first token (report, 2.4.1)


def sizes(_: Profile) -> Outcome:
    """A quarter of the layers removed from each named shape: share of the bytes, and the report's adapters."""
    provenance = {"source": "public model dimensions", "kind": "arithmetic"}
    return Outcome([size_row(shape) for shape in SHAPES], provenance=provenance)


def sizes_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """The report's model, Llama-2-7B: its bytes and the rate at which the report brought them, its block in % of the
    bytes, its adapters in million parameters."""
    (report,) = [row for row in rows if row["shape"] == SHAPES[0]]
    model, depth, gbit = SHAPES[0], report["depth_layers"], 8e-9 * report["fp16_bytes"]
    summary = Summary()
    summary.add("block_bytes_pct", {"value": round(report["block_bytes_pct"], 2), "unit": "% of bytes"}, model=model)
    summary.add("weights_gb", {"value": report["fp16_bytes"] / 1e9, "unit": "GB"}, model=model, dtype="fp16")
    summary.add("link_gbit_per_s", {"value": gbit / PUBLISHED_START_S, "unit": "Gbit/s"}, source="published")
    for adapter, layers in (("a", depth - report["block_layers"]), ("all", depth)):
        millions = round(report[f"adapter_{adapter}_params"] / 1e6, 2)
        summary.add("adapter_params", {"value": millions, "unit": "million parameters"}, model=model, layers=layers)
    return summary


def size_row(shape: str) -> dict[str, Any]:
    """Parameters and shares of one named shape, with the report's block where it is the report's model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=torch.float16)
    depth = len(layers_of(model))
    size = round(depth / 4)
    plan = REPORT_PLAN if depth == REPORT_PLAN.depth else StagePlan.from_block(depth, range(depth - size, depth))
    total = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for i in plan.block for p in layers_of(model)[i].parameters())
    adapters = {name: _lora_parameters(shape, layers) for name, layers in (("a", plan.a), ("all", range(depth)))}
    return {
        "shape": shape,
        "depth_layers": depth,
        "block_layers": len(plan.block),
        "parameters": total,
        "fp16_bytes": 2 * total,
        "block_layers_pct": 100 * len(plan.block) / depth,
        "block_bytes_pct": 100 * block / total,
        **{f"adapter_{name}_params": count for name, count in adapters.items()},
    }


def _lora_parameters(shape: str, layers: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=torch.float16)
        peft = attach(model, REPORT, list(layers))
    return sum(p.numel() for p in peft.parameters() if p.requires_grad)
