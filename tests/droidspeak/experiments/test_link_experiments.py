"""Caches on their way: every schedule over every link, whatever group the profile has chosen."""

from __future__ import annotations

import pytest

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken_studies.nb30_full_reuse_and_sensitivity import profiling
from firsttoken_studies.nb32_pipelined_loading.study import loading_summary, pipelined_loading
from firsttoken_studies.nb35_a_group_for_this_link.adaptive_group import adaptive_group

TOKENS, DEPTH = 48, 4
KV = 2 * 2 * 8 * 4 * TOKENS  # bytes of a layer: keys and values, 2 heads of 8, fp32
EDGE = 32 * 4 * TOKENS
RATIOS = [("pipelined", "floor"), *((other, "pipelined") for other in ("recompute", "send all", "send reused"))]


def choose(monkeypatch: pytest.MonkeyPatch, *groups: Group) -> None:
    """Have the profile leave only these groups within the bound."""
    everything = profiling.profiled_groups

    def some(rows):
        kept = [g for g in everything(rows) if g.group in groups]
        return [type(g)(g.group, g.own, g.own) for g in kept]

    monkeypatch.setattr(profiling, "profiled_groups", some)


def test_the_table_of_schedules(study):
    result = study.run("pipelined_loading")
    cells = [(row["gbit_per_s"], row["round"], row["schedule"]) for row in result.rows]
    assert len(cells) == len(set(cells)) == 2 * 2 * 4
    found, value = result.summary, result.summary.value
    by_link = [(method, than, rate) for rate in (0, 0.02) for method, than in RATIOS]
    ratios = [entry["where"] for entry in found.all("ttft_x") if "gbit_per_s" in entry["where"]]
    assert [(where["method"], where["than"], where["gbit_per_s"]) for where in ratios] == by_link
    full, floor = {"method": "recompute", "than": "pipelined"}, {"method": "pipelined", "than": "floor"}
    assert value("ttft_x", **full, link="fastest") == value("ttft_x", **full, gbit_per_s=0.02)
    assert value("ttft_x", **floor, across="worst") == value("ttft_x", **floor, gbit_per_s=0.02)
    gains = [entry["value"] for entry in found.all("ttft_x", method="send reused")]
    assert value("ttft_x", method="send reused", than="pipelined", across="most") == max(gains)
    methods = ("send all", "send reused", "pipelined")
    assert [value("ttft_units", method=method, case="figure 13") for method in methods] == [47, 30, 17]
    edges = [value("edge_bytes_x", model=model, than="kv of a layer") for model in ("llama-3-8b", "llama-2-7b")]
    assert [*edges, value("edge_bytes_x", than="kv of a layer")] == [2, 0.5, EDGE / KV]
    assert value("group") == result.rows[0]["group"]


@pytest.mark.parametrize("group", [Group(0, 0), Group(0, 2), Group(2, 4), Group(0, 4)], ids=str)
def test_whatever_group_was_chosen(study, monkeypatch, group):
    choose(monkeypatch, group)
    outcome = pipelined_loading(study.profile(**{"loading.rounds": 1, "loading.gbit_per_s": [0.05]}))
    rows = {row["schedule"]: row for row in outcome.rows}
    reused = (DEPTH - len(group)) * KV + EDGE * group.needs_e_cache
    sent = {name: row["bytes"] for name, row in rows.items()}
    assert sent[Schedule.RECOMPUTE] == 0 and sent[Schedule.SEND_REUSED] == sent[Schedule.PIPELINED] == reused
    assert sent[Schedule.SEND_ALL] >= DEPTH * KV
    for name, row in rows.items():
        assert row["group"] == str(group) and row["ttft_s"] > 0
        if name == Schedule.RECOMPUTE:
            assert "floor_s" not in row
        else:
            assert row["transfer_s"] == pytest.approx(row["bytes"] * 8 / 0.05e9, abs=1e-6)
            assert row["floor_s"] == max(row["compute_s"], row["transfer_s"])


def test_only_unshaped_links(study):
    outcome = pipelined_loading(study.profile(**{"loading.rounds": 1, "loading.gbit_per_s": [0]}))
    (over,) = loading_summary(outcome.rows, {}).all("ttft_x", method="pipelined", than="floor")
    assert over["where"]["gbit_per_s"] == 0, "no worst of links that are shaped"


def test_the_table_of_choices(study):
    result = study.run("adaptive_group")
    places = [{"gbit_per_s": 0}, {"gbit_per_s": 0.02}, {"across": "worst"}]
    over = [{"variant": "chosen", "than": "best fixed"} | place for place in places]
    assert [entry["where"] for entry in result.summary.all("ttft_x")] == over
    chosen = [row for row in result.rows if row["how"] == "chosen"]
    assert [(row["gbit_per_s"], row["round"]) for row in chosen] == [(0, 0), (0, 1), (0.02, 0), (0.02, 1)]
    for row in result.rows:
        assert row["layers"] == row["hi"] - row["lo"] and row["ttft_s"] > 0 and row["expected_s"] > 0
    assert any(row["layers"] == DEPTH for row in result.rows if row["how"] == "fixed")
    assert result.provenance["costs"]["kv_token_bytes"] == KV // TOKENS
    assert result.provenance["costs"]["edge_token_bytes"] == EDGE // TOKENS


@pytest.mark.parametrize(
    "within",
    [[], [Group(0, 0)], [Group(0, 2)], [Group(2, 4)], [Group(0, 0), Group(0, 2), Group(2, 4)]],
    ids=lambda groups: " ".join(map(str, groups)) or "only all",
)
def test_whatever_groups_are_within_the_bound(study, monkeypatch, within):
    choose(monkeypatch, *within, Group(0, 4))
    outcome = adaptive_group(study.profile(**{"loading.rounds": 1, "loading.gbit_per_s": [0.05]}))
    fixed = {Group(row["lo"], row["hi"]) for row in outcome.rows if row["how"] == "fixed"}
    assert Group(0, 4) in fixed and fixed <= {*within, Group(0, 4)}
    assert len(fixed) == 1 + min(len({len(g) for g in within}), 2)
    (chosen,) = [row for row in outcome.rows if row["how"] == "chosen"]
    assert Group(chosen["lo"], chosen["hi"]) in {*within, Group(0, 4)}
