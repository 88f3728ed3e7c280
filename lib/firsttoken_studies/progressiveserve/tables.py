"""The tables of notebook 12: stages beside the authors' scores, gates, shares recovered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.progressiveserve.gates import CLOSED_BOOK, GATES, gate
from firsttoken.study.measures import Scalar
from firsttoken.study.record import Result
from firsttoken.study.show import interval, table
from firsttoken_studies.progressiveserve.figures import KIISE, NAMES

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


def stage_rows(result: Result, live: Result | None = None) -> list[Row]:
    """One row a variant: EM, F1, choices, perplexity with 95 % intervals; EM of the live run and of the authors."""
    rows, get = [], result.summary.get
    for place in _places(result):
        stage, healed = place["stage"], place.get("recipe") != "none"
        row = {
            "variant": _title(**place),
            "EM, %": interval(get("em_pct", **place)),
            "F1, %": interval(get("f1_pct", **place)),
            "four choices, %": interval(get("choice_pct", **place)),
            "answer, nats/token": interval(get("answer_nll", **place), 2),
            "perplexity": interval(get("perplexity", **place)),
            "closed-book F1, %": interval(get("f1_pct", **place, task=CLOSED_BOOK)),
        }
        if live is not None:
            row["F1 here, now, %"] = interval(live.summary.get("f1_pct", **place))
        row["authors' EM / F1, %"] = f"{KIISE['em_pct'][stage]} / {KIISE['f1_pct'][stage]}" if healed else ""
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
    for place in _places(result):
        stage = place["stage"]
        if stage not in GATES or place.get("recipe") == "none":
            continue
        for score in ("em", "f1"):
            drop, authors = result.summary.of(f"{score}_drop", **place), KIISE[f"{score}_pct"]
            rows.append(
                {
                    "variant": _title(**place),
                    "score": score.upper(),
                    "points lost": interval(drop),
                    "limit": GATES[stage],
                    "authors lost": round(authors[0] - authors[stage], 2),
                    "gate": gate(drop, GATES[stage]),
                }
            )
    return rows


def recovery_rows(result: Result, models: Mapping[str, dict[str, Scalar]]) -> list[Row]:
    """Share of the loss that healing brings back, in %, for each of ``models`` (title -> place) and recipe."""
    get = result.summary.get
    return [
        {
            "model": title,
            "recipe": NAMES[kind],
            **{
                heading: interval(get(f"{score}_recovered_pct", **place, recipe=kind), 0)
                for score, heading in (("em", "EM"), ("f1", "F1"), ("log_perplexity", "log perplexity"))
            },
        }
        for title, place in models.items()
        for kind in NAMES
        if get("f1_recovered_pct", **place, recipe=kind)
    ]


def control_table(result: Result) -> pandas.DataFrame:
    """Shares recovered by every control that removes layers, named by its block."""
    blocks = result.provenance["blocks"]
    controls = {f"{name}: layers {layers[0]}-{layers[-1]}": {"variant": name} for name, layers in blocks.items()}
    return table(recovery_rows(result, controls), "model")


def _places(result: Result) -> list[dict[str, Any]]:
    """Stage, and recipe where it has one, of everything that was asked."""
    return [entry["where"] for entry in result.summary.all("perplexity")]


def _title(stage: int, recipe: str = "") -> str:
    name = "full model" if stage == 0 else f"stage {stage}"
    return f"{name}, {NAMES[recipe]}" if recipe else name
