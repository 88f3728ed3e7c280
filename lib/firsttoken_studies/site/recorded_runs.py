"""The recorded runs that the page of the ideas draws as dots: where its sliders stood, and the seconds that it took.

A slider that a run did not set has the best rate that the same recording shows, as the floors of notebook 01 have: the
fastest read over the link, the fastest prefill of the whole model, the cheapest copy. What a run takes longer than its
bar is then what the system adds to the arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from firsttoken.assets.shapes import shape_config
from firsttoken.study.errors import FirstTokenError
from firsttoken_studies import tricks
from firsttoken_studies.nb47_the_other_reports_on_gpus.study import EACH_BLOCK, GROUP, MODELS, ONE_COPY
from firsttoken_studies.nb48_measured_on_a_gpu.study import RECORDED_ON
from firsttoken_studies.record.results import Result, Rows, distinct, recorded_result, rows_where

CLOSE = 1.1  # a slider stands where a run was up to this factor,
CLOSE_SHARE = 0.02  # and one whose scale is not logarithmic up to this difference


@dataclass(frozen=True)
class IdeaRun:
    """``idea`` measured ``at`` the places of the sliders that its formula asks: medians of ``n`` runs, in seconds."""

    idea: str
    notebook: str
    machine: str
    at: Mapping[str, float]
    without_s: float
    with_s: float
    n: int
    rival_s: float | None = None


def asked_by(idea: str) -> list[str]:
    """The sliders that the formula of ``idea`` asks, in the order of ``tricks.TrickSetting``."""
    names = set()

    class TracedSetting:
        def __getattr__(self, name: str) -> float:
            names.add(name)
            return getattr(tricks.TrickSetting(), name)

    tricks.IDEAS[idea].formula(TracedSetting())
    return [name for name in tricks.TrickSetting.__dataclass_fields__ if name in names]


def ranges(runs: Sequence[IdeaRun], idea: str) -> dict[str, tuple[float, float]]:
    """Return from where to where each slider of ``idea`` was measured."""
    settings = [run.at for run in runs if run.idea == idea]
    return {
        name: (min(setting[name] for setting in settings), max(setting[name] for setting in settings))
        for name in asked_by(idea)
    }


def recorded_runs(results: Sequence[Result], machine: str) -> list[IdeaRun]:
    """The runs of all ideas, from what was recorded on ``machine``, or on another where it has none.

    Raises FirstTokenError where an experiment of them is not recorded.
    """

    def of(experiment: str, slug: str = machine) -> Result:
        return recorded_result(results, experiment, slug)

    stalls, borrowed, starts, on_cards = map(
        of, ("generation_stalls", "borrowed_start", "cold_start", "reports_on_cards")
    )
    return [
        *_starts(starts, _prompt_of(borrowed, starts)),
        *_shapes(of("cold_start_shapes")),
        *_borrowed(borrowed, of("generation_stalls", borrowed.slug)),
        *_reuse(of("pipelined_loading")),
        *_swaps(of("recovery_latency")),
        *_swaps(of("recovery_latency", RECORDED_ON)),
        _stalls(stalls),
        _stalls(of("generation_stalls", RECORDED_ON)),
        *_on_operators(on_cards),
    ]


def script(runs: Sequence[IdeaRun]) -> str:
    """The runs and their ranges as JavaScript."""
    content = {
        "CLOSE": CLOSE,
        "CLOSE_SHARE": CLOSE_SHARE,
        "RUNS": {idea: [vars(run) for run in runs if run.idea == idea] for idea in tricks.IDEAS},
        "RANGES": {idea: ranges(runs, idea) for idea in tricks.IDEAS},
    }
    lines = [f"const {name} = {json.dumps(value)};" for name, value in content.items()]
    return "// Made by `firsttoken site` from data/results; do not edit.\n" + "\n".join(lines) + "\n"


def _run(
    idea: str,
    notebook: str,
    result: Result,
    setting: Mapping[str, float],
    without: Rows,
    with_trick: Rows,
    seconds: str,
) -> IdeaRun:
    """The medians of the column ``seconds`` of rows without the idea and of ``with_trick``, with it."""
    medians = (median(row[seconds] for row in rows) for rows in (without, with_trick))
    return IdeaRun(idea, notebook, result.slug, setting, *medians, min(len(without), len(with_trick)))


def _prompt_of(borrowed: Result, starts: Result) -> int:
    """Tokens of the prompt of the cold starts, which note none; it is that of the borrowing ones, which do."""
    question_counts = {borrowed.parameters["borrowed"]["questions"], starts.parameters["coldstart"]["questions"]}
    tokens = {row["prompt_tokens"] for row in borrowed.rows if row.get("what") == "start"}
    if len(question_counts) > 1 or len(tokens) > 1:
        raise FirstTokenError("cold_start and borrowed_start had other prompts: record both again from one revision")
    return tokens.pop()


def _weights_gb(model: str) -> tuple[float, float]:
    """Return the GB in 16 bits of the weights of a named shape: of all, and of embeddings and head, which may be one
    matrix."""
    config = shape_config(model.removeprefix("random:"))
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    attention = 2 * hidden * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    layers = config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)
    matrices = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return 2 * (layers + matrices) / 1e9, 2 * matrices / 1e9


def _model_of(result: Result, section: str) -> str:
    return str(result.parameters[section].get("model") or result.parameters["model"])


def _tflop_per_s(weights_gb: float, tokens: float, seconds: float) -> float:
    """The rate at which a prefill of ``tokens`` takes ``seconds``."""
    return tricks.prefill_s(weights_gb, tokens, 1.0) / seconds


def _starts(result: Result, prompt_tokens: int) -> list[IdeaRun]:
    """ProgressiveServe's over the links of the cold starts that a loader was limited to."""
    shaped = [row for row in rows_where(result.rows, variant="progressive") if row["gbit_per_s"]]
    return [_start(result, rows_where(result.rows, link=link), prompt_tokens) for link in distinct(shaped, "link")]


