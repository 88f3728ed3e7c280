"""The tables of notebook 12: stages beside the authors' scores, gates, shares recovered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.progressive.figures import KIISE, NAMES
from firsttoken.progressive.gates import GATES, gate
from firsttoken.study.record import Result
from firsttoken.study.show import interval, table

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


def stage_rows(result: Result, live: Result | None = None) -> list[Row]:
    """One row a variant: EM, F1, choices, perplexity with 95 % intervals; EM of the live run and of the authors."""
    rows = []
    for variant in _variants(result):
        stage, _, kind = variant.partition("_")
        get = result.summary.get
        row = {
            "variant": _title(stage, kind),
            "EM, %": interval(get(f"em_{variant}")),
            "F1, %": interval(get(f"f1_{variant}")),
            "four choices, %": interval(get(f"choice_{variant}")),
            "answer, nats/token": interval(get(f"answer_nll_{variant}"), 2),
            "perplexity": interval(get(f"perplexity_{variant}")),
            "closed-book F1, %": interval(get(f"closed_book_f1_{variant}")),
        }
        if live is not None:
            row["F1 here, now, %"] = interval(live.summary.get(f"f1_{variant}"))
        row["authors' EM / F1, %"] = f"{KIISE[stage]['em']} / {KIISE[stage]['f1']}" if kind != "none" else ""
        rows.append(row)
    return rows


def healing_rows(recipes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """What each committed adapter's training came to; ``recipes`` by adapter name ("A-ours")."""
    rows = []
    for name, recipe in recipes.items():
        stage, _, kind = name.partition("-")
        made, last = recipe["recipe"], [row for row in recipe["curve"] if "validation_f1" in row][-1]
        reads = made["accumulate"] * (made["batch"] + made["text_batch"])
        rows.append(
            {
                "adapter": f"{stage}, {NAMES[kind]}",
                "steps": last["step"],
                "sequences read": last["step"] * reads,
                "validation F1, %": round(100 * last["validation_f1"], 1),
                "validation perplexity": round(last["validation_perplexity"], 1),
            }
        )
    return rows


def gate_rows(result: Result) -> list[Row]:
    """The report's gates (3.1.2): points lost against the full model, the limit, what the authors lost, the verdict."""
    rows = []
    for variant in _variants(result):
        stage, _, kind = variant.partition("_")
        if stage not in GATES or kind == "none":
            continue
        for score in ("em", "f1"):
            drop = result.summary[f"{score}_drop_{variant}"]
            rows.append(
                {
                    "variant": _title(stage, kind),
                    "score": score.upper(),
                    "points lost": interval(drop),
                    "limit": GATES[stage],
                    "authors lost": round(KIISE["s0"][score] - KIISE[stage][score], 2),
                    "gate": gate(drop, GATES[stage]),
                }
            )
    return rows


def recovery_rows(result: Result, models: dict[str, str]) -> list[Row]:
    """Share of the loss that healing brings back, in %, for each of ``models`` (summary name -> title) and recipe."""
    return [
        {
            "model": title,
            "recipe": NAMES[kind],
            **{
                heading: interval(result.summary.get(f"{score}_recovered_{model}_{kind}"), 0)
                for score, heading in (("em", "EM"), ("f1", "F1"), ("log_perplexity", "log perplexity"))
            },
        }
        for model, title in models.items()
        for kind in NAMES
        if f"f1_recovered_{model}_{kind}" in result.summary
    ]


def control_table(result: Result) -> pandas.DataFrame:
    """Shares recovered by every control that removes layers, named by its block."""
    blocks = result.provenance["blocks"]
    titles = {name: f"{name}: layers {layers[0]}-{layers[-1]}" for name, layers in blocks.items()}
    return table(recovery_rows(result, titles), "model")


def _variants(result: Result) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in result.rows))


def _title(stage: str, kind: str) -> str:
    name = {"s0": "full model", "s3": "stage 3"}.get(stage, f"stage {stage[1:]}")
    return f"{name}, {NAMES[kind]}" if kind else name
