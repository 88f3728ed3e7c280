"""The formulas of "which idea pays where" are the library's, and the page has them as they stand."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from transformers import Qwen2Config

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import ReuseRequest
from firsttoken.engine.kv import KVShape
from firsttoken.simulation.costs.published import decomposed
from firsttoken.study.errors import FirstTokenError
from firsttoken_studies import ledger, tricks
from firsttoken_studies.cps.assumed_costs import LinkModel
from firsttoken_studies.nb48_measured_on_a_gpu.study import RECORDED_ON
from firsttoken_studies.record.results import recorded_entries, recorded_result
from firsttoken_studies.site.recorded_runs import asked_by, ranges, recorded_runs, script
from firsttoken_studies.site.tricks_page import (
    FIRST,
    PRICED_IN,
    SLIDERS,
    exported,
    formulas,
    presets,
    prices,
    told_ranges,
)
from firsttoken_studies.tricks import TrickSetting

RESULTS = ledger.recorded()
RUNS = recorded_runs(RESULTS, ledger.machine())


def test_a_swap_costs_what_the_library_says():
    """Of Qwen2.5-0.5B over links of any rate, with the price of a copy that the paper's Table 2 amounts to."""
    config = Qwen2Config(
        num_hidden_layers=24, num_key_value_heads=2, num_attention_heads=14, hidden_size=896, head_dim=64
    )
    shape, parts = KVShape.of(config, torch.float16), decomposed(1024)
    each = (parts.out_us_per_copy + parts.in_us_per_copy) / 2
    for tokens, rate in [(512, 25e9), (2048, 3e9), (8192, 300e9)]:
        mine = tricks.swap_s(shape.bytes_per_token / 1024, shape.layers, tokens, rate / 1e9, each)
        assert mine == pytest.approx(LinkModel(config, rate).swap_s(tokens), rel=1e-9)


def test_reuse_is_bounded_as_the_library_bounds_it():
    draw = random.Random(0)
    for _ in range(50):
        layers = draw.randrange(4, 60)
        low = draw.randrange(1, layers)
        group = Group(low, draw.randrange(low + 1, layers + 1))
        s = TrickSetting(layers=layers, group_share=len(group) / layers, link_gbit_per_s=draw.uniform(0.1, 100))
        a_bit = 1024 * s.prompt_tokens * 8 / (s.link_gbit_per_s * 1e9)
        theirs = ReuseRequest(
            "a",
            0.0,
            layers,
            group,
            kv_units=s.kv_kib_per_token / layers * a_bit,
            edge_units=s.hidden_kib_per_token * a_bit,
            compute_units=tricks.prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s) / layers,
        )
        assert tricks.droidspeak(s).with_it == pytest.approx(theirs.floor, rel=1e-9)


def test_what_each_idea_does_at_its_ends():
    s = TrickSetting()
    assert tricks.progressiveserve(replace(s, deferred_share=0.0)).with_it == tricks.progressiveserve(s).without
    assert tricks.sarathi(replace(s, chunk_tokens=10**6)).with_it == tricks.sarathi(s).without
    again, cheaper, copied = tricks.cps(replace(s, us_per_copy=0.0, host_gb_per_s=1e6))
    assert cheaper == copied < again
    again, cheaper, copied = tricks.cps(replace(s, us_per_copy=100.0))
    assert cheaper == again < copied
    slow = replace(s, link_gbit_per_s=0.01)
    assert tricks.droidspeak(slow).with_it > tricks.droidspeak(slow).without  # it does not pay, and the page says so
    assert tricks.petals(replace(s, servers=1)).with_it < tricks.petals(replace(s, servers=30)).with_it


def test_a_start_whose_prefill_takes_longer_than_its_loading_is_bounded_by_the_prefill():
    """Layers are computed while the next ones come: the recorded starts are faster than loading and prefill in turn."""
    slow = TrickSetting(tflop_per_s=0.5)
    computed = tricks.prefill_s(slow.weights_gb, slow.prompt_tokens, slow.tflop_per_s)
    assert computed > tricks.load_s(slow.weights_gb, slow.link_gbit_per_s)
    assert tricks.progressiveserve(slow).without == tricks.petals(slow).without == computed


def test_a_start_that_borrows_brings_its_embeddings_and_head():
    s = TrickSetting(round_trip_ms=0.0)
    assert tricks.petals(s).with_it > tricks.load_s(s.ends_gb, s.link_gbit_per_s)
    recorded = [run for run in RUNS if run.idea == "PETALS"]
    assert all(run.with_s < 3.5 * tricks.petals(TrickSetting(**run.at)).with_it for run in recorded)


def test_no_recorded_run_is_faster_than_its_formula():
    """But for the noise of a link: a bound that the record breaks is none."""
    assert {run.idea for run in RUNS} == set(tricks.IDEAS)
    for run in RUNS:
        bound = tricks.IDEAS[run.idea].formula(TrickSetting(**run.at))
        assert run.without_s >= 0.99 * bound.without and run.with_s >= 0.99 * bound.with_it, run
        assert (run.rival_s or 0) >= 0.99 * (bound.rival or 0), run