def _shapes(result: Result) -> list[IdeaRun]:
    """ProgressiveServe's of other shapes with random weights."""
    tokens = result.parameters["shapes"]["prompt_tokens"]
    places = dict.fromkeys((row["shape"], row["link"]) for row in result.rows)
    return [_start(result, rows_where(result.rows, shape=shape, link=link), tokens) for shape, link in places]


def _start(result: Result, rows: Rows, prompt_tokens: int) -> IdeaRun:
    whole_rows, progressive = rows_where(rows, variant="whole_streamed"), rows_where(rows, variant="progressive")
    read_s = min(row["load_s"] for row in rows if row["variant"] in ("read", "whole_streamed"))
    weights = whole_rows[0]["bytes"]
    setting = {
        "weights_gb": weights / 1e9,
        "prompt_tokens": prompt_tokens,
        "link_gbit_per_s": weights * 8 / 1e9 / read_s,
        "tflop_per_s": _tflop_per_s(weights / 1e9, prompt_tokens, min(row["prefill_warm_s"] for row in whole_rows)),
        "deferred_share": 1 - progressive[0]["bytes"] / weights,
    }
    return _run("ProgressiveServe", "13", result, setting, whole_rows, progressive, "ttft_request_s")


def _borrowed(result: Result, stalls: Result) -> Iterator[IdeaRun]:
    """PETALS's: a start that borrows all layers from one neighbour, over each link and round trip."""
    starts, config = rows_where(result.rows, what="start"), shape_config(result.parameters["model"])
    weights_gb, ends_gb = _weights_gb(result.parameters["model"])
    places = dict.fromkeys((row["gbit_per_s"], row["rtt_ms"]) for row in rows_where(starts, variant="borrowed"))
    for gbit_per_s, rtt_ms in places:
        whole_rows = rows_where(starts, variant="whole", gbit_per_s=gbit_per_s)
        borrowed_rows = rows_where(starts, variant="borrowed", gbit_per_s=gbit_per_s, rtt_ms=rtt_ms)
        setting = {
            "weights_gb": weights_gb,
            "ends_gb": ends_gb,
            "hidden_kib_per_token": config.hidden_size * 4 / 1024,  # they travel in float32
            "prompt_tokens": borrowed_rows[0]["prompt_tokens"],
            "link_gbit_per_s": gbit_per_s,
            "tflop_per_s": _stalled_rate(stalls),
            "servers": 1,
            "round_trip_ms": rtt_ms,
        }
        yield _run("PETALS", "56", result, setting, whole_rows, borrowed_rows, "ttft_request_s")


