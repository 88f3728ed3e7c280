"""The page on which a reader asks which idea pays on her hardware: exported formulas, recorded runs, prices."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from types import ModuleType
from typing import Any

from firsttoken.assets.dense_shape import SHAPES
from firsttoken.simulation.costs.published import TABLE_2
from firsttoken.study.summary import Entry
from firsttoken_studies import tricks
from firsttoken_studies.nb47_the_other_reports_on_gpus.study import LLAMA_2, MODELS
from firsttoken_studies.record.show import interval
from firsttoken_studies.site.recorded_runs import IdeaRun, ranges


@dataclass(frozen=True)
class Slider:
    """One field of ``tricks.TrickSetting`` between ``least`` and ``most``; ``log``: its steps are factors,
    ``whole``: it has no fractions."""

    name: str
    title: str
    least: float
    most: float
    unit: str
    log: bool = True
    whole: bool = False

    @property
    def value(self) -> float:
        """Return what is asked for at first."""
        value = getattr(tricks.TrickSetting(), self.name)
        return int(value) if self.whole else value

    @property
    def step(self) -> float:
        """Return the length of one step of the slider."""
        return round((self.placed(self.most) - self.placed(self.least)) / 200, 6)

    def placed(self, value: float) -> float:
        """Return the slider's position at a ``value``."""
        return round(log10(value), 4) if self.log else value


SLIDERS = (
    Slider("weights_gb", "weights", 0.1, 500, "GB"),
    Slider("ends_gb", "embeddings and head", 0.005, 20, "GB"),
    Slider("layers", "layers", 4, 128, "", whole=True),
    Slider("kv_kib_per_token", "KV of a token, all layers", 4, 4096, "KiB"),
    Slider("hidden_kib_per_token", "hidden state of a token", 0.5, 64, "KiB"),
    Slider("prompt_tokens", "prompt", 16, 131072, "tokens", whole=True),
    Slider("link_gbit_per_s", "link", 0.05, 800, "Gbit/s"),
    Slider("tflop_per_s", "compute", 0.05, 2000, "TFLOP/s"),
    Slider("host_gb_per_s", "host to device", 1, 900, "GB/s"),
    Slider("us_per_copy", "price of a copy", 0.01, 100, "µs"),
    Slider("deferred_share", "layers that wait", 0, 0.9, "of all", log=False),
    Slider("group_share", "layers computed again", 0, 1, "of all", log=False),
    Slider("chunk_tokens", "chunk", 16, 8192, "tokens", whole=True),
    Slider("servers", "servers in the chain", 1, 32, "", whole=True),
    Slider("round_trip_ms", "round trip", 0.05, 300, "ms"),
)


# Gbit/s and the round trip in ms; the first two are those of PETALS' Table 3, the others within a data centre.
LINKS = {
    "100 Mbit/s, 100 ms": (0.1, 100.0),
    "1 Gbit/s, 5 ms": (1.0, 5.0),
    "10 Gbit/s": (10.0, 0.1),
    "25 Gbit/s": (25.0, 0.1),
    "100 Gbit/s": (100.0, 0.1),
    "400 Gbit/s": (400.0, 0.1),
}


def presets(runs: Sequence[IdeaRun]) -> dict[str, dict[str, dict[str, float]]]:
    """Return what a card, a model and a link set, by name; a card has the best rates that its ``runs`` show."""
    copies: dict[str, Mapping[str, float]] = {run.machine: run.at for run in runs if run.idea == "CPS"}
    rates = {card: max(run.at["tflop_per_s"] for run in runs if run.machine == card) for card in copies}
    cards = {
        card.removeprefix("operators of "): {
            "tflop_per_s": rates[card],
            "host_gb_per_s": setting["host_gb_per_s"],
            "us_per_copy": setting["us_per_copy"],
        }
        for card, setting in copies.items()
    }
    models = {
        name: {
            "weights_gb": 2 * shape.weights / 1e9,
            "ends_gb": 4 * shape.hidden * shape.vocabulary / 1e9,
            "layers": shape.layers,
            "kv_kib_per_token": shape.kv_bytes() / 1024,
            "hidden_kib_per_token": 2 * shape.hidden / 1024,
        }
        for name, shape in {LLAMA_2: MODELS[LLAMA_2], **SHAPES}.items()
    }
    links = {name: {"link_gbit_per_s": rate, "round_trip_ms": ms} for name, (rate, ms) in LINKS.items()}
    return {"card": cards, "model": models, "link": links}


