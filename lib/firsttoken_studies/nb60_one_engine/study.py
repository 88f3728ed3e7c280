"""What the one engine is held to, side by side in one run, in three scenes.

A stage arrives while sessions run and some of them move: how long do the others wait for a token? A stored prefix comes
over a link, in the engine beside running requests, and alone: what does either side pay? Many requests share a prompt:
what is prefilled, and how long does the last first token take?
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.kv_transfer import Buffers
from firsttoken.droidspeak.pipeline.live_loading import first_token, sent_pieces
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion, moving
from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain
from firsttoken.study.errors import LinkError
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken_studies.droidspeak.wire import random_request
from firsttoken_studies.record.overlay import DrawnResult, name_results, over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Axes, Figure, categories, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class OneEngineConfig:
    """``rounds`` of each scene, ``token_budget`` tokens a step.

    ``sessions`` with ``session_tokens`` of prompt say ``session_new_tokens``; layers [``block_start``, ``block_end``)
    arrive and half of the sessions move. ``stored_tokens`` come over ``gbit_per_s`` beside as many requests that say
    ``beside_tokens``, layers [``group_start``, ``group_end``) computed again in steps of ``stored_budget`` tokens.
    ``sharing`` requests begin with the same ``shared_tokens``.
    """

    rounds: int
    token_budget: int
    sessions: int
    session_tokens: int
    session_new_tokens: int
    block_start: int
    block_end: int
    stored_tokens: int
    stored_budget: int
    beside_tokens: int
    gbit_per_s: float
    group_start: int
    group_end: int
    sharing: int
    shared_tokens: int

    def needs(self) -> list[Need]:
        """Require a model with the layers, and a context for the longest request."""
        return [
            Need("one_engine.block_end", self.block_end, LAYERS),
            Need("one_engine.group_end", self.group_end, LAYERS),
            Need("one_engine.session_tokens", self.session_tokens + self.session_new_tokens, CONTEXT),
            Need("one_engine.beside_tokens", self.beside_tokens + 16, CONTEXT),
            Need("one_engine.stored_tokens", self.stored_tokens + 16, CONTEXT),
            Need("one_engine.shared_tokens", self.shared_tokens + 2, CONTEXT),
        ]


STEPS_BEFORE_ARRIVAL = 12


def stage_arrives(model: PreTrainedModel, config: OneEngineConfig) -> Rows:
    """Rows {round, gap_s, moving_s, with_prompt_s, decode_s}, seconds between two tokens of those that stay.

    Half of the sessions move when the layers arrive; they say enough tokens for nobody to end meanwhile. ``gap_s`` is
    the longest from the last token before to the end of the moving, ``moving_s`` their median, ``with_prompt_s`` the
    median while a new prompt is prefilled beside the same sessions under the same budget, ``decode_s`` the median
    where nobody prefills.
    """
    stages = _stages(model, range(config.block_start, config.block_end))
    sessions, vocabulary = config.sessions, model.config.vocab_size
    blocks = (sessions + 1) * -(-(config.session_tokens + config.session_new_tokens) // 16)
    settings = EngineConfig(scheduler="sarathi", watermark=0.0, requests=sessions + 1, token_budget=config.token_budget)
    rows: Rows = []
    with closing(LiveExecutor(model, blocks)) as executor:
        for number in range(config.rounds):
            views = [StagedModelVersion(model, stage, PrefillAgain()) for stage in stages]
            executor.version = views[0]
            engine = Engine(executor, settings)
            prompts = [[(7 * n + i) % vocabulary for n in range(config.session_tokens)] for i in range(sessions + 1)]
            sampling = Sampling(config.session_new_tokens)
            open_ = [
                engine.submit(prompts[session], sampling, moves=session < sessions // 2) for session in range(sessions)
            ]
            staying = open_[sessions // 2 :]
            while not all(request.times_s for request in open_):
                engine.step()
            for _ in range(STEPS_BEFORE_ARRIVAL):
                engine.step()
            plain = np.diff(staying[0].times_s[-STEPS_BEFORE_ARRIVAL:])
            engine.publish(views[1], moving(PrefillAgain()))
            moved = _steps(engine, staying, lambda moves=open_: not any(request.redo for request in moves))
            new = engine.submit(prompts[-1], Sampling(1))
            beside = _steps(engine, staying, lambda late=new: late.finished)
            medians = {"moving_s": moved, "with_prompt_s": beside, "decode_s": plain}
            row = {name: float(np.median(gaps)) for name, gaps in medians.items()}
            rows.append({"round": number, "gap_s": max(moved)} | row)
            for request in open_:
                engine.cancel(request)
    return rows


def _steps(engine: Engine, watched: Sequence[Request], finished: Callable[[], bool]) -> list[float]:
    """Step until ``finished``; the seconds between tokens of ``watched``, from their last ones before on."""
    before = [len(request.times_s) for request in watched]
    while not finished():
        engine.step()
    return [float(gap) for request, n in zip(watched, before, strict=True) for gap in np.diff(request.times_s[n - 1 :])]


def _stages(model: PreTrainedModel, block: range) -> list[StageView]:
    layers = list(model.model.layers)
    end_modules = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
    first = [PassLayer() if i in block else layer for i, layer in enumerate(layers)]
    return [make_view(1, first, end_modules), make_view(2, layers, end_modules)]


STEPS_BEFORE_RESTORE = 40


def over_a_link(model: PreTrainedModel, served: PreTrainedModel, folder: Path, config: OneEngineConfig) -> Rows:
    """Return rows {round, alone_s, beside_s, tbt_s, plain_tbt_s} of a prefix that is kept in ``folder``.

    ``alone_s`` is the pipelined first token with nobody else there, ``beside_s`` that in the engine beside running
    requests; ``tbt_s`` the 99th percentile of these requests' times between tokens meanwhile, and ``plain_tbt_s`` that
    of steps before in which they only decode. ``served`` is ``model`` as the engine runs it. The model is its own
    sender: bytes and operations are those of any other of its shape. Raises LinkError when the link fails.
    """
    tokens, running, group = config.stored_tokens, config.sessions, Group(config.group_start, config.group_end)
    prefix, suffix = random_request(model, tokens, torch.Generator().manual_seed(0))
    identity = identify(model, None, "one model")
    context = prefix.ids[0].tolist()
    sent = full_prefill(model, prefix, {group.lo} if group.needs_e_cache else set())
    room = 2 * (sum(kv.nbytes for kv in sent.kv) + sum(edge.nbytes for edge in sent.e_cache.values()))
    store = KVStore(folder, memory_bytes=0, disk_bytes=room)
    store.store(context, identity, sent)
    pieces = store.locate(context, identity, group.lo if group.needs_e_cache else None)[0].spans
    link = LinkConfig(config.gbit_per_s)
    buffers = Buffers(sent_pieces(pieces, group, model.config.num_hidden_layers, Schedule.PIPELINED))
    settings = EngineConfig(scheduler="sarathi", watermark=0.0, requests=running + 1, token_budget=config.stored_budget)
    blocks = running * -(-(16 + config.beside_tokens) // 16) + -(-(tokens + 16) // 16)
    token_ids = [*context, *suffix[0].tolist()]
    rows: Rows = []
    with closing(LiveExecutor(served, blocks)) as executor:
        for number in range(-1, config.rounds):  # the first to warm up
            transfer = first_token(
                model, prefix, pieces, group, Link(link), suffix, Schedule.PIPELINED, buffers=buffers
            )
            engine, sampling = Engine(executor, settings), Sampling(config.beside_tokens)
            others = [engine.submit([other + 1] * 16, sampling) for other in range(running)]
            while not all(len(request.times_s) > STEPS_BEFORE_RESTORE for request in others):
                engine.step()
            plain = _gaps(others, [STEPS_BEFORE_RESTORE // 2] * running)
            begun = [len(request.times_s) - 1 for request in others]
            source = StoredPrefix(store, token_ids, sender=identity, receiver=identity, group=group, link=Link(link))
            request = engine.submit(token_ids, Sampling(1), source=source)
            while not request.finished:
                engine.step()
            if request.fell_back:
                raise LinkError(f"the prefix was computed after all: {request.fell_back}")
            row = {"round": number, "alone_s": transfer.marks.first_token_s, "beside_s": request.ttft_s}
            meanwhile = _gaps(others, begun)
            row |= {"tbt_s": float(np.percentile(meanwhile, 99)), "plain_tbt_s": float(np.percentile(plain, 99))}
            for other in others:
                engine.cancel(other)
            if number >= 0:
                rows.append(row)
    return rows


def _gaps(requests: Sequence[Request], first: Sequence[int]) -> np.ndarray:
    """Seconds between tokens of each of ``requests`` from its token number ``first`` on."""
    return np.concatenate([np.diff(request.times_s[n:]) for request, n in zip(requests, first, strict=True)])


def shared_prompt(model: PreTrainedModel, config: OneEngineConfig) -> Rows:
    """Rows {round, shared, prefilled_tokens, seconds} of requests whose first tokens are the same."""
    beginning = [7 * position % model.config.vocab_size for position in range(config.shared_tokens)]
    prompts = [[*beginning, number] for number in range(config.sharing)]
    rows: Rows = []
    with closing(LiveExecutor(model, config.sharing * (config.shared_tokens // 16 + 2))) as executor:
        for number in range(-1, config.rounds):
            for shared in (True, False):
                settings = EngineConfig(watermark=0.0, requests=config.sharing, share_prefixes=shared)
                engine = Engine(executor, settings)
                served = engine.serve([(prompt, Sampling(1), 0.0) for prompt in prompts])
                took = max(request.times_s[0] for request in served) - min(request.begun_s for request in served)
                if number >= 0:
                    count = engine.token_counts["prefill"]
                    rows.append({"round": number, "shared": shared, "prefilled_tokens": count, "seconds": took})
    return rows


ARRIVAL, LINK, PROMPT = "arrival", "link", "prompt"
MEASURED = {
    "gap_s": ("longest_gap_s", "moving"),
    "moving_s": ("median_gap_s", "moving"),
    "with_prompt_s": ("median_gap_s", "with_prompt"),
    "decode_s": ("median_gap_s", "decode"),
    "alone_s": ("ttft_p50_s", "alone"),
    "beside_s": ("ttft_p50_s", "beside"),
    "tbt_s": ("tbt_p99_s", "beside"),
    "plain_tbt_s": ("tbt_p99_s", "plain"),
}
"""The columns of seconds: what each measures, and in which case."""

_RATIOS = (
    ("longest_gap_x", "gap_s", "with_prompt_s"),
    ("median_gap_x", "moving_s", "with_prompt_s"),
    ("ttft_x", "beside_s", "alone_s"),
    ("tbt_p99_x", "tbt_s", "plain_tbt_s"),
)


@torch.inference_mode()
def one_engine(profile: Profile) -> Outcome:
    """Rows {scene, round, ...} as ``stage_arrives``, ``over_a_link`` and ``shared_prompt`` give them."""
    config = profile.section("one_engine", OneEngineConfig)
    check(config.needs(), ModelFacts(profile.model))
    loaded, served = (
        load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device()) for _ in range(2)
    )
    model, served = loaded.model, fuse(served.model)
    scenes = {ARRIVAL: stage_arrives(model, config)}
    with tempfile.TemporaryDirectory() as folder:
        scenes[LINK] = over_a_link(model, served, Path(folder), config)
    scenes[PROMPT] = shared_prompt(model, config)
    rows = [{"scene": scene} | row for scene, scene_rows in scenes.items() for row in scene_rows]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


def one_engine_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Medians over rounds: seconds of every scene, and the ratios that the goals are of."""
    summary, config = Summary(), parameters["one_engine"]
    frame = frame_of(rows)
    for measure, column, base in _RATIOS:
        with_ratio = frame.assign(over=frame[column] / frame[base])
        summary.by(with_ratio, {}, {measure: ("over", "median", "x")}, case=MEASURED[column][1], than=MEASURED[base][1])
    for column, (measure, case) in MEASURED.items():
        summary.by(frame, {}, {measure: (column, "median", "s")}, case=case)
    frame["prefills"] = (frame.prefilled_tokens - config["sharing"]) / config["shared_tokens"]
    prompts = {"prefills": ("prefills", "median", "prefills"), "first_tokens_s": ("seconds", "median", "s")}
    for shared, case in ((True, "shared"), (False, "apart")):
        summary.by(frame[frame.shared == shared], {}, prompts, case=case)
    return summary