def _reuse(result: Result) -> Iterator[IdeaRun]:
    """DroidSpeak's: another model's cache over each link, loaded while a group of layers is computed."""
    weights_gb, _ = _weights_gb(result.parameters["model"])
    layers, tokens = shape_config(result.parameters["model"]).num_hidden_layers, result.rows[0]["tokens"]
    first, last = map(int, result.rows[0]["group"].split("-"))
    share = (last - first + 1) / layers
    computed_s = min(
        *(row["ttft_s"] for row in rows_where(result.rows, schedule="recompute")),
        *(row["compute_s"] / share for row in rows_where(result.rows, schedule="pipelined")),
    )
    for gbit_per_s in distinct(result.rows, "gbit_per_s"):
        rows_at_rate = rows_where(result.rows, gbit_per_s=gbit_per_s)
        recomputed, pipelined = (rows_where(rows_at_rate, schedule=name) for name in ("recompute", "pipelined"))
        setting = {
            "weights_gb": weights_gb,
            "kv_kib_per_token": pipelined[0]["kv_token_bytes"] * layers / 1024,
            "hidden_kib_per_token": pipelined[0]["edge_token_bytes"] / 1024,
            "prompt_tokens": tokens,
            "link_gbit_per_s": gbit_per_s,
            "tflop_per_s": _tflop_per_s(weights_gb, tokens, computed_s),
            "group_share": share,
        }
        yield _run("DroidSpeak", "32", result, setting, recomputed, pipelined, "ttft_s")


def _swaps(result: Result) -> list[IdeaRun]:
    """CPS's: a request of each length, copied out and in again block by block, or computed again."""
    model = _model_of(result, "recovery")
    swaps = rows_where(result.rows, what="swap", path="per_block")
    copied, again = {}, {}
    for tokens in sorted(distinct(swaps, "tokens")):
        copied[tokens] = median(row["out_ms"] + row["in_ms"] for row in rows_where(swaps, tokens=tokens)) / 1e3
        again[tokens] = median(row["ms"] for row in rows_where(result.rows, what="recompute", tokens=tokens)) / 1e3
    setting = {
        "weights_gb": _weights_gb(model)[0],
        "layers": shape_config(model.removeprefix("random:")).num_hidden_layers,
        "kv_kib_per_token": swaps[0]["bytes"] / swaps[0]["tokens"] / 1024,
        "host_gb_per_s": max(row["bytes"] / row["ms"] for row in rows_where(result.rows, what="memcpy")) / 1e6,
    }
    notebook = "48" if result.slug == RECORDED_ON else "21"
    return _recoveries(notebook, result.slug, setting, copied, again, len(distinct(swaps, "repeat")))


def _recoveries(
    notebook: str,
    machine: str,
    setting: Mapping[str, float],
    copied: Mapping[int, float],
    again: Mapping[int, float],
    n: int,
) -> list[IdeaRun]:
    """CPS's by length, from the seconds that both ways take; the rates that ``setting`` lacks are the best ones."""
    s = tricks.TrickSetting(**setting, us_per_copy=0.0)
    per_copy = [
        1e6 * (seconds - tricks.swap_s(s.kv_kib_per_token, s.layers, tokens, s.host_gb_per_s, 0.0))
        / (2 * tricks.COPIES_A_BLOCK * s.layers * tokens / tricks.BLOCK_TOKENS)
        for tokens, seconds in copied.items()
    ]  # fmt: skip
    rate = max(_tflop_per_s(s.weights_gb, tokens, seconds) for tokens, seconds in again.items())
    setting = {**setting, "us_per_copy": min(per_copy), "tflop_per_s": rate}
    return [
        IdeaRun("CPS", notebook, machine, setting | {"prompt_tokens": tokens}, slow, min(slow, seconds), n, seconds)
        for tokens, seconds, slow in ((tokens, copied[tokens], again[tokens]) for tokens in copied)
    ]