FIRST = {"card": "a100-sxm", "model": LLAMA_2, "link": "10 Gbit/s"}


def prices(entry_of: Callable[..., Entry], gpu_entry_of: Callable[..., Entry]) -> dict[str, str]:
    """Return what each idea was recorded to cost, in words; ``gpu_entry_of`` is of the record on a GPU."""
    drop = interval(entry_of("stage_quality", "em_drop", stage=1, recipe="ours"), 1)
    losses = [
        entry_of("reuse_methods", "relative_loss_pct", method="DroidSpeak", task="qa", **pair)["value"]
        for pair in (
            {"receiver": "qa", "sender": "base"},
            {"receiver": "qa", "sender": "lead"},
            {"receiver": "all", "sender": "base"},
        )
    ]
    firsts = []
    for name, entry, budget in (("an H200", gpu_entry_of, 512), ("two processor cores", entry_of, 128)):
        before, after = (
            entry("generation_stalls", "ttft_s", source="live", **labels)["value"]
            for labels in ({"scheduler": "prefill_first"}, {"scheduler": "sarathi", "budget_tokens": budget})
        )
        order = "later" if after > before else "sooner"
        firsts.append(f"{order} on {name} (after {after:.2f} s instead of {before:.2f} s)")
    return {
        "ProgressiveServe": f"until the last layers are there, {drop} points of exact match are lost (SmolLM2)",
        "PETALS": "every further token goes through the chain until the own layers are there",
        "DroidSpeak": f"{min(losses):.1f} to {max(losses):.1f} % of the F1 were lost in three pairs of models",
        "CPS": "no answer changes; what is swapped takes host memory",
        "Sarathi-Serve": f"the new prompt's own first token comes {' and '.join(firsts)}",
    }


PRICED_IN = {"ProgressiveServe": "12", "PETALS": "56", "DroidSpeak": "33", "CPS": "21", "Sarathi-Serve": "48"}


def formulas() -> str:
    """The JavaScript of all formulas, and by idea the one that the page asks."""
    functions = {name: getattr(tricks, name) for name in ("load_s", "prefill_s", "swap_s", "hops_s")}
    functions |= {idea.formula.__name__: idea.formula for idea in tricks.IDEAS.values()}
    constants = {name: getattr(tricks, name) for name in ("BYTES_A_WEIGHT", "BLOCK_TOKENS", "COPIES_A_BLOCK")}
    ideas = ", ".join(f'"{report}": {idea.formula.__name__}' for report, idea in tricks.IDEAS.items())
    return f"{exported(tricks, functions, constants)}const IDEAS = {{ {ideas} }};\n"