_PANELS = (  # scene, unit, what is drawn by the rows' names, and the goal: so many times which
    (ARRIVAL, "ms", {"decode_s": "nobody prefills", "with_prompt_s": "beside a new prompt"}, 1.25, "with_prompt_s"),
    (LINK, "s", {"alone_s": "alone, pipelined", "beside_s": "beside those who run"}, 1.15, "alone_s"),
    (LINK, "ms", {"plain_tbt_s": "only decodes", "tbt_s": "while it comes"}, 1.25, "plain_tbt_s"),
)
_MORE = {"moving_s": "half of them move, median", "gap_s": "half of them move, longest"}
_TITLES = ("Gaps between tokens of those who stay", "First token of a stored prefix", "P99 of running requests' gaps")


def schematic() -> Schematic:
    """Draw one step of the engine in each of the three scenes."""
    alt = (
        "Three steps of one engine, each with the same token budget. Every running request has its token first. What "
        "arrives takes the rest: a piece of a session that moves to a new stage, a piece of another model's prefix, or "
        "a piece of a prompt that many requests share, which is computed once for all."
    )
    sketch = Schematic(22, 6.6, alt)
    sketch.text(0.2, 0.4, "One token budget: what arrives takes what the running requests leave", heading=True)
    for y, scene, piece, look in (
        (1.1, "a stage arrives", "a session that moves, a piece", "S1"),
        (2.7, "a stored prefix", "another model's cache, a piece", "sender"),
        (4.3, "a shared prompt", "the prompt, once for sixteen", "prefill"),
    ):
        sketch.text(0.2, y + 0.5, scene)
        for request in range(6):
            sketch.box(5 + request, y, "1", "measured")
        sketch.box(11, y, piece, look, width=10)
    sketch.text(8, 6, "running: a token each", align="center")
    sketch.text(16, 6, "the rest of the budget", align="center")
    return sketch


