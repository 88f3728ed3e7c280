"""What the methods answer and how long they take."""

from __future__ import annotations

import json

import numpy as np
import pytest

from firsttoken.study import paths
from firsttoken.study.errors import ProfileError, RequestError
from firsttoken_studies.droidspeak import decoding
from firsttoken_studies.droidspeak.setting import Setting
from firsttoken_studies.nb30_full_reuse_and_sensitivity.sensitivity import example_rows
from firsttoken_studies.nb33_latency_and_quality.reuse_methods import (
    _blend,
    choice_of,
    methods_summary,
    reuse_methods,
    where_of,
)

ALWAYS = ["full prefill", "sender", "full reuse", "DroidSpeak"]
BLENDS = ["CacheBlend 0.15 gradual", "CacheBlend equal compute", "CacheBlend equal latency"]
EQUAL = {"equal compute": 4 / 6, "equal latency": 0.5}


def test_what_each_method_answers(study):
    with pytest.raises(RequestError, match="first run `firsttoken measure prefill_latency`"):
        study.run("reuse_methods", **{"methods.runs": 1})
    study.run("prefill_latency")
    result = study.run("reuse_methods")
    for sender in ("base", "other"):
        of = [row for row in result.rows if row["sender"] == sender]
        rows = {row["method"]: row for row in of if row["items"] == "judge"}
        assert set(rows) == {*ALWAYS, *BLENDS, "CacheBlend equal latency from 2", "smaller model"}
        assert all(row["metric"] == "F1" and row["n"] == len(row["item_score"]) == 6 for row in of)
        assert [rows[m]["compute"] for m in ("full prefill", "sender", "full reuse", "smaller model")] == [1, 1, 0, 0.5]
        for row in of:
            assert 0 <= row["score"] <= 1 and row["score"] == pytest.approx(sum(row["item_score"]) / 6, abs=1e-4)
            assert len(row["time_share"]) == 2 and min(row["time_share"]) > 0
            if row["method"].startswith("DroidSpeak"):
                assert row["compute"] == (row["hi"] - row["lo"]) / 4
        assert rows["full prefill"]["score"] > 0.5, "the receiver has learnt its task"
        candidates = {(row["lo"], row["hi"]): row for row in of if row["items"] == "choose"}
        assert {(0, 0), (0, 4)} <= candidates.keys() and len(candidates) == len(of) - len(rows)
        own = candidates[0, 4]["score"]
        within = {group for group, row in candidates.items() if own - row["score"] <= 0.05 * own}
        chosen = rows["DroidSpeak"]
        assert (chosen["lo"], chosen["hi"]) in within
        assert chosen["hi"] - chosen["lo"] == min(hi - lo for lo, hi in within), "the fewest layers in the bound"
        run = {"receiver": "tuned", "sender": sender, "task": "hotpotqa"}
        assert result.summary.of("score_pct", method="full prefill", **run)
        assert result.summary.get("loss_points", method="full prefill", **run) is None
        for name in (*ALWAYS[1:], *BLENDS):
            for measure in ("score_pct", "loss_points", "relative_loss_pct"):
                assert result.summary.of(measure, **where_of(name), **run)
        assert len(result.summary.all("score_above_points", than="CacheBlend", case="equal latency", **run)) == 1
        (gain,) = result.summary.all("speedup_x", chosen_by="decoded answers", **run)
        assert gain["value"] == pytest.approx(float(np.median(1 / np.array(chosen["time_share"]))))
    content = json.loads(result.path.read_text())
    del content["parameters"]
    assert str(study.folder.parent) not in json.dumps(content)


def test_what_is_kept_is_not_decoded_again(study, monkeypatch):
    study.run("prefill_latency")
    first = reuse_methods(study.profile(**{"methods.runs": 1}))
    monkeypatch.setattr(decoding, "greedy", lambda *_: pytest.fail("decoded again"))
    assert reuse_methods(study.profile(**{"methods.runs": 1})).rows == first.rows


def test_caches_that_do_not_fit_together_give_the_same_answers(study, monkeypatch):
    study.run("prefill_latency")
    together = reuse_methods(study.profile(**{"methods.runs": 1}))
    monkeypatch.setattr(decoding, "_TOGETHER_BYTES", 1)
    monkeypatch.setattr(paths, "CACHE", study.folder / "cache alone")
    assert reuse_methods(study.profile(**{"methods.runs": 1})).rows == together.rows