def recorded(entry_of: Callable[..., Entry]) -> list[dict[str, Any]]:
    """Return the measured ratio with each idea over without it, beside the bound in the same setting, and the notebook.

    ``entry_of`` gives the entry of a summary by experiment, measure and place.
    """
    start = {"link": "1gbit", "variant": "progressive"}
    share = entry_of("cold_start", "byte_share", **start)["value"]
    group = entry_of(
        "reuse_methods", "group_layers_pct", method="DroidSpeak", across="mean", chosen_by="decoded answers"
    )
    gaps = [
        entry_of("generation_stalls", "worst_gap_ms", source="live", **labels)["value"]
        for labels in ({"scheduler": "sarathi", "budget_tokens": 128}, {"scheduler": "prefill_first"})
    ]
    borrowed = {"variant": "borrowed", "than": "whole", "gbit_per_s": 1, "rtt_ms": 5}
    faster = entry_of("reuse_methods", "speedup_x", method="DroidSpeak", across="mean", chosen_by="decoded answers")
    row = next(row for row in TABLE_2 if row.tokens == 2048)
    return [
        _row(
            "ProgressiveServe",
            "13",
            interval(entry_of("cold_start", "ttft_x", **start, than="whole_streamed"), 2),
            share,
        ),
        _row("PETALS, borrowed layers", "56", interval(entry_of("borrowed_start", "ttft_x", **borrowed), 2), None),
        _row("DroidSpeak, without a link", "33", f"{1 / faster['value']:.2f}", group["value"] / 100),
        _row("CPS, 2,048 tokens, the paper's Table 2", "21", f"{row.recompute_ms / row.swap_ms:.2f}", None),
        _row("Sarathi-Serve", "40", f"{gaps[0] / gaps[1]:.2f}", None),
    ]


def told_ranges(runs: Sequence[IdeaRun]) -> dict[str, dict[str, str]]:
    """Return in words, by idea and title of a slider, from where to where the formula was measured."""
    by_name = {slider.name: slider for slider in SLIDERS}
    return {
        idea: {by_name[name].title: _from_to(by_name[name], *bounds) for name, bounds in ranges(runs, idea).items()}
        for idea in tricks.IDEAS
    }


def _from_to(slider: Slider, least: float, most: float) -> str:
    bounds = dict.fromkeys(f"{end:.0f}" if slider.whole else f"{end:.3g}" for end in (least, most))
    return f"{' to '.join(bounds)} {slider.unit}".strip()


def _row(idea: str, notebook: str, measured: str, bound: float | None) -> dict[str, Any]:
    bound_text = "" if bound is None else f"{bound:.2f}"
    return {"idea": idea, "notebook": notebook, "measured": measured, "bound": bound_text}


# Formulas of Python as JavaScript: functions of arithmetic, ``min`` and ``max``, translated from their source.

_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def exported(module: ModuleType, functions: Mapping[str, Callable[..., Any]], constants: Mapping[str, float]) -> str:
    """JavaScript with the ``constants`` and ``functions`` of ``module`` by their names.

    Raises ValueError for a function that is more than assignments and a return of arithmetic.
    """
    lines = [f"const {name} = {value!r};" for name, value in constants.items()]
    lines += [_function(name, function) for name, function in functions.items()]
    return f"// Made by `firsttoken site` from {module.__name__}; do not edit.\n" + "\n".join(lines) + "\n"


def _function(name: str, function: Callable[..., Any]) -> str:
    (node,) = ast.parse(inspect.getsource(function)).body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{name} is no plain function")
    statements = [_statement(name, statement) for statement in node.body[ast.get_docstring(node) is not None :]]
    return f"function {name}({', '.join(argument.arg for argument in node.args.args)}) {{ {' '.join(statements)} }}"


def _statement(name: str, node: ast.stmt) -> str:
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {_value(name, node.value)};"
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return f"const {node.targets[0].id} = {_value(name, node.value)};"
    raise ValueError(f"{name}: line {node.lineno} of it is neither an assignment nor a return")


def _value(name: str, node: ast.expr) -> str:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return f"({_value(name, node.left)} {_SIGNS[type(node.op)]} {_value(name, node.right)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return repr(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        inner = ", ".join(_value(name, argument) for argument in node.args)
        if node.func.id == "Times":
            return f"[{inner}]"
        return f"Math.{node.func.id}({inner})" if node.func.id in ("min", "max") else f"{node.func.id}({inner})"
    raise ValueError(f"{name}: {ast.unparse(node)} is no arithmetic that a page can have")