def _stalls(result: Result) -> IdeaRun:
    """Sarathi-Serve's: the longest gap of the running requests while a prompt comes, live."""
    settings = result.parameters["stalls"]
    chunk = next(int(name.split()[1]) for name in settings["schedulers"] if name.startswith("sarathi "))
    gap = result.summary.of
    before = gap("worst_gap_ms", source="live", scheduler="prefill_first")
    own_gap = gap("worst_gap_ms", source="live", scheduler="sarathi", budget_tokens=chunk)
    setting = {
        "weights_gb": _weights_gb(_model_of(result, "stalls"))[0],
        "prompt_tokens": settings["prompt"],
        "tflop_per_s": _stalled_rate(result),
        "chunk_tokens": chunk,
    }
    notebook = "48" if result.slug == RECORDED_ON else "40"
    return IdeaRun(
        "Sarathi-Serve", notebook, result.slug, setting, before["value"] / 1e3, own_gap["value"] / 1e3, own_gap["n"]
    )


def _stalled_rate(stalls: Result) -> float:
    """The highest rate at which the prompt of notebook 40 was prefilled: in chunks it may be higher than at once."""
    seconds = min(entry["low"] for entry in stalls.summary.all("ttft_s", source="live"))
    weights_gb, _ = _weights_gb(_model_of(stalls, "stalls"))
    return _tflop_per_s(weights_gb, stalls.parameters["stalls"]["prompt"], seconds)


# What notebook 47 computes for GPUs from their measured operators: no run, but what their parts took.


def _on_operators(result: Result) -> Iterator[IdeaRun]:
    """CPS's, DroidSpeak's and ProgressiveServe's on each card of ``result`` whose operators are published."""
    rows = result.rows
    for card, model in dict.fromkeys((row["card"], row["model"]) for row in rows if "way" in row):
        per_block, coalesced = (rows_where(rows, card=card, model=model, way=way) for way in (EACH_BLOCK, ONE_COPY))
        shape = MODELS[model]
        setting = {
            "weights_gb": 2 * shape.weights / 1e9,
            "layers": shape.layers,
            "kv_kib_per_token": shape.kv_bytes() / 1024,
            "host_gb_per_s": max(2 * shape.kv_bytes() * row["tokens"] / row["swap_s"] for row in coalesced) / 1e9,
        }
        copied, again = ({row["tokens"]: row[key] for row in per_block} for key in ("swap_s", "recompute_s"))
        yield from _recoveries("47", f"operators of {card}", setting, copied, again, 1)
    for row in rows_where(rows, report="DroidSpeak"):
        yield _reused_on(row)
    cold = rows_where(rows, report="ProgressiveServe")
    for complete, first in zip(cold[::2], cold[1::2], strict=True):
        weights_gb = complete["loading_s"] * complete["link"] / 8
        setting = {
            "weights_gb": weights_gb,
            "prompt_tokens": complete["tokens"],
            "link_gbit_per_s": complete["link"],
            "tflop_per_s": _tflop_per_s(weights_gb, complete["tokens"], complete["prefill_s"]),
            "deferred_share": 1 - first["loading_s"] / complete["loading_s"],
        }
        times = (row["loading_s"] + row["prefill_s"] for row in (complete, first))
        yield IdeaRun("ProgressiveServe", "47", f"operators of {complete['card']}", setting, *times, 1)


def _reused_on(row: Mapping[str, Any]) -> IdeaRun:
    """DroidSpeak's on the cards of one ``row``, which compute as one."""
    shape = MODELS[row["model"]]
    weights_gb = 2 * shape.weights / 1e9
    setting = {
        "weights_gb": weights_gb,
        "kv_kib_per_token": shape.kv_bytes() / 1024,
        "hidden_kib_per_token": 2 * shape.hidden / 1024,
        "prompt_tokens": row["tokens"],
        "link_gbit_per_s": row["link"],
        "tflop_per_s": _tflop_per_s(weights_gb, row["tokens"], row["own_s"]),
        "group_share": GROUP,
    }
    with_it_s = max(row["group_s"], row["loading_s"])
    cards = f"operators of {row['gpus']} {row['card']}" if row["gpus"] > 1 else f"operators of {row['card']}"
    return IdeaRun("DroidSpeak", "47", cards, setting, row["own_s"], with_it_s, 1)
