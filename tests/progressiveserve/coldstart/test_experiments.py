"""The online experiments end to end, on the paper profile's path: a Llama folder, the report's adapters, SQuAD."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.nb13_cold_start.study import reachable
from firsttoken_studies.nb15_recovery_timeline import trial as timeline_trial
from firsttoken_studies.nb16_open_session.study import ROUNDING
from firsttoken_studies.nb18_what_a_draft_is_worth import figures as draft_figures
from firsttoken_studies.nb18_what_a_draft_is_worth import waiting
from firsttoken_studies.nb18_what_a_draft_is_worth.burst import LATE
from firsttoken_studies.progressiveserve import recovery_figures as recovery_tables
from firsttoken_studies.progressiveserve.coldstart import figures, trial
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, KERNEL, SERVER, TrialLink
from firsttoken_studies.progressiveserve.layers import healing_training
from firsttoken_studies.record.results import Result, read_result, rows_where

pytestmark = pytest.mark.long(seconds=50)

FEW = {
    "coldstart": {
        "rounds": 1,
        "few_rounds": 1,
        "readers": 2,
        "gbit_per_s": 0.01,
        "variants": ["from_pretrained", "whole_streamed", "progressive"],
        "disk_variants": [],
        "sweep_links": [],
        "parallel_variants": [],
        "few_variants": [],
        "server_variants": [],
    },
    "deferral": {
        "sizes": [0, 2],
        "trials": 1,
        "readers": 2,
        "calibration": 2,
        "tokens": 32,
        "search_windows": 1,
        "items": 4,
        "windows": 2,
    },
    "timeline": {"gbit_per_s": 0.005, "clients": 2, "new_tokens": 6, "duration_s": 3, "sample_s": 0.05, "runs": 1},
    "drafts": {
        "cuts": ["lossless", "lossless, 2:4 later", "8 bits"],
        "chats": 3,
        "chat_tokens": 6,
        "problems": 0,
        "items": 3,
        "short_tokens": 4,
        "batch": 2,
    },
    "answers": {
        "variants": ["whole", "layers", "lossless", "8 bits", "layers, no drafts"],
        "starts": 1,
        "gbit_per_s": 0.01,
        "readers": 2,
    },
    "burst": {"waiting": 3, "tokens": 3, "rounds": 1, "gbit_per_s": [0.01]},
    "waits": {
        "search": 2,
        "judge": 3,
        "tokens": 6,
        "batch": 2,
        "tried": 2,
        "splits": ["8 bits", "4 bits"],
        "budgets": ["5 bits"],
        "windows": 2,
        "window_tokens": 16,
    },
    "open_session": {"contexts": [8, 24], "repeats": 1, "windows": 2, "context_tokens": 16, "continue_tokens": 4},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report's adapters are kept once they are trained."""
    return tmp_path_factory.mktemp("trained") / "adapters"


@pytest.fixture
def trained(paper: Profile, adapters: Path) -> Profile:
    """The paper profile with the report's adapters trained, and every online experiment cut to seconds."""
    sections = dict(paper.sections)
    for name, keys in FEW.items():
        questions = {"questions": sections["quality"]["questions"]} if "questions" in sections[name] else {}
        sections[name] = dict(sections[name]) | keys | questions
    profile = dataclasses.replace(paper, sections=sections)
    own = Path(sections["served"]["adapters"])
    if adapters.exists():
        shutil.copytree(adapters, own)
    else:
        healing_training(profile)
        shutil.copytree(own, adapters)
    return profile


