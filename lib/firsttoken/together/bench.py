"""The engine's goals side by side, in one run on this machine: ``python -m firsttoken.together.bench``.

A stage arrives while eight sessions run, a stored prefix comes over a link beside eight requests, sixteen share a
prompt. Medians with 95 % intervals over rounds; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.engine.fused import fuse
from firsttoken.kvreuse.prefill import Group
from firsttoken.study.dtypes import AUTO, name_of, resolve
from firsttoken.study.machine import machine_slug
from firsttoken.study.record import Rows
from firsttoken.study.stats import Interval, bootstrap
from firsttoken.together.arrival import stage_arrives
from firsttoken.together.restored import over_a_link
from firsttoken.together.shared_prompt import shared_prompt

MODEL = "smollm2-135m"
SESSIONS, BUDGET = 8, 48
STORED_TOKENS, GROUP = 1024, Group(10, 20)
LINKS_GBIT_PER_S = [0.1, 0.4]
SHARING, PROMPT_TOKENS = 16, 512


def main() -> None:
    """Measure what is asked for, and print a line for each goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", default=[*SCENES], help=f"of {', '.join(SCENES)}; all by default")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens in a step")
    parser.add_argument("--gbit-per-s", type=float, nargs="+", default=LINKS_GBIT_PER_S, help="of the links")
    options = parser.parse_args()
    if unknown := set(options.scenes) - SCENES.keys():
        parser.error(f"no scene {min(unknown)!r}; there are {', '.join(SCENES)}")
    model = _loaded(options.model)
    print(f"{options.model}, {name_of(model.dtype)}, {machine_slug()}, {torch.get_num_threads()} threads")
    for scene in options.scenes:
        with torch.inference_mode():
            SCENES[scene](model, options)


def _loaded(name: str) -> PreTrainedModel:
    return load_model(name, dtype=resolve(AUTO, "cpu"), with_tokenizer=False).model


def arrival(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """Half of the sessions move to a stage that brings a quarter of the layers."""
    depth = model.config.num_hidden_layers
    block = range(depth * 11 // 30, depth * 19 // 30)
    rows = stage_arrives(model, sessions=SESSIONS, budget=options.budget, rounds=options.rounds, block=block)
    print(f"a stage arrives, {SESSIONS} sessions, {SESSIONS // 2} move, {options.budget} tokens a step")
    _say("longest gap of the others, ms", [1e3 * row["gap_s"] for row in rows])
    _say("their median gap meanwhile, ms", [1e3 * row["moving_s"] for row in rows])
    _say("their gap beside a new prompt, ms", [1e3 * row["with_prompt_s"] for row in rows])
    _say("their gap where nobody prefills, ms", [1e3 * row["decode_s"] for row in rows])
    _say("longest gap / gap beside a prompt (goal 1.25)", [row["gap_s"] / row["with_prompt_s"] for row in rows])


def link(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """A stored prefix over links of two rates."""
    depth = model.config.num_hidden_layers
    group = Group(depth * GROUP.lo // 30, depth * GROUP.hi // 30)
    served = fuse(_loaded(options.model))
    for rate in options.gbit_per_s:
        with tempfile.TemporaryDirectory() as folder:
            rows = over_a_link(
                model,
                served,
                Path(folder),
                tokens=STORED_TOKENS,
                group=group,
                gbit_per_s=rate,
                running=SESSIONS,
                budget=options.budget,
                rounds=options.rounds,
            )
        print(f"{STORED_TOKENS} stored tokens over {rate:g} Gbit/s (shaped), layers {group} computed again")
        print(f"  beside {SESSIONS} running, {options.budget} tokens a step")
        _say("first token alone, pipelined, ms", [1e3 * row["alone_s"] for row in rows])
        _say("first token in the engine, ms", [1e3 * row["beside_s"] for row in rows])
        _say("in the engine / alone (goal 1.15)", _ratios(rows, "beside_s", "alone_s"))
        _say("TBT P99 of the running, ms", [1e3 * row["tbt_s"] for row in rows])
        _say("of plain steps, ms", [1e3 * row["plain_tbt_s"] for row in rows])
        _say("TBT P99 / plain (goal 1.25)", _ratios(rows, "tbt_s", "plain_tbt_s"))


def prompt(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """One prompt, many requests."""
    rows = shared_prompt(model, requests=SHARING, tokens=PROMPT_TOKENS, rounds=options.rounds)
    print(f"{SHARING} requests with the same {PROMPT_TOKENS} tokens and one of their own")
    for shared in (True, False):
        mine = [row for row in rows if row["shared"] is shared]
        named = "shared" if shared else "not shared"
        _say(f"tokens prefilled, {named}", [row["prefilled_tokens"] for row in mine])
        _say(f"all first tokens, {named}, ms", [1e3 * row["seconds"] for row in mine])


def _ratios(rows: Rows, over: str, under: str) -> list[float]:
    return [row[over] / row[under] for row in rows]


def _say(what: str, values: Sequence[float]) -> None:
    found: Interval = bootstrap(values, "median")
    print(f"  {what:<48} {found.estimate:>8.2f} [{found.low:.2f}, {found.high:.2f}], n={found.n}", flush=True)


SCENES = {"arrival": arrival, "link": link, "prompt": prompt}

if __name__ == "__main__":
    main()
