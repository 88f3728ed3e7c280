"""Settings of experiments that mean nothing: each is refused in one line, before there is any work."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.assets.models import GGUFS
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.yaml_text import read_yaml
from firsttoken.study.profile import load_profile
from firsttoken_studies.registry import EXPERIMENTS

TURNS = "turns must be at least 3, said_tokens at least 2, conversations at least 1"
NO_PROFILE = "is no profile; write FOLDER MODEL GPUS, the model of mistral-7b"
NO_LOAD = "is no load; write LENGTHS RATE"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {  # by the experiment and its section, if that has another name
    "agents": [
        ({"turns": 2}, TURNS),
        ({"said_tokens": 1}, TURNS),
        ({"conversations": 0}, TURNS),
        ({"at_once": 9}, "at_once must be from 1 to conversations"),
        ({"at_once": 0}, "at_once must be from 1 to conversations"),
    ],
    "batch_cost": [
        ({"pieces": [1024]}, "batch cost: pieces must be shorter"),
        ({"table_pieces": [4096]}, "batch cost: pieces must be shorter"),
        ({"running": 0}, "batch cost: tokens, running and repeats must be at least 1"),
    ],
    "borrowed_start borrowed": [
        ({"main_rtt_ms": 7}, "must be among"),
        ({"rounds": 0}, "at least 1 round"),
        ({"tokens": 1}, "2 tokens"),
        ({"gbit_per_s": [0, 1]}, "gbit_per_s must be above 0"),
    ],
    "card_capacity": [({"cases": ["m 1 c 1", "m 1 c 1"]}, "the case 'm 1 c 1' is there twice; name each once")],
    "chunk_error": [
        ({"tile": 0}, "tile and processors must be at least 1"),
        ({"processors": 0}, "tile and processors must be at least 1"),
        ({"profiles": []}, "name at least one profile, and each once"),
        ({"profiles": ["a", "a"]}, "name at least one profile, and each once"),
        *(
            ({"profiles": [text]}, NO_PROFILE)
            for text in ("folder llama-3.1-8b", "folder gpt 1", "folder llama-3.1-8b two", "f llama-3.1-8b 0")
        ),
    ],
    "families": [
        ({"waiting_pct": 100}, "waiting_pct"),
        ({"tried": 0}, "tried"),
        ({"models": []}, "models"),
        ({"tasks": ["sciq"]}, "tasks"),
    ],
    "families_trained": [
        ({"models": []}, "models"),
        ({"healing_steps": [1]}, r"families_trained\.healing_steps: give each of the 2 models 1 or more"),
        ({"tuning_steps": [1, 0]}, r"families_trained\.tuning_steps: give each of the 2 models 1 or more"),
        ({"shares_pct": [0, 33]}, "a share of the layers must be from 1 to 99 %"),
        ({"shares_pct": [33, 100]}, "a share of the layers must be from 1 to 99 %"),
    ],
    "five_at_once": [
        ({"arms": ["al"]}, r"no arm 'al'; .*'all'"),
        ({"requests": 1}, "must be at least 1"),
        ({"pool_share": 0}, "the latter above 0"),
        ({"load": 0}, "must be above 0"),
        ({"prefix_tokens": [8, 16]}, "16 or more"),
        ({"edges": [4]}, "edges must have group_start"),
    ],
    "fixed_load": [
        ({"loads": [text]}, NO_LOAD)
        for text in ("sharegpt", "sharegpt fast", "sharegpt 0", "sharegpt -1", "sharegpt nan", "sharegpt inf")
    ],
    "mixture_error": [
        ({name: 0}, "mixture_error: every, rounds and token_budget must be at least 1")
        for name in ("every", "rounds", "token_budget")
    ],
    "objective_sweep": [
        ({"cases": ["yi-34b a100-sxm"]}, "'yi-34b a100-sxm' is no set-up; write MODEL GPUS CARD"),
    ],
    "operators_here": [({name: [4, 0]}, "must be at least 1") for name in ("rows", "prompts")],
    "precision_frontier precision": [
        ({"cuts": ["bits"]}, "precision.cuts: no cut 'bits'; known: a plan or 'sparse SHARE' of F16 or BF16"),
        ({"cuts": ["bits, ends half of BF16"]}, "precision.cuts: no split of weights is called 'half'"),
        ({"cuts": ["sparse 2 of BF16"]}, "precision.cuts: 'sparse 2' keeps no share of the bytes"),
        ({"cuts": ["bits of F16"]}, "precision.cuts: name 'lossless of F16' too"),
    ],
    "reports_on_cards on_cards": [
        ({"cold_links": [0.0]}, "on_cards: links and cold_links must be above 0"),
        ({"links": [-1]}, "on_cards: links and cold_links must be above 0"),
        ({"cold_prompt": 0}, "on_cards: lengths, prompts, context and cold_prompt must be at least 1"),
        ({"models": ["gpt"]}, "on_cards: no shape is called 'gpt'; known: mistral-7b"),
    ],
    "reuse_throughput serving": [
        ({"loads": [0.5]}, "two or more rates"),
        ({"loads": [0.8, 0.5]}, "ascending"),
        ({"output_tokens": 1}, "output_tokens at least 2"),
        ({"gbit_per_s": 0.0}, "gbit_per_s must be above 0"),
    ],
    "swarm_chains chains": [
        ({"block_hidden": 100}, "multiple of 128"),
        ({"block_bits": [16]}, r"block_bits must be \[8\]"),
        ({"repeats": 0}, "at least 1"),
    ],
    "swarm_churn churn": [
        ({"rules": ["best"]}, "no rule 'best'"),
        ({"events": 0}, "at least 1"),
        ({"depth": 9}, "depth at least 10"),
    ],
    "swarm_survival survival": [
        ({"faults": ["flood"]}, "no fault 'flood'"),
        ({"tokens": 0}, "at least 1"),
        ({"tokens": 12, "positions": [12]}, "must lie within the 12 tokens"),
    ],
    "swarm_tuning": [({"tokens": 500, "prompt_tokens": 13}, "at most 512 together")],
    "swarm_validation validation": [
        ({"lies": ["fib"]}, "no lie 'fib'"),
        ({"rates": [0.0]}, "shares of the answers"),
        ({"trials": 0}, "at least 1"),
    ],
    "throughput": [
        ({"systems": ["engin"]}, "throughput: no system 'engin'"),
        ({"cases": ["float31 3"]}, "'float31 3' is no dtype and number of requests"),
        ({"cases": ["float32"]}, "'float32' is no dtype"),
        ({"cases": ["float32 0"]}, "'float32 0' is no dtype"),
    ],
    "two_cards": [
        ({"model": "gpt"}, "two_cards: no shape is called 'gpt'; known: mistral-7b"),
        ({"batch": 0}, "a run of vLLM: token_budget and batch must be at least 1"),
        ({"token_budget": 0}, "a run of vLLM: token_budget and batch must be at least 1"),
    ],
    "victims": [
        ({"victims": ["oldest"]}, "no victim 'oldest'; known: first_arrived"),
        ({"recoveries": ["swp"]}, "no recovery 'swp'; known: both_ends.*did you mean 'swap'"),
        ({"schedulers": ["orca"]}, "no scheduler 'orca'"),
        ({"pools": [0]}, "must be at least 1"),
    ],
    "league_elsewhere": [
        ({"loads": ["azure"]}, "no load 'azure'; known: azure-code"),
        ({"load_x": 0}, "load_x above 0"),
        ({"orders": ["lifo"]}, "no resume order 'lifo'"),
    ],
    "league_cards": [
        ({"cards": ["a100"]}, "no card 'a100'; known: a100-sxm"),
        ({"burstiness": [0]}, "load_x and burstiness above 0"),
        ({"victims": ["oldest"]}, "no victim 'oldest'"),
    ],
    "league_vllm": [({"victims": ["oldest"]}, "no victim choice 'oldest'"), ({"blocks": 0}, "must be at least 1")],
    "llama_full": [
        ({"caches": ["paged"]}, "no cache 'paged'; known: shifted, split, unified"),
        ({"prompt": [40, 256]}, "a prompt must fit into a slot's part of context"),
    ],
    "league_agents": [
        ({"tools": ["slow"]}, "no 'slow'; known: long, mixed, short"),
        ({"idle": ["keep"]}, "no 'keep'; known: cache"),
        ({"cards": ["a100"]}, "no 'a100'; known: a100-sxm"),
        ({"turns": [4, 2]}, "a range is two numbers from 1 on, the lower first: 4, 2"),
        ({"blocks": 900}, "900 blocks hold less than two long sessions"),
    ],
    "optimum": [({"requests": 13}, "requests 1 to 12"), ({"recoveries": ["swp"]}, "no recovery 'swp'")],
    "victims_live live_victims": [({"victims": ["oldest"]}, "no victim choice 'oldest'; known: first_arrived")],
}


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [(place, *case) for place, cases in REFUSED.items() for case in cases],
    ids=lambda part: str(part)[:40],
)
def test_a_setting_that_means_nothing_is_refused_before_any_work(place: str, changes: dict, message: str) -> None:
    experiment, section = place.split()[0], place.split()[-1]
    overrides = {f"{section}.{name}": value for name, value in changes.items()}
    profile = load_profile("gpu" if experiment == "operators_here" else "full", **overrides)
    with pytest.raises(ProfileError, match=message) as told:
        EXPERIMENTS[experiment](profile, *([None] * len(EXPERIMENTS[experiment].reads)))
    assert "\n" not in str(told.value)


def test_a_model_brings_the_settings_of_its_depth_and_what_is_set_by_hand_comes_after_them() -> None:
    quick, other = load_profile("quick").sections, {"model": "qwen2.5-coder-0.5b", "distance.block": 4}
    changed = load_profile("quick", **other).sections
    assert (quick["distance"]["block"], changed["distance"]["block"]) == (8, 4)
    assert changed["served"] == quick["served"] | {
        "block_start": 8,
        "block_size": 6,
        "task_adapter": "",
        "adapters": other["model"],
    }
    assert load_profile("quick", model="random:tiny").sections == quick
    every = load_profile("full").sections
    for model, sections in read_yaml(paths.ENV / "models.yaml").items():
        assert model in GGUFS
        assert {f"{name}.{key}" for name, keys in sections.items() for key in keys} <= {
            f"{name}.{key}" for name, keys in every.items() for key in keys
        }
