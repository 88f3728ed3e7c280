"""Profiles on tiny shapes that keep their own relations.

One rule makes them: layers, of models and of what is cut from them, are a quarter; lengths in tokens and the models'
contexts a 32nd; of what is counted there are 2 at most, and it is done once; models have no width.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from firsttoken.progressiveserve import evaluation
from firsttoken.study.profile import Profile, load_profile

SHORTER, FEWER = 32, 4
LENGTHS = {"story_tokens", "tokens", "window_tokens", "max_tokens", "max_prompt_tokens", "prompt_tokens", "new_tokens"}
LENGTHS |= {"contexts", "context_tokens", "continue_tokens", "sweep_tokens"}
COUNTS = {"passages", "items", "eval_items", "windows", "prompts", "closed_book", "calibration", "calibration_passages"}
COUNTS |= {"stories", "watch_questions", "watch_windows", "search_windows", "steps", "clients", "readers"}
AGAIN = {"rounds", "few_rounds", "repeats", "recomputes", "runs", "trials", "draws", "seeds", "copy_mib", "disk_mib"}
AGAIN |= {"starts", "few_starts", "together_times"}
STEPS = {"healing_steps", "tuning_steps"}  # one for each model
FIXED = {
    "only_whole": False,  # no passage fits into so few tokens
    "resamples": 20,
    "matmul_n": 64,
    "duration_s": 0.6,
    "sample_s": 0.05,
    "preemptions": 10,
    "short": 4,
    "long": 4,
}
LAYERS = {"distance": {"max_block", "block"}, "served": {"block_start", "block_size"}, "shapes": {"blocks"}}
LAYERS |= {"one_engine": {"block_start", "block_end", "group_start", "group_end"}}
LAYERS |= {"agents": {"group_start", "group_end"}}
LAYERS |= {"five_at_once": {"group_start", "group_end", "edges"}}
LAYERS |= {
    "deferral": {"sizes"},
    "transitions": {"layers", "transitions"},
    "latency": {"layers"},
    "privacy": {"depths"},
}
TRIAL = {
    **{"source": "vLLM 44594", "case": "a watermark of 0.02", "measure": "preemptions", "published_pct": 62.4},
    **{"stated": True, "requests": 8, "prompt": 40, "output": 60, "spread": 0.2, "blocks": 20},
    **{"scheduler": "sarathi 512", "recovery": "recompute", "victims": ["last_admitted", "last_admitted"]},
    **{"orders": ["in_order", "in_order"], "watermarks": [0.0, 0.3]},
}
SMALL = {
    "capacity": {"requests": 6},
    "card_capacity": {
        "cases": ["mistral-7b 1 a100-sxm 100", "yi-34b 2 a100-sxm 200"],
        "requests": 6,
    },
    "paper_capacity": {
        "cases": ["mistral-7b 1 a100-sxm 100 sarathi-2024", "yi-34b 2 a100-sxm 200 sarathi-2024"],
        "lengths": "openchat-sharegpt4-fit",
        "requests": 6,
    },
    "objective_sweep": {
        "cases": ["mistral-7b 1 a100-sxm", "yi-34b 2 a100-sxm"],
        "bounds_ms": [100, 1000],
        "budgets": [512, 2048],
        "requests": 6,
    },
    "fixed_load": {
        "cases": ["yi-34b 2 a100-sxm"],
        "loads": ["openchat-sharegpt4-fit 1", "arxiv-summarization-fit 1"],
        "requests": 6,
    },
    "on_cards": {"prompts": [2048, 8192, 40000]},
    "operators_here": {"rows": [1, 16], "prompts": [16], "drawn": 3},
    "victims": {"short": 4, "long": 4, "pools": [512], "schedulers": ["prefill_first", "sarathi 512"]},
    "league": {"seeds": 2, "short": 4, "long": 4, "orders": ["in_order", "any_that_fits"]},
    "league_open": {"seeds": 2, "short": 4, "long": 4, "orders": ["in_order"]},
    "league_copies": {"seeds": 2, "short": 4, "long": 4, "orders": ["in_order"]},
    "proposals": {"trials": [TRIAL, TRIAL | {"source": "llama.cpp 184", "victims": ["last_admitted", "longest"]}]},
    "league_elsewhere": {"seeds": 2, "requests": 8, "orders": ["in_order"]},
    "league_cards": {"seeds": 2, "short": 4, "long": 4, "cards": ["table-2"], "recoveries": ["recompute"]},
    "league_agents": {"seeds": 2, "sessions": 4, "cards": ["a100-sxm"], "tools": ["mixed"]},
    "optimum": {"seeds": 2, "preemptions": 1, "orders": ["any_that_fits"]},
    "league_vllm": {"seeds": 2, "scale": 0.046875},
    "live_league": {"victims": ["last_arrived", "least_delayed"], "scale": 0.046875},
    "live_victims": {
        "victims": ["last_arrived", "first_arrived"],
        "recoveries": ["swap", "cross_point"],
        "scale": 0.046875,
    },
    "pipeline": {"requests": 6},
    "serving": {"requests": 6},
    "batch_cost": {"prompt": 16, "pieces": [4, 8], "tile": 6, "contexts": [4]},
    "eight_bits": {"batches": [1, 2], "context": 4},
    "agents": {"said_tokens": 2, "turns": 3, "conversations": 2, "at_once": 2, "chosen_items": 4, "context_tokens": 32},
    "chains": {"forwards": [1, 2], "forward_tokens": 4, "disk_repeats": 1, "clients": 8, "block_hidden": 128},
    "churn": {"servers": 12, "depth": 12, "events": 2},
    "one_engine": {"sessions": 2, "session_tokens": 32, "session_new_tokens": 40, "beside_tokens": 100, "sharing": 2}
    | {"gbit_per_s": 10.0, "stored_tokens": 32, "shared_tokens": 32},
    "five_at_once": {"requests": 5, "prompt_tokens": 12, "new_tokens": 6, "prefix_tokens": [16, 32], "limit_s": 30}
    | {"gbit_per_s": 100.0, "prefix_gbit_per_s": 100.0, "ttft_s": 30.0, "tbt_s": 30.0},
    "families_trained": {"questions": 2},
    "drafts": {"chats": 2, "chat_tokens": 12, "problems": 2, "short_tokens": 10, "batch": 2},
    "burst": {"waiting": 3, "tokens": 3},
    "waits": {"search": 2, "judge": 2, "tokens": 3, "tried": 2, "splits": ["8 bits", "4 bits"], "budgets": ["5 bits"]},
    "survival": {
        "tokens": 5,
        "prompt_tokens": 8,
        "servers": 3,
        "delay_ms": 1,
        "positions": [2],
        "faults": ["kill", "cut"],
    },
    "swarm_tuning": {
        "rows": 2,
        "tokens": 8,
        "steps": 2,
        "rank": 1,
        "prompt_tokens": 2,
        "chains": [1, 3],
        "rounds": 1,
        "threads": 1,
    },
    "transport": {"tokens": 4, "prompt_tokens": 8, "chains": [1, 3]},
    "borrowed": {"tokens": 4, "main_rounds": 2, "busy_rounds": 1, "alone_s": 0.2},
    "fetchers": {"tokens": 4, "servers": [2, 3]},
    "validation": {"tokens": 3, "prompt_tokens": 4, "servers": 2, "batches": [1], "lies": ["noise"], "rates": [0.1, 1]},
    "privacy": {"train_windows": 4, "windows": 2, "batch": 2},
    "live_peer": {"prompt_spread": 4},
    "stalls": {"context": 2, "before": 2, "prompt": 32, "new_tokens": 4},
}


def shorter(value: Any) -> Any:
    """A length by the rule; of several the shortest and the longest."""
    if isinstance(value, list):
        return list(dict.fromkeys(shorter(one) for one in (value[0], value[-1])))
    return max(2, value // SHORTER)


def fewer(value: Any, section: str = "") -> Any:
    """Layers, or several numbers of them, by the rule; 0 stays 0."""
    if not isinstance(value, list):
        return value and max(1, value // FEWER)
    each = [fewer(one) for one in value]
    return [max(2, one) for one in each] if section == "shapes" else list(dict.fromkeys(each))  # B and C have one each


def scaled(section: str, key: str, value: Any) -> Any:
    """One entry of a profile by the rule."""
    if key in SMALL.get(section, {}):
        return SMALL[section][key]
    if key == "runs" and isinstance(value, list):
        value = [re.sub(r"(\d+) tokens", lambda found: f"{shorter(int(found[1]))} tokens", run) for run in value]
        return [re.sub(r"groups of (\d+)", lambda found: f"groups of {fewer(int(found[1]))}", run) for run in value]
    if key == "cuts":
        first = [
            re.sub(r"(\d+):\d+", lambda found: f"{fewer(int(found[1]))}:{fewer(int(found[1])) + 1}", cut)
            for cut in value
        ]
        return list(dict.fromkeys(first))
    if section == "reuse_training" and key == "adapters":
        return [re.sub(r"\d+$", "1", adapter) for adapter in value]
    if key in LAYERS.get(section, ()):
        return fewer(value, section)
    if key in LENGTHS:
        return shorter(value)
    if key in COUNTS or key in AGAIN:
        return min(value, 2 if key in COUNTS else 1)
    if key in STEPS:
        return [1 for _ in value]
    if key == "cases":
        return list(dict.fromkeys(f"{case.split()[0]} 4" for case in value))
    if key == "tasks":
        return [f"{task.split()[0]} 4" for task in value]
    if key == "systems":
        return [name for name in value if name != "vllm"]  # has an environment of its own
    return FIXED.get(key, value)


def tiny_profile(name: str, folder: Path) -> Profile:
    """The profile ``name`` by the rule, on a CPU, with adapters below ``folder``."""
    sections = {key: dict(value) for key, value in load_profile(name).sections.items()}
    sections["quality"].setdefault("max_prompt_tokens", evaluation.QualityConfig.max_prompt_tokens)
    overrides: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
    for section, entries in sections.items():
        overrides |= {f"{section}.{key}": scaled(section, key, value) for key, value in entries.items()}
    for key in ("served.adapters", "reuse.adapters", "agents.adapters"):
        section, _, entry = key.partition(".")
        if section not in sections:
            continue
        overrides[key] = str(folder / "adapters" / sections[section][entry])
    live = sections["live_policies"]  # a pool of 8 blocks, lengths in proportion: requests must outgrow a block
    overrides |= {"live_policies.scale": 8 * live["scale"] / live["blocks"], "live_policies.blocks": 8}
    sections["quality"].pop("max_prompt_tokens")
    return load_profile(name, **overrides)
