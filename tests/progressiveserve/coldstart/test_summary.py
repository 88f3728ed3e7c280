"""From rows to ratios: pairing by round, the two scopes of device time, what a slow or a missing variant does."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken_studies.nb15_recovery_timeline import study as timeline
from firsttoken_studies.nb17_bits_before_layers.bitplane_starts import BEHIND, precision_start_summary
from firsttoken_studies.nb17_bits_before_layers.figures import plan_name
from firsttoken_studies.progressiveserve.coldstart.summary import (
    cold_start_summary,
    full_rows,
    link_floor,
    link_summary,
    ratio,
    shapes_summary,
    values,
)

LINK = {"link": "1 Gbit/s", "gbit_per_s": 1.0}
DISK = {"link": "unshaped", "gbit_per_s": 0.0}
EACH = {"link": "1 Gbit/s a link", "gbit_per_s": 1.0}
PROGRESSIVE = {"variant": "progressive", "than": "whole_streamed", "link": "1gbit"}


def trial(variant: str, round_: int, request: float, **more: Any) -> dict[str, Any]:
    row = {"variant": variant, "round": round_, "ttft_request_s": request, "ttft_process_s": request + 3} | LINK
    return (
        row | {"load_s": request - 0.1, "prefill_warm_s": 0.2, "cpu_s": 1.0, "growth_bytes": 900, "bytes": 1000} | more
    )


def read(round_: int) -> dict[str, Any]:
    return {"variant": "read", "round": round_, "load_s": 1.0, "bytes": 1000} | LINK


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Four rounds: reading alone takes 1 s, the whole model 1.2, stage 1 1.0, from_pretrained 2, unstreamed 1.4."""
    found = []
    for round_ in range(4):
        drift = 0.01 * round_
        found.append(read(round_))
        found += [
            trial(name, round_, at + drift)
            for name, at in (("whole_streamed", 1.2), ("from_pretrained", 2.0), ("whole", 1.4))
        ]
        later = {"stage2_s": 0.1, "stage3_s": 0.2, "cpu_full_s": 1.5, "full_bytes": 1040, "growth_bytes": 990}
        found.append(trial("progressive", round_, 1.0 + drift, load_s=0.88, bytes=800, **later))
    return found[::-1]  # rounds are paired by number, not by place


def test_memory_of_a_gpu_is_compared_where_it_was_measured(rows):
    on_gpu = [row | {"device_peak_bytes": 80 if row["variant"] == "progressive" else 100} for row in rows]
    assert link_summary(on_gpu).value("peak_device_memory_x", **PROGRESSIVE) == pytest.approx(0.8)
    assert not link_summary(rows).all("peak_device_memory_x")


def test_a_lean_start_is_held_against_the_same_load_and_what_none_can_do_without(rows):
    """1.2 s of 4.2 from the creation of the process; importing torch took 0.9 s, the bytes at the rate read alone 1."""
    lean = [trial("lean", i, 0.2, ttft_process_s=1.2 + 0.001 * i, torch_s=0.9, token_id=7) for i in range(4)]
    both = [row | {"token_id": 7} for row in rows] + lean
    whole = {"variant": "lean", "than": "whole_streamed", "link": "1gbit"}
    bound = whole | {"than": "bound"}
    summary = link_summary(both)
    assert summary.value("process_ttft_x", **whole) == pytest.approx(1.2015 / 4.215)
    assert summary.value("process_ttft_x", **bound) == pytest.approx(1.2015)
    assert summary.value("same_first_token", **whole) is True
    slow = link_summary([*rows, *(row | {"torch_s": 2.0, "token_id": 8} for row in lean)])
    assert slow.value("process_ttft_x", **bound) == pytest.approx(1.2015 / 2)
    assert not slow.all("process_ttft_x", variant="lean_progressive")


def test_starts_that_are_no_longer_tried_are_left_out(rows):
    kept = [*rows, trial("copied_first", 0, 0.1)]
    assert cold_start_summary(kept, {}) == cold_start_summary(rows, {})


def test_a_lean_loader_is_nobody_elses(rows):
    faster = rows + [trial("lean_folder", i, 0.1) for i in range(4)]
    assert link_summary(faster).all("best_peer") == link_summary(rows).all("best_peer")