def goals(recorded: Result, now: Result) -> Figure:
    """Every round of the three scenes that are timed, their medians, and where the goal lies: the reader's run over the
    record, each beside its own goal."""
    names = [
        labels_of_panel | (_MORE if panel_index == 0 else {})
        for panel_index, (_, _, labels_of_panel, _, _) in enumerate(_PANELS)
    ]
    fig, axes = panels(3, figsize=(9, 7), height_ratios=[len(labels_of_panel) + 1 for labels_of_panel in names])
    both = over(recorded, now)
    for ax, title, labels_of_panel, (scene, unit, _, times, base) in zip(axes, _TITLES, names, _PANELS, strict=True):
        measure, case = MEASURED[base]
        for shown in both:
            scale = 1e3 if unit == "ms" else 1.0
            _panel(ax, shown, shown.result.frame(scene=scene), labels_of_panel, scale)
            goal, label = times * shown.result.summary.value(measure, case=case) * scale, f"goal: {times:g} times"
            style = shown.style | {"color": COLOURS["target"], "linestyle": "--", "linewidth": 1.5}
            ax.axvline(goal, **style, label=label if shown.own else None)
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xlabel(unit)
        ax.set_xlim(left=0)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=9, frameon=False, borderaxespad=0.1)
    fig.suptitle("Who runs feels a stage as a new prompt, and a stored prefix more than that")
    name_results(fig, both)
    return fig