def test_a_sender_that_is_the_receiver_answers_the_same_by_every_method(study, same):
    study.run("prefill_latency")
    overrides = {"reuse.runs": [same], "methods.smaller": "", "reuse.eval_items": 3}
    rows = reuse_methods(study.profile(**overrides)).rows
    judged = [row for row in rows if row["items"] == "judge"]
    assert {row["method"] for row in judged} >= {*ALWAYS, *BLENDS}
    assert len({tuple(row["item_score"]) for row in judged}) == 1
    assert next(row for row in judged if row["method"] == "DroidSpeak")["hi"] == 0, "nothing need be recomputed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.15", (0.15, False, 1)),
        ("0.15 gradual", (0.15, True, 1)),
        (".5 from 2", (0.5, False, 2)),
        ("equal compute", (0.6, False, 1)),
        ("equal compute gradual", (0.6, True, 1)),
        ("equal compute from 3", (0.3333, False, 3)),
        ("equal compute from 5", (0, False, 5)),
        ("equal latency", (0.4, False, 1)),
        ("1", (1, False, 1)),
    ],
)
def test_blends_are_read(text, expected):
    assert _blend(text, EQUAL, 6) == expected


@pytest.mark.parametrize(
    "text", ["", "a lot", "0.15 gradul", "1.5", "-0.1", "equal", "equal compute from 6", "0.1 from 0", "1 from x"]
)
def test_what_is_no_blend_is_refused(text):
    with pytest.raises(ProfileError, match=r"write it as '0.15', 'equal compute', 'equal latency'"):
        _blend(text, EQUAL, 6)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("smaller model", {"method": "smaller model"}),
        ("CacheBlend 0.15", {"method": "CacheBlend", "share": 0.15}),
        ("CacheBlend .5 gradual from 2", {"method": "CacheBlend", "share": 0.5, "variant": "gradual from 2"}),
        ("CacheBlend equal latency", {"method": "CacheBlend", "case": "equal latency"}),
        ("CacheBlend equal compute from 2", {"method": "CacheBlend", "case": "equal compute", "variant": "from 2"}),
    ],
)
def test_where_the_measures_of_a_method_hold(method, where):
    assert where_of(method) == where


def answered(items: str, method: str, group: tuple[int, int], scores: list[float], time: float) -> dict:
    row = {"run": "a <- b: qa", "receiver": "a", "sender": "b", "task": "qa", "items": items, "method": method}
    times = {"depth": 4, "n": len(scores), "time_share": [time, time]}
    return row | {"lo": group[0], "hi": group[1], "score": sum(scores) / len(scores), "item_score": scores} | times


def test_the_summary_of_answers():
    """Two of four layers keep 95 % on the items that choose; on those that judge they lose a tenth."""
    chosen = {"full prefill": (0, 4), "full reuse": (0, 0), "DroidSpeak 1-1": (1, 2), "DroidSpeak 1-2": (1, 3)}
    scores = {"full prefill": 0.8, "full reuse": 0.1, "DroidSpeak 1-1": 0.7, "DroidSpeak 1-2": 0.78}
    lost = {"full prefill": 0, "full reuse": 20, "DroidSpeak 1-1": 4, "DroidSpeak 1-2": 2}  # of token accuracy
    rows = [
        answered("choose", m, g, [scores[m]] * 6, max(0.1, (g[1] - g[0]) / 4)) | {"accuracy_lost_pct": lost[m]}
        for m, g in chosen.items()
    ]
    judged = {"full prefill": 0.8, "full reuse": 0.2, "DroidSpeak": 0.72, "CacheBlend equal compute": 0.5}
    judged |= {"CacheBlend equal latency": 0.3, "CacheBlend equal latency from 2": 0.32}
    rows += [answered("judge", m, (1, 3) if m == "DroidSpeak" else (0, 0), [s] * 6, 0.5) for m, s in judged.items()]
    value, run = methods_summary(rows, {}).value, {"receiver": "a", "sender": "b", "task": "qa"}
    decoded, accuracy = ({"method": "DroidSpeak", "chosen_by": by} for by in ("decoded answers", "token accuracy"))
    above = {"method": "DroidSpeak", "than": "CacheBlend", "across": "mean"}
    assert value("group", **decoded, **run) == "1-2"
    assert value("group_layers_pct", **decoded, across="mean") == 50
    assert value("speedup_x", **decoded, across="mean") == value("speedup_x", **decoded, across="least") == 2
    assert value("group", **accuracy, **run) == "1-1", "one layer is enough for token accuracy"
    assert value("speedup_x", **accuracy, across="mean") == 4
    assert value("relative_loss_pct", **accuracy, **run) == pytest.approx(12.5)
    assert value("relative_loss_pct", method="DroidSpeak", across="worst") == pytest.approx(10)
    assert value("relative_loss_pct", method="full reuse", across="worst") == pytest.approx(75)
    lead = value("score_above_points", **above, case="equal latency")
    assert lead == pytest.approx(40), "the better of its two ways"
    assert value("score_above_points", **above, case="equal compute") == pytest.approx(22)