def test_a_ratio_is_of_percentiles_and_its_interval_pairs_rounds(rows):
    found = ratio(rows, "progressive", "whole_streamed")
    assert found.n == 4 and found.estimate == pytest.approx(1.015 / 1.215)
    assert found.high - found.low < 0.01  # both drift together


def test_the_whole_model_counts_both_later_stages(rows):
    complete = full_rows(rows)
    assert len(complete) == 4 and {row["variant"] for row in complete} == {"progressive_full"}
    assert values(complete, "progressive_full", "ttft_request_s")[0] == pytest.approx(1.3)
    assert values(complete, "progressive_full", "ttft_process_s")[0] == pytest.approx(4.3)
    assert values(complete, "progressive_full", "cpu_s") == [1.5] * 4


def test_measures_of_a_link(rows):
    summary = link_summary(rows)
    assert link_floor(rows) == {"value": 1.0, "unit": "s", "why": "1,000 bytes at the rate read alone"}
    assert summary.value("bandwidth_gbit_per_s", link="1gbit") == pytest.approx(8e-6)
    ratios = {
        "device_time_x": 4.015 / 4.215,
        "full_device_time_x": 4.315 / 4.215,
        "full_time_x": 1.315 / 1.215,
        "peak_memory_x": 1.1,
    }
    assert {name: summary.value(name, **PROGRESSIVE) for name in ratios} == pytest.approx(ratios)
    assert summary.value("load_x", **PROGRESSIVE | {"than": "floor"}) == pytest.approx(0.88 / 0.8)
    assert summary.value("ttft_x", variant="whole_streamed", than="bound", link="1gbit") == pytest.approx(1.215)
    saved = summary.value("ttft_p50_below_pct", **PROGRESSIVE | {"than": "from_pretrained"})
    assert saved == pytest.approx(100 * (1 - 1.015 / 2.015))
    gain = summary.value("ttft_p50_below_pct", variant="whole_streamed", than="whole", link="1gbit")
    assert gain == pytest.approx(100 * (1 - 1.215 / 1.415))
    shares = [summary.value(name, variant="progressive", link="1gbit") for name in ("byte_share", "full_byte_share")]
    assert shares == [0.8, 1.04]
    assert summary.value("best_peer", link="1gbit") == "from_pretrained"
    assert summary.value("ttft_x", variant="whole", than="best_peer", link="1gbit") < 1
    reduction = summary.of("ttft_p95_below_pct", **PROGRESSIVE)
    assert reduction["low"] <= reduction["value"] <= reduction["high"] and reduction["unit"] == "%"


def test_a_variant_of_fewer_rounds_is_paired_with_those_that_it_ran_in(rows):
    few = [row for row in rows if row["variant"] != "from_pretrained" or row["round"] < 2]
    assert ratio(few, "progressive", "from_pretrained").estimate == pytest.approx(1.005 / 2.005)
    found = {entry["where"]["than"]: entry["n"] for entry in link_summary(few).all("ttft_p95_below_pct")}
    assert found == {"whole_streamed": 4, "from_pretrained": 2}


def test_peers_are_compared_by_when_their_weights_can_be_used(rows):
    """One that maps its file returns at once, and its first prefill is the slower for it."""
    mapped = [row | {"variant": "safetensors", "load_s": 0.01} for row in rows if row["variant"] == "from_pretrained"]
    pooled = [row | {"variant": "chunked", "ttft_request_s": 1.3} for row in mapped]
    summary = link_summary(rows + mapped + pooled)
    assert summary.value("quickest_peer", link="1gbit") == "chunked"
    ready = summary.value("ready_x", variant="whole", than="quickest_peer", link="1gbit")
    assert ready == pytest.approx(1.215 / 1.1)
    saved = summary.value("ttft_p95_below_pct", **PROGRESSIVE | {"than": "chunked"})
    assert saved == pytest.approx(100 * (1 - 1.0285 / 1.3))


def test_a_link_without_the_progressive_start_has_no_measure_of_it(rows):
    summary = link_summary([row | DISK for row in rows if row["variant"] != "progressive"])
    assert summary.get("ttft_x", variant="whole", than="best_peer", link="unshaped")
    assert not [entry for entry in summary if entry["where"].get("variant") == "progressive"]


