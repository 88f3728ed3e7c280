"""A stage arrives while sessions run and some of them move: how long the others wait for a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
from transformers import PreTrainedModel

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine
from firsttoken.engine.live import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.recovery.transitions import PrefillAgain
from firsttoken.progressiveserve.recovery.views import GrownView, moving
from firsttoken.study.record import Rows

PLAIN_STEPS = 12


def stage_arrives(
    model: PreTrainedModel,
    *,
    sessions: int,
    prompt_tokens: int,
    new_tokens: int,
    budget: int,
    rounds: int,
    block: range,
) -> Rows:
    """Rows {round, gap_s, moving_s, with_prompt_s, decode_s}, seconds between two tokens of those that stay.

    ``sessions`` of ``prompt_tokens`` run, half of them move when the layers of ``block`` arrive; ``new_tokens`` are
    enough for nobody to end meanwhile. ``gap_s`` is the longest from the last
    token before to the end of the moving, ``moving_s`` their median, ``with_prompt_s`` the median while a new prompt is
    prefilled beside the same sessions under the same ``budget``, ``decode_s`` the median where nobody prefills.
    """
    stages = _stages(model, block)
    blocks = (sessions + 1) * -(-(prompt_tokens + new_tokens) // 16)
    rows: Rows = []
    with closing(LiveExecutor(model, blocks)) as executor:
        for number in range(rounds):
            views = [GrownView(model, stage, PrefillAgain()) for stage in stages]
            executor.view = views[0]
            engine = Engine(
                executor, EngineConfig(scheduler="sarathi", watermark=0.0, requests=sessions + 1, token_budget=budget)
            )
            vocabulary = model.config.vocab_size
            prompts = [[(7 * n + i) % vocabulary for n in range(prompt_tokens)] for i in range(sessions + 1)]
            open_ = [
                engine.submit(prompts[session], Sampling(new_tokens), moves=session < sessions // 2)
                for session in range(sessions)
            ]
            staying = open_[sessions // 2 :]
            while not all(request.times_s for request in open_):
                engine.step()
            for _ in range(PLAIN_STEPS):
                engine.step()
            plain = np.diff(staying[0].times_s[-PLAIN_STEPS:])
            engine.publish(views[1], moving(PrefillAgain()))
            moved = _steps(engine, staying, lambda moves=open_: not any(request.redo for request in moves))
            new = engine.submit(prompts[-1], Sampling(1))
            beside = _steps(engine, staying, lambda late=new: late.finished)
            rows.append(
                {
                    "round": number,
                    "gap_s": max(moved),
                    "moving_s": float(np.median(moved)),
                    "with_prompt_s": float(np.median(beside)),
                    "decode_s": float(np.median(plain)),
                }
            )
            for request in open_:
                engine.cancel(request)
    return rows


def _steps(engine: Engine, watched: Sequence[Request], over: Callable[[], bool]) -> list[float]:
    """Step until ``over``; the seconds between tokens of ``watched``, from their last ones before on."""
    before = [len(request.times_s) for request in watched]
    while not over():
        engine.step()
    return [float(gap) for request, n in zip(watched, before, strict=True) for gap in np.diff(request.times_s[n - 1 :])]


def _stages(model: PreTrainedModel, block: range) -> list[StageView]:
    layers = list(model.model.layers)
    ends = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
    first = [PassLayer() if i in block else layer for i, layer in enumerate(layers)]
    return [make_view(1, first, ends), make_view(2, layers, ends)]
