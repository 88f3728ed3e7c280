"""Families of models, trained: the summary of rows that are known, and which groups of layers are compared."""

from __future__ import annotations

import dataclasses
import math

import pytest
from byte_tokenizers import a_token_a_byte
from small_models import small_model

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.profile import load_profile
from firsttoken_studies.droidspeak.answer_decoding import greedy
from firsttoken_studies.droidspeak.constructed_tasks import TASKS
from firsttoken_studies.droidspeak.decoding import DROIDSPEAK, OWN, REUSE, own_cache
from firsttoken_studies.droidspeak.pairs import PairedModel
from firsttoken_studies.droidspeak.reuse_items import TaskItem, encode
from firsttoken_studies.nb11_which_layers_can_wait import families_trained as studied
from firsttoken_studies.nb11_which_layers_can_wait.families_trained import (
    CHOOSE,
    JUDGE,
    FamiliesTrainedConfig,
    families_trained,
    families_trained_summary,
)

CONFIG = FamiliesTrainedConfig(("one",), (1,), (1,), 4, 192, 3, 4, 2, (33, 67))
LOSSES, F1 = {"s0": 1.0, "s1_none": 5.0, "s1_ours": 2.0}, {"s0": 0.8, "s1_none": 0.0, "s1_ours": 0.6}
SCORES = {OWN: [1.0, 1.0, 0.0, 0.0], REUSE: [0.5, 0.0, 0.0, 0.0], DROIDSPEAK: [1.0, 0.5, 0.0, 0.0]}


def rows_of(model: str) -> list[dict]:
    """A block, four windows and four questions of each variant, and three ways to come by a cache."""
    rows: list[dict] = [{"start": 14, "size": 4}]
    for variant, loss in LOSSES.items():
        rows += [{"variant": variant, "task": "text", "text_nll": at + loss} for at in range(4)]
        score = {"em": 0.0, "f1": F1[variant], "answer_nll": loss}
        rows += [{"variant": variant, "task": "extractive", **score} for _ in range(4)]
    rows.append({"method": DROIDSPEAK, "items": CHOOSE, "lo": 0, "hi": 6, "item_score": [0.0]})
    for method, scores in SCORES.items():
        lo, hi = {OWN: (0, 18), REUSE: (0, 0), DROIDSPEAK: (3, 9)}[method]
        share = 33 if method == DROIDSPEAK else None
        rows.append({"method": method, "items": JUDGE, "share_pct": share, "lo": lo, "hi": hi, "item_score": scores})
    return [{"model": model} | row for row in rows]


def test_each_family_has_its_own_numbers() -> None:
    quality = dataclasses.asdict(load_profile("full").section("quality", studied.QualityConfig))
    parameters = {"families_trained": {"models": ["one", "/here/two"]}, "quality": quality}
    summary = families_trained_summary([*rows_of("one"), *rows_of("two")], parameters)
    for model in ("one", "two"):
        healed = {"model": model, "stage": 1, "recipe": "ours"}
        assert summary.value("chosen_start", model=model) == 14
        assert summary.value("perplexity", model=model, stage=0) == pytest.approx(math.exp(2.5))
        assert summary.value("log_perplexity_recovered_pct", **healed) == pytest.approx(75)
        assert summary.value("f1_recovered_pct", **healed) == pytest.approx(75)
        third = {"model": model, "method": DROIDSPEAK, "case": "33 % of the layers"}
        assert summary.value("group", **third) == "3-8"
        assert summary.value("score_pct", model=model, method=OWN) == 50
        assert summary.value("relative_loss_pct", model=model, method=REUSE) == 75
        assert (summary.value("loss_points", **third), summary.value("relative_loss_pct", **third)) == (12.5, 25)


def test_groups_of_a_share_begin_at_every_half_of_one() -> None:
    assert CONFIG.groups(18, 33) == [Group(start, start + 6) for start in (0, 3, 6, 9, 12)]
    assert CONFIG.groups(22, 67) == [Group(0, 15), Group(7, 22)]
    assert CONFIG.groups(2, 33) == [Group(0, 1), Group(1, 2)]


def test_a_fine_tune_that_is_its_base_loses_nothing_on_its_cache(monkeypatch, tmp_path) -> None:
    """And the groups that are judged are those that answer most of the other questions."""
    model, tokenizer = small_model("Llama", vocab_size=257), a_token_a_byte()
    base = PairedModel("base", model, tokenizer, "aa", "", {})
    receiver = dataclasses.replace(base, name="qa", adapter="bb")
    asked = [TaskItem(f"{at}", "qa", f"Which is number {at}?\n", "\nAnswer:", ("",)) for at in range(7)]

    def said(item: TaskItem) -> str:
        one = encode(item, tokenizer)
        prefix = Prefix.of([one.prefix])
        (answer,) = greedy(model, tokenizer, prefix, [one.suffix], own_cache(base, prefix), TASKS["qa"].answer_tokens)
        return answer

    items = [encode(dataclasses.replace(item, answers=(said(item),)), tokenizer) for item in asked]
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setattr(studied, "chosen_and_judged", lambda run, tokenizer, few, more: (items[:few], items[few:]))
    rows = studied._reused(CONFIG, receiver, base)
    assert [row["items"] for row in rows] == [CHOOSE] * 5 + [JUDGE] * 4
    assert [(row["method"], row["lo"], row["hi"]) for row in rows[5:]] == [
        (OWN, 0, 3),
        (REUSE, 0, 0),
        (DROIDSPEAK, 0, 1),
        (DROIDSPEAK, 0, 2),
    ]
    first, *others = (row["item_score"] for row in rows[5:])
    assert sum(first) > 0 and all(scores == first for scores in others)


@pytest.mark.assets
def test_a_model_that_reads_no_text_is_refused() -> None:
    with pytest.raises(StageError, match=r"^model random:tiny-2 has no tokenizer, and its quality is judged on text"):
        families_trained(load_profile("quick", **{"families_trained.models": ["random:tiny-2"]}))