def test_several_links_are_held_against_a_kth_of_the_time():
    summary = link_summary([row | EACH for row in (read(0), trial("four_links", 0, 0.5, load_s=0.3))])
    over = summary.value("load_x", variant="four_links", than="expected", link="1gbit_each")
    assert over == pytest.approx(0.3 / 0.25)


def test_every_link_is_judged_by_its_own_rows(rows):
    slow = [row | DISK | {"load_s": 2 * row["load_s"]} for row in rows]
    found = cold_start_summary([row for pair in zip(rows, slow, strict=True) for row in pair], {})
    assert found == link_summary(rows) + link_summary(slow)


def test_shapes_have_a_ratio_a_link_and_one_share_of_the_bytes(rows):
    wheres = [{"shape": shape} | link for shape in ("small", "large") for link in (LINK, DISK)]
    found = shapes_summary([row | where for where in wheres for row in rows], {})
    assert [(entry["measure"], entry["where"]["model"], entry["where"].get("link")) for entry in found] == [
        (measure, shape, link)
        for shape in ("small", "large")
        for measure, link in (("ttft_x", "1gbit"), ("byte_share", None), ("ttft_x", "unshaped"))
    ]
    assert found.value("byte_share", model="large", variant="progressive") == 0.8
    over = found.value("ttft_x", model="small", **PROGRESSIVE | {"link": "unshaped"})
    assert over == ratio(rows, "progressive", "whole_streamed").estimate


def test_tokens_of_a_timeline_lie_in_the_rows_of_their_requests() -> None:
    """Packed and unpacked they are the same, and older records are as they were."""
    tokens = [
        {"row": "token", "client": client, "request": request, "at_s": 0.1 * i + client + 1e-7, "stage": 1 + i // 2}
        for client in range(2)
        for request in range(2)
        for i in range(3)
    ]
    asked = [{"row": "request", "client": i % 2, "request": i // 2, "at_s": 0.0, "tokens": 3} for i in range(4)]
    others = [{"row": "peak", "rss_bytes": 5}, *asked]
    put = timeline.packed([*tokens, *others])
    assert not any(row["row"] == "token" for row in put) and len(put) == 5
    found = [row for row in timeline.unpacked(put) if row["row"] == "token"]
    key = lambda row: (row["client"], row["request"], row["at_s"])  # noqa: E731
    rounded = [row | {"at_s": round(row["at_s"], 6)} for row in tokens]
    assert sorted(found, key=key) == sorted(rounded, key=key)
    assert timeline.unpacked([*tokens, *others]) == [*tokens, *others]
    assert timeline.packed(others) == others


def test_starts_with_torch_behind_are_held_against_the_same_with_torch_first():
    """The whole model's once, as every start is held against it; one that needed torch after all is left out."""
    found = []
    for round_ in range(3):
        found.append(read(round_))
        for name, at in (("whole_streamed", 2.0), ("bits", 1.0), ("lossless", 1.5)):
            told = {"stages": 2, "weights_sha256": "same", "bytes": 500}
            found.append(trial(name, round_, at, **told))
            before = trial(name + BEHIND, round_, at, **told) | {"ttft_process_s": at + 0.2}
            found.append(before | ({} if name == "lossless" else {"torch_at_first_token": False}))
    summary = precision_start_summary(found, {})
    bits = {"variant": "bits" + BEHIND, "link": "1gbit"}
    assert summary.value("process_ttft_x", **bits, than="bits") == pytest.approx(1.2 / 4.0)
    assert summary.value("process_ttft_x", **bits, than="whole_streamed") == pytest.approx(1.2 / 5.0)
    assert summary.value("process_ttft_above_bytes_s", **bits, than="bytes") == pytest.approx(1.2 - 0.5)
    whole = bits | {"variant": "whole_streamed" + BEHIND}
    assert summary.value("process_ttft_x", **whole, than="whole_streamed") == pytest.approx(2.2 / 5.0)
    assert not summary.all("ttft_p50_s", variant="lossless" + BEHIND)
    assert plan_name("bits" + BEHIND) == "low bits wait, torch behind"
