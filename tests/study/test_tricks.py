"""The formulas of "which idea pays where" are the library's, and the page has them as they stand."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from transformers import Qwen2Config

from firsttoken.cps.costs.arithmetic import LinkModel
from firsttoken.droidspeak.pipeline.schedule import ReuseRequest
from firsttoken.droidspeak.prefill import Group
from firsttoken.engine.costs.published import decomposed
from firsttoken.engine.kv import KVShape
from firsttoken_studies import tricks
from firsttoken_studies.site.formulas import exported
from firsttoken_studies.site.tricks_page import SLIDERS, formulas
from firsttoken_studies.tricks import Situation


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
        s = Situation(layers=layers, group_share=len(group) / layers, link_gbit_per_s=draw.uniform(0.1, 100))
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
    s = Situation()
    assert tricks.progressiveserve(replace(s, deferred_share=0.0)).with_it == tricks.progressiveserve(s).without
    assert tricks.sarathi(replace(s, chunk_tokens=10**6)).with_it == tricks.sarathi(s).without
    assert tricks.cps(replace(s, us_per_copy=0.0, host_gb_per_s=1e6)).with_it < tricks.cps(s).without
    slow = replace(s, link_gbit_per_s=0.01)
    assert tricks.droidspeak(slow).with_it > tricks.droidspeak(slow).without  # it does not pay, and the page says so
    assert tricks.petals(replace(s, servers=1)).with_it < tricks.petals(replace(s, servers=30)).with_it


def test_every_slider_is_a_field_and_begins_at_its_default():
    fields = Situation.__dataclass_fields__
    assert sorted(slider.name for slider in SLIDERS) == sorted(fields)
    assert all(slider.low <= slider.value <= slider.high for slider in SLIDERS)


def test_the_page_has_every_formula():
    said = formulas()
    assert all(f"function {function.__name__}(s)" in said for function, _ in tricks.IDEAS.values())
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