def test_a_run_says_where_each_slider_stood_that_its_formula_asks():
    ends = {slider.name: (slider.least, slider.most) for slider in SLIDERS}
    for run in RUNS:
        assert sorted(run.at) == sorted(asked_by(run.idea))
        assert {name for name, value in run.at.items() if not ends[name][0] <= value <= ends[name][1]} == set(), run
    assert asked_by("Sarathi-Serve") == ["weights_gb", "prompt_tokens", "tflop_per_s", "chunk_tokens"]


def test_what_was_measured_is_read_from_the_record():
    on_cards = recorded_result(RESULTS, "reports_on_cards", ledger.machine()).parameters["on_cards"]
    links = recorded_result(RESULTS, "pipelined_loading", ledger.machine()).parameters["loading"]["gbit_per_s"]
    assert ranges(RUNS, "DroidSpeak")["link_gbit_per_s"] == (min(links), max(on_cards["links"]))
    tokens = on_cards["lengths"]
    assert ranges(RUNS, "CPS")["prompt_tokens"] == (min(tokens), max(tokens))
    assert told_ranges(RUNS)["CPS"]["prompt"] == f"{min(tokens)} to {max(tokens)} tokens"
    assert told_ranges(RUNS)["PETALS"]["servers in the chain"] == "1"


def test_a_run_has_the_times_of_the_record():
    stalls = recorded_result(RESULTS, "generation_stalls", ledger.machine()).summary
    run, on_gpu = (run for run in RUNS if run.idea == "Sarathi-Serve")
    assert on_gpu.machine == RECORDED_ON and on_gpu.at["prompt_tokens"] > run.at["prompt_tokens"]
    assert run.without_s == stalls.value("worst_gap_ms", source="live", scheduler="prefill_first") / 1e3
    starts = recorded_result(RESULTS, "borrowed_start", ledger.machine()).summary
    for run in (run for run in RUNS if run.idea == "PETALS"):
        where = {"gbit_per_s": run.at["link_gbit_per_s"], "rtt_ms": run.at["round_trip_ms"]}
        assert run.with_s == pytest.approx(starts.value("ttft_p50_s", variant="borrowed", **where))


def test_cold_starts_of_another_prompt_are_not_taken_for_those_of_a_known_one():
    other = copy.deepcopy(RESULTS)
    recorded_result(other, "cold_start", ledger.machine()).parameters["coldstart"]["questions"] = "squad"
    with pytest.raises(FirstTokenError, match="record both again"):
        recorded_runs(other, ledger.machine())


def test_the_page_has_every_run():
    told = dict(line.removeprefix("const ").rstrip(";").split(" = ", 1) for line in script(RUNS).splitlines()[1:])
    runs = json.loads(told["RUNS"])
    assert sum(map(len, runs.values())) == len(RUNS)
    assert runs["CPS"][0]["without_s"] == next(run.without_s for run in RUNS if run.idea == "CPS")


def test_every_slider_is_a_field_and_begins_at_its_default():
    fields = TrickSetting.__dataclass_fields__
    assert sorted(slider.name for slider in SLIDERS) == sorted(fields)
    assert all(slider.least <= slider.value <= slider.most for slider in SLIDERS)


def test_a_choice_sets_numbers_that_the_page_has():
    ends = {slider.name: (slider.least, slider.most) for slider in SLIDERS}
    chosen = presets(RUNS)
    assert all(FIRST[kind] in choices for kind, choices in chosen.items())
    settings = [setting for choices in chosen.values() for setting in choices.values()]
    assert all(ends[name][0] <= value <= ends[name][1] for setting in settings for name, value in setting.items())
    assert {RECORDED_ON, ledger.machine()} < set(chosen["card"])
    assert chosen["card"][RECORDED_ON]["tflop_per_s"] == max(
        run.at["tflop_per_s"] for run in RUNS if run.machine == RECORDED_ON
    )


def test_each_idea_has_its_price():
    said = prices(*(recorded_entries(RESULTS, slug) for slug in (ledger.machine(), RECORDED_ON)))
    assert list(said) == list(PRICED_IN) == list(tricks.IDEAS)
    assert "later on an H200" in said["Sarathi-Serve"] and "points of exact match" in said["ProgressiveServe"]


def test_the_page_has_every_formula():
    said = formulas()
    assert all(f"function {idea.formula.__name__}(s)" in said for idea in tricks.IDEAS.values())
    assert "Math.min(copied" in said and "Times" not in said


def loops(s):
    for _ in range(3):
        pass


def grows(s):
    return s**2


@pytest.mark.parametrize("function", [loops, grows])
def test_what_is_no_arithmetic_is_refused(function):
    with pytest.raises(ValueError, match=function.__name__):
        exported(ModuleType("m"), {function.__name__: function}, {})