@pytest.fixture
def few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that load a whole model, and timelines that do not move, run in this process.

    Each process of its own imports for seconds; the others of this file and those of ``test_trial.py`` are real.
    """
    real = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        module, asked = (command[2] if len(command) > 2 else ""), {}
        if module == trial.__name__:
            asked = json.loads(command[3])
        elif module == timeline_trial.__name__:
            asked = json.loads(options["input"])
        if asked.get("variant") == "whole_streamed":
            said = {"variant": asked["variant"]} | trial.main(trial.TrialSpec(**asked))
        elif asked.get("moves") == []:
            said = timeline_trial.main(timeline_trial.TimelineSpec(**asked))
        else:
            return real(command, **options)
        return subprocess.CompletedProcess(command, 0, json.dumps(said), "")

    monkeypatch.setattr(subprocess, "run", run)


def test_a_cold_start_from_trial_to_table(trained, few_processes):
    result = run_experiment("cold_start", trained)
    assert read_result(result.path).rows == result.rows
    tokens = {row["variant"]: row["token_id"] for row in result.rows if row["variant"] != "read"}
    (last,) = (row["full_token_id"] for row in result.rows if row["variant"] == "progressive")
    assert tokens["whole_streamed"] == last and tokens.get("from_pretrained", last) == last
    over = result.summary.of("ttft_x", variant="progressive", than="whole_streamed", link="0.01gbit")
    assert over["n"] == 1
    assert {row["link"] for row in result.rows} == {"0.01 Gbit/s"}
    assert {row["ratio"] for row in figures.target_rows(None, result)} == {
        row["ratio"] for row in figures.target_rows(result, result)
    }


def test_a_variant_that_a_bucket_cannot_hold_back_is_refused_or_left_out(trained):
    for shaped_by in (BUCKET, SERVER):
        assert reachable(["runai", "whole"], TrialLink(1.0, shaped_by)) == ["whole"]
    assert reachable(["runai", "whole"], TrialLink(1.0, KERNEL)) == ["runai", "whole"]
    sections = dict(trained.sections)
    sections["coldstart"] = dict(sections["coldstart"]) | {"sweep_variants": ["runai"]}
    with pytest.raises(ProfileError, match="runai opens its own files"):
        run_experiment("cold_start", dataclasses.replace(trained, sections=sections))
    sections["coldstart"] = dict(sections["coldstart"]) | {"sweep_variants": [], "variants": ["warp"]}
    with pytest.raises(ProfileError, match="no cold-start variant 'warp'"):
        run_experiment("cold_start", dataclasses.replace(trained, sections=sections))
    sections["coldstart"] = dict(sections["coldstart"]) | {"sweep_links": [0.01]}
    with pytest.raises(ProfileError, match="name each rate once"):
        run_experiment("cold_start", dataclasses.replace(trained, sections=sections))


def test_the_sweep_times_and_scores_every_size(trained, few_processes):
    result = run_experiment("deferral_sweep", trained)
    assert [entry["where"] for entry in result.summary.all("ttft_p50_s")] == [{"layers": 0}, {"layers": 2}]
    for variant, layers in (("none", 0), ("distance", 2), ("perplexity", 2), ("healed", 3)):
        assert result.summary.of("f1_pct", variant=variant, layers=layers)
    assert figures.most_deferred(result) == 2
    moved = {row["deferred_layers"]: row["bytes"] for row in result.rows if "bytes" in row}
    assert moved[2] < moved[0]
    assert [row["layers deferred"] for row in figures.deferral_rows(result)] == [0, 2]
    sections = dict(trained.sections)
    for sizes, message in (([0, 6], r"deferral\.sizes .*: 7 layers of tiny-llama .*, there are 6"), ([2], "name 0")):
        sections["deferral"] = dict(sections["deferral"]) | {"sizes": sizes}
        with pytest.raises(ProfileError, match=message):
            run_experiment("deferral_sweep", dataclasses.replace(trained, sections=sections))


def test_the_timeline_serves_every_request_whole(trained, few_processes):
    result = run_experiment("recovery_timeline", trained)
    assert all(result.summary.value("short_requests", case=case) == 0 for case in ("whole", "pinned", "upgrade"))
    peaks = [row for row in result.rows if row["row"] == "peak"]
    assert len({row["model_bytes"] for row in peaks}) == 1 and peaks[0]["model_bytes"] > 0
    for case, first, last in (("whole", 1, 1), ("pinned", 1, 3), ("upgrade", 1, 3)):
        begun = [row["stage"] for row in rows_where(result.rows, case=case, row="event", what="serving")]
        assert (min(begun), max(begun)) == (first, last), "one between may arrive with the next one, and never serve"
    assert len(recovery_tables.timeline_rows(result)) >= 5


def test_a_draft_of_the_whole_model_stays_and_one_without_layers_hardly_does(trained):
    result: Result = run_experiment("drafts_kept", trained)
    for task, drafted in (("chat", 6), ("short answer", 4)):
        stays = {name: result.summary.of("kept_pct", variant=name, task=task) for name in FEW["drafts"]["cuts"]}
        assert stays["lossless"]["value"] == 100 and stays["lossless"]["n"] == 3
        assert stays["lossless, 2:4 later"]["value"] < 50
        assert {row["drafted"] for row in rows_where(result.rows, task=task)} <= {*range(1, drafted + 1)}
        share = {name: result.summary.value("byte_share", variant=name, task=task) for name in stays}
        assert share["lossless"] == 1 > share["8 bits"] and 0 < share["lossless, 2:4 later"] < 1
    assert len(draft_figures.kept_rows(result)) == 8, "the healed stage drafts too"
    sections = dict(trained.sections)
    sections["drafts"] = dict(sections["drafts"]) | {"cuts": ["7 bits"]}
    with pytest.raises(ProfileError, match=r"drafts\.cuts: no split"):
        run_experiment("drafts_kept", dataclasses.replace(trained, sections=sections))


def test_the_first_final_answer_is_the_whole_models_with_drafts_and_without(trained):
    result: Result = run_experiment("first_answers", trained)
    names = {"whole", "lossless", "layers", "8 bits", "layers, no drafts"}
    assert {row["variant"] for row in result.rows} == names and len(result.rows) == 2 * len(names)
    for entry in result.summary.all("same_answers"):
        assert entry["value"], entry["where"]
    drafted = {row["variant"]: row["drafted"] for row in rows_where(result.rows, task="chat")}
    assert drafted["8 bits"] > 0 == drafted["whole"] == drafted["layers, no drafts"]
    assert all(row["kept"] <= row["drafted"] and row["first_s"] <= row["answer_s"] for row in result.rows)
    assert {row["cold"] for row in result.rows} == {True}, "the link is slower than this disk"
    assert len(draft_figures.answer_rows(result)) == 2 * len(names)
    sections = dict(trained.sections)
    sections["answers"] = dict(sections["answers"]) | {"variants": ["lossless"]}
    with pytest.raises(ProfileError, match=r"answers\.variants: whole is missing"):
        run_experiment("first_answers", dataclasses.replace(trained, sections=sections))


def test_prompts_that_wait_have_their_tokens_soon_after_the_last_layer(trained):
    result: Result = run_experiment("waiting_burst", trained)
    starts = ["whole", "layers", "8 bits"]
    assert [row["variant"] for row in result.rows] == [f"{name}{ending}" for name in starts for ending in ("", LATE)]
    assert all(row["loaded_s"] <= row["first_s"] < row["answer_s"] and row["drafted"] == 0 for row in result.rows)
    assert len({tuple(row["tokens"]) for row in result.rows}) == 1 and {row["cold"] for row in result.rows} == {True}
    assert len(draft_figures.burst_rows(result)) == len(starts)


def test_what_waits_is_chosen_on_other_chats_than_those_that_judge(trained):
    result: Result = run_experiment("what_waits", trained)
    by_rule = {(row["variant"], row["case"]): row for row in result.rows}
    assert {case for _, case in by_rule} == {"layers", "5 bits"} and len(result.rows) == 3 * len(by_rule)
    assert all(0 <= row["kept"] <= row["of"] <= 6 for row in result.rows)
    assert by_rule["by drafts", "5 bits"]["first_share"] <= by_rule["alike", "5 bits"]["first_share"]
    assert len(draft_figures.waiting_rows(result)) == len(by_rule)


def test_layers_get_coarser_where_a_byte_costs_the_fewest_kept_tokens():
    stays = {(0, "fine"): 9, (0, "coarse"): 1, (1, "fine"): 9, (1, "coarse"): 8, (2, "fine"): 9, (2, "coarse"): 5}
    sizes = {"fine": 10, "coarse": 4}
    for most, coarse in ((30, ()), (29, (1,)), (24, (1,)), (23, (1, 2)), (12, (0, 1, 2))):
        made = waiting.coarsened(range(3), list(sizes), lambda layer, split: sizes[split], stays, most)
        assert made == {layer: "coarse" if layer in coarse else "fine" for layer in range(3)}
        assert sum(sizes[split] for split in made.values()) <= most
    with pytest.raises(ProfileError, match=r"waits\.budgets: coarse in every layer take 12 bytes, the budget has 11"):
        waiting.coarsened(range(3), list(sizes), lambda layer, split: sizes[split], stays, 11)


def test_a_split_that_does_not_exist_is_named_before_anything_is_loaded(trained):
    for key in ("splits", "budgets"):
        waits = dict(trained.sections["waits"]) | {key: ["7 bits"]}
        with pytest.raises(ProfileError, match="waits: no split of weights is called '7 bits'; known: "):
            run_experiment("what_waits", dataclasses.replace(trained, sections=trained.sections | {"waits": waits}))


def test_open_sessions_are_right_but_for_the_naive_one(trained):
    result: Result = run_experiment("open_session", trained)
    value = result.summary.value
    for kind in ("healed", "bare"):
        for policy in ("prefill again", "from boundary states"):
            assert value("logit_error", policy=policy, variant=kind) < 1e-3 < ROUNDING
        assert value("logit_error", policy="naive", variant=kind) > 1e-2
        assert value("excess_nll", policy="prefill again", variant=kind) == 0
    assert len(list(recovery_tables.policy_rows(result))) == 10