def _panel(
    ax: Axes, shown: DrawnResult, frame: pandas.DataFrame, labels_of_panel: dict[str, str], scale: float
) -> None:
    look = LOOKS["measured"]
    for line, name in enumerate(labels_of_panel):
        values, height = sorted(scale * frame[name]), line + shown.shift
        edge = {"markeredgecolor": "black"} if shown.own else {}
        ax.plot(values, [height] * len(values), look.marker, color=look.colour, markersize=6, **edge, **shown.style)
        ax.plot([median(values)] * 2, [height - 0.2, height + 0.2], color=look.colour, linewidth=2.5, **shown.style)
    categories(ax, labels_of_panel.values())


def goal_rows(result: Result) -> Table:
    """The ratios that the goals are of, with the seconds behind them."""
    summary, config = result.summary, result.parameters["one_engine"]
    goals_text = (
        ("longest gap / gap beside a prompt", "≤ 1.25", "longest_gap_x", "moving", "with_prompt"),
        ("median gap meanwhile / gap beside a prompt", "", "median_gap_x", "moving", "with_prompt"),
        ("stored prefix: first token in the engine / alone", "≤ 1.15", "ttft_x", "beside", "alone"),
        ("stored prefix: P99 between tokens / of plain steps", "≤ 1.25", "tbt_p99_x", "beside", "plain"),
        (f"prefills of a prompt that {config['sharing']} share", "1", "prefills", "shared", ""),
        ("the same, nothing shared", "", "prefills", "apart", ""),
        ("all first tokens, shared, s", "", "first_tokens_s", "shared", ""),
        ("all first tokens, nothing shared, s", "", "first_tokens_s", "apart", ""),
    )
    places = ({"case": case} | ({"than": than} if than else {}) for *_, case, than in goals_text)
    for (label, goal, measure, *_), labels in zip(goals_text, places, strict=True):
        yield {"measure": label, "goal": goal, "measured": interval(summary.of(measure, **labels), 2)}