def test_a_mean_over_runs_leaves_out_those_with_nothing_to_mend():
    """Its interval is over the items that choose, of which half want all layers, and its n is that of the runs."""
    lost = [[1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4]  # own, full reuse, one layer
    groups = {"full prefill": (0, 4), "full reuse": (0, 0), "DroidSpeak 1-1": (1, 2)}
    rows = [
        answered("choose", method, group, scores, 0.1 + (group[1] - group[0]) * 0.225) | {"accuracy_lost_pct": 0.0}
        for (method, group), scores in zip(groups.items(), lost, strict=True)
    ]
    rows += [answered("judge", m, (0, 4), lost[0], 1.0) for m in ("full prefill", "full reuse", "DroidSpeak")]
    kept = [row | {"run": "c <- b: qa", "receiver": "c", "item_score": lost[0]} for row in rows]
    kept = [row | ({"hi": 0} if row["items"] == "judge" else {}) for row in kept]
    summary, run = methods_summary([*rows, *kept], {}), {"receiver": "c", "sender": "b", "task": "qa"}
    decoded = {"method": "DroidSpeak", "chosen_by": "decoded answers"}
    assert summary.value("group", **decoded, **run) == "none"
    _, gain, mean, least = (entry["value"] for entry in summary.all("speedup_x", **decoded))
    assert gain == pytest.approx(10) and mean == least == pytest.approx(1)
    layers = summary.of("group_layers_pct", **decoded, across="mean")
    assert (layers["value"], layers["n"]) == (100, 1)
    found = choice_of(rows)
    assert str(found.group) == "0-3" and set(found.shares) <= {1.0, 0.25} and len(found.shares) == len(found.gains)


def test_how_long_each_method_computes(study):
    result = study.run("prefill_latency")
    assert len(result.rows) == 2 * (2 + 3 + 1)
    for step in (0, 1):
        rows = [row for row in result.rows if row["round"] == step]
        computed = sorted((row["method"], row["compute"]) for row in rows)
        assert [c for c in computed if c[0] != "CacheBlend"] == [
            ("DroidSpeak", 0),
            ("DroidSpeak", 0.5),
            ("DroidSpeak", 1),
            ("full prefill", 1),
            ("smaller model", 0.5),
        ]
        assert all(0 <= row["prefill_s"] < row["first_token_s"] for row in rows)
    value, ways = result.summary.value, result.summary.all("speedup_x", context_tokens=40)
    assert [(e["where"]["method"], e["where"].get("layers")) for e in ways] == [
        *(("DroidSpeak", layers) for layers in (0, 2, 4)),
        ("CacheBlend", None),
        ("smaller model", 2),
    ]
    assert value("speedup_x", method="CacheBlend", share=0.15) == ways[3]["value"]
    (worst,) = result.summary.all("ttft_x")
    assert (worst["where"]["context_tokens"], worst["where"]["across"]) == (40, "worst")
    for bound in ("bound_pct", "bound_points"):
        chosen = {"method": "DroidSpeak", bound: 5}
        gains = [entry["value"] for entry in result.summary.all("speedup_x", **chosen, receiver="tuned")]
        each = [gain for gain in gains if gain != ways[0]["value"]]  # where nothing is recomputed, nothing is won
        assert len(gains) == 2 and each and value("speedup_x", **chosen, across="least") == min(each)
        assert value("speedup_x", **chosen, across="mean") == pytest.approx(sum(each) / len(each))


def test_a_group_that_the_model_has_no_layers_for_is_refused(study):
    with pytest.raises(ProfileError, match=r"latency\.layers: 6 layers of base are asked for, there are 4"):
        study.run("prefill_latency", **{"latency.layers": [6]})


def test_an_example_says_what_was_asked_and_what_came(study):
    profile = study.profile()
    runs = profile.sections["reuse"]["runs"]
    rows = example_rows(profile, runs)
    setting = Setting(profile)
    assert [row["pair and task"] for row in rows] == [run.name for run in setting.runs]
    receiver, _ = setting.pair(setting.runs[0])
    item = setting.items(setting.runs[0], receiver.tokenizer)[1][0].item
    assert rows[0]["expected"] == item.answers[0] and rows[0]["prompt"].endswith(item.suffix)
    assert rows[0]["over its own cache"] == rows[1]["over its own cache"]
    (alone,) = example_rows(profile, [runs[0].replace("<- base", "<- tuned")])
    assert alone["over its own cache"] == alone["over the sender's"] == rows[0]["over its own cache"]
