"""What is measured of planes that are merged under running generations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import PROMPT, TIMEOUT_S, events_of
from waiting import wait_stage

from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS
from firsttoken.study.errors import ProfileError
from firsttoken_extras.bitplanes.plane_plan import by_planes
from firsttoken_studies.progressiveserve.coldstart.checkpoints import Checkpoint
from firsttoken_studies.progressiveserve.refinement import (
    RefinementConfig,
    handover_rows,
    handover_summary,
    refinement_summary,
    same_logits,
)

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CONFIG = {
    "questions": "sciq",
    "split": "bits",
    "gbit_per_s": 1.0,
    "clients": 1,
    "new_tokens": 3,
    "timelines": ("whole", "still", "kept"),
    "runs": 1,
    "contexts": (4,),
    "windows": 1,
    "continue_tokens": 2,
}


def checkpoint(staged) -> Checkpoint:
    return Checkpoint(staged.folder, staged.folder, staged.manifest, staged.served.plan, {})


@pytest.fixture
def planes(stage, tmp_path) -> Checkpoint:
    """Beside where the same model is staged otherwise."""
    made = checkpoint(stage(dtype=BF16, plan=lambda shapes: by_planes(shapes, "4 bits")))
    return replace(made, staged=made.staged.rename(tmp_path / "in-planes"))


def test_after_the_hand_over_exact_weights_are_nearer(planes):
    text = torch.randint(1, 100, (3, 20), generator=torch.Generator().manual_seed(3)).tolist()
    rows = handover_rows(planes, text, (8, 12), 6, CPU, BF16)
    assert [row["position"] for row in rows] == list(range(7)) * 6
    after = [row for row in rows if row["position"]]
    assert all(row["kl_kept"] >= -1e-9 for row in after) and any(row["kl_kept"] > 0 for row in after)
    found = handover_summary(rows)
    for context in (8, 12):
        kept, coarse = (found.value("kl_nats", case=case, context_tokens=context) for case in ("kept", "coarse"))
        assert kept < coarse and found.of("redo_ms", context_tokens=context)["n"] == 3


def test_the_logits_of_the_end_are_those_of_the_plain_model(planes, stage):
    whole = checkpoint(stage("llama", dtype=BF16))  # of the same draw
    assert same_logits(planes, whole, [3, 1, 4, 1, 5], CPU, BF16)
    assert not same_logits(planes, checkpoint(stage("qwen2", dtype=BF16)), [3, 1, 4, 1, 5], CPU, BF16)


def test_a_server_tells_what_it_merged(stage, serve):
    """Each word of every matrix once; whoever was open goes on to its last token over what the first bits wrote."""
    staged = stage(dtype=BF16, plan=lambda shapes: by_planes(shapes, "bits"))
    server = serve(staged, policy=TRANSITIONS["naive"])
    session = server.submit(PROMPT, 200, upgrade=True)
    assert wait_stage(server, 2, TIMEOUT_S)
    (arrived,) = (event for event in server.status()["events"] if event["what"] == "arrived")
    matrices = {parameter for parameter in staged.served.model.parameters() if parameter.dim() > 1}
    assert arrived["merged_bytes"] == 2 * sum(parameter.numel() for parameter in matrices)
    assert 0 < arrived["longest_merge_s"] <= arrived["merging_s"]
    assert len(events_of(session)) == 200


def timeline(case: str, tokens: list[float], peak: int, window: tuple[float, float] | None = None) -> list[dict]:
    rows = [{"row": "memory", "at_s": 0.0, "rss_bytes": 100}, {"row": "peak", "rss_bytes": 100 + peak}]
    rows += [{"row": "token", "client": 0, "request": 0, "at_s": at, "stage": 1} for at in tokens]
    rows.append({"row": "request", "client": 0, "request": 0, "at_s": 0.0, "tokens": len(tokens)})
    if window:
        told = {"merged_bytes": 2e9, "merging_s": 0.5, "longest_merge_s": 0.1}
        rows += [{"row": "event", "stage": 2, "what": "loading", "at_s": window[0]}]
        rows += [{"row": "event", "stage": 2, "what": "arrived", "at_s": window[1]} | told]
    return [{"case": case, "run": 0} | row for row in rows]


def test_what_the_rows_say():
    rows = [{"row": "copy", "gb_per_s": 8.0}, {"row": "model", "bytes": 1000}, {"row": "logits", "same": True}]
    rows += timeline("whole", [1.0, 1.1, 1.2], 1000)
    rows += timeline("still", [1.0, 1.1, 1.2], 1050)
    rows += timeline("kept", [1.0, 1.15, 1.2], 1200, (1.1, 1.12))
    found = refinement_summary(rows, {"refinement": CONFIG})
    assert found.value("step_ms", case="still") == pytest.approx(100)
    gap = found.value("longest_gap_x", case="kept", than="step")
    assert gap == pytest.approx(1.5), "the gap after the planes came is not counted"
    assert found.value("merge_gb_per_s") == pytest.approx(4)
    assert found.value("merge_x", than="copy") == pytest.approx(0.5)
    assert found.value("longest_merge_ms") == pytest.approx(100)
    for base in ("model", "whole"):
        assert found.value("peak_memory_x", case="kept", than=base) == pytest.approx(1.2)
    assert found.value("same_logits") is True and found.value("short_requests", case="kept") == 0
    assert found.get("first_answer_s", case="kept") is None, "none of the answers has 24 tokens"


def test_a_first_answer_is_its_first_24_tokens_over_those_of_a_plain_start():
    rows = [{"row": "copy", "gb_per_s": 8.0}, {"row": "model", "bytes": 1000}, {"row": "logits", "same": True}]
    rows += timeline("whole", [2.0 + 0.1 * token for token in range(40)], 1000)
    rows += timeline("again", [1.0 + 0.05 * token for token in range(30)], 1000)
    found = refinement_summary(rows, {"refinement": CONFIG})
    assert found.value("first_answer_s", case="whole") == pytest.approx(4.3)
    assert found.value("first_answer_x", case="again", than="whole") == pytest.approx(2.15 / 4.3)


def test_a_profile_that_names_no_split_or_timeline():
    for told, words in (({"split": "bytes"}, "no split 'bytes'"), ({"timelines": ("paused",)}, "no timeline 'paused'")):
        with pytest.raises(ProfileError, match=words):
            RefinementConfig(**CONFIG | told)
