"""Servers foretold and capacities searched on measured operators: a closed loop, lengths, cases, what is refused."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.simulation.costs.operator_tables import CARDS
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.lengths import STATED, lengths
from firsttoken.study.errors import ProfileError
from firsttoken_studies.commands import _card, add_options
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.nb46_on_the_stated_gpus.card_capacity import CardCase, card_summary
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import (
    NEW,
    OperatorErrorConfig,
    ServerRun,
    busy_share,
    error_table,
    operator_summary,
    simulated,
)
from firsttoken_studies.nb46_on_the_stated_gpus.paper_cards import sweep_summary


@dataclass
class Constant(Costs):
    """Every step takes a second and each prompt token 10 ms."""

    blocks: int = 10_000

    def step_s(self, prefills, contexts):
        return 1.0 + 0.01 * sum(new for _, new in prefills)

    swap_out_s = swap_in_s = None


def run_of(clients: int, prompt: int = 100, output: int = 5, model: str = "qwen3-32b", prompts: int = 0) -> ServerRun:
    return ServerRun("h100-sxm", model, "bfloat16", 2, prompt, output, clients, 1.0, 1.0, prompts)


def test_one_client_waits_for_its_own_prefill_alone():
    ttft, tpot = simulated(run_of(1), Constant(), OperatorErrorConfig(1, 4, 8192), seed=0)
    assert (ttft, tpot) == (pytest.approx(2000), pytest.approx(1000))


def test_clients_that_begin_at_once_share_a_step():
    ttft, tpot = simulated(run_of(4), Constant(), OperatorErrorConfig(1, 1, 8192), seed=0)
    assert (ttft, tpot) == (pytest.approx(5000), pytest.approx(1000))


def test_a_budget_cuts_their_prompts():
    ttft, _ = simulated(run_of(2, prompt=1024), Constant(), OperatorErrorConfig(1, 1, 1024), seed=0)
    first, second, last = 11.24, 1 + 10.23, 1.01  # a token of the budget decodes the first, and one is left over
    assert ttft == pytest.approx(1e3 * (first + (first + second + last)) / 2)


def test_every_client_sends_its_requests():
    sent = []

    class Counted(Constant):
        def step_s(self, prefills, contexts):
            sent.append(sum(new for _, new in prefills))
            return super().step_s(prefills, contexts)

    simulated(run_of(3), Counted(), OperatorErrorConfig(1, 5, 8192), seed=0)
    assert sum(sent) == 3 * 5 * 100


def test_prompts_that_repeat_are_found_again():
    """Both texts were sent before what is measured begins: of 101 tokens six whole blocks of 16 are found again."""
    config = OperatorErrorConfig(1, 3, 8192)
    new, repeated = (simulated(run_of(2, prompt=101, prompts=count), Constant(), config, seed=0) for count in (0, 2))
    assert new[0] == pytest.approx(1e3 * (1 + 0.01 * 2 * 101))
    assert repeated == (pytest.approx(1e3 * (1 + 0.01 * 2 * 5)), pytest.approx(1000))


def test_a_run_may_need_more_than_all_of_the_time_of_its_cards():
    """Answers of 100 tokens take a second, for each of three clients; a token takes a tenth of a second at best."""
    run = replace(run_of(3, prompt=50, output=50), ttft_ms=20.0, tpot_ms=20.0)
    assert busy_share(run, SimpleNamespace(once=np.array([0.0, 0.3, 0.2, 0.6]))) == pytest.approx(3 * 100 * 0.1)


def test_runs_whose_prompts_repeat_are_judged_both_ways():
    rows = []
    for model, factors in (("a", {"vllm": 1.0, "simulated": 1.1}), ("b", {"vllm": 1.0, "simulated": 1.0, NEW: 3.0})):
        for source, factor in factors.items():
            place = {"card": "c", "weights": "fp8", "gpus": 1, "prompt_tokens": 1, "output_tokens": 2, "clients": 1}
            times = {name: 10.0 * factor for name in ("ttft_ms", "tpot_ms", "latency_ms")}
            rows.append({"model": model, "source": source, "busy_share": 0.5} | place | times)
    summary = operator_summary(rows, {})
    assert summary.of("tpot_off_pct", source="simulated", than="vllm", across="p90")["n"] == 2
    new = summary.of("tpot_off_pct", source=NEW, than="vllm", across="median", model="b")
    assert (new["value"], new["n"]) == (pytest.approx(200), 1)
    assert summary.get("tpot_off_pct", source=NEW, than="vllm", across="median", model="a") is None
    assert summary.value("busy_share", model="b", across="most") == 0.5
    said = [line["runs"] for line in error_table(SimpleNamespace(rows=rows, summary=summary))]
    assert said == ["all", "a", "b", "c", "b, every prompt new"]


def test_the_summary_has_each_error_by_model_and_card():
    rows = []
    for model, off in (("a", 1.1), ("a", 0.9), ("b", 2.0)):
        for source, factor in (("vllm", 1.0), ("simulated", off)):
            times = {name: 10.0 * factor for name in ("ttft_ms", "tpot_ms", "latency_ms")}
            rows.append({"model": model, "card": "c", "source": source} | times)
    summary = operator_summary(rows, {})
    at = {"source": "simulated", "than": "vllm", "across": "median"}
    assert summary.of("tpot_off_pct", **at)["value"] == pytest.approx(10)
    assert summary.of("tpot_off_pct", **at, model="b")["value"] == pytest.approx(100)
    assert summary.of("tpot_off_pct", **at, machine="c")["n"] == 3


@pytest.mark.parametrize("source", STATED)
def test_lengths_have_the_stated_quantiles(source):
    stated, found = STATED[source], lengths(source)
    assert found.sum(1).max() <= stated.most and found.min() >= 1
    assert (found == lengths(source)).all()
    for column, (median, p90) in enumerate((stated.prompt, stated.answer)):  # the longest are left out: a little less
        assert np.percentile(found[:, column], 50) == pytest.approx(median, rel=0.12)
        assert np.percentile(found[:, column], 90) == pytest.approx(p90, rel=0.20)


@pytest.mark.parametrize("text", ["mistral-7b a100-sxm 100", "mistral-7b one a100-sxm 100", ""])
def test_a_case_is_four_words(text):
    with pytest.raises(ProfileError, match=r"is no case; write MODEL GPUS CARD MS"):
        CardCase.named(text)


@pytest.mark.parametrize("given", [{"costs": "a100-sxm"}, {"costs": "yi-34b-a100", "model": "yi-34b", "blocks": 1}])
def test_a_model_is_given_with_a_card_and_only_there(given):
    with pytest.raises(ProfileError, match=r"hardware: a model is given with one of a100-sxm"):
        Hardware(**{"decodes": 1, "context": 1, "layers": 1} | given)


def test_requests_beyond_the_context_are_counted_and_left_out():
    config = CapacityConfig("openchat-sharegpt4-fit", 8, 1, 8, 1.0, (), (), (), 1.0)
    hardware = Hardware("h100-sxm", 32, 1024, model="llama-2-70b", gpus=4)
    bench = Bench(config, hardware)
    assert bench.pairs.sum(1).max() <= hardware.longest == 4096 < hardware.tokens
    assert re.fullmatch(r"1,\d{3} of 8,192 requests left out: each has more than the 4,096 tokens .*", bench.omitted)
    assert Bench(config, hardware, extended=True).omitted == ""


def test_capacities_are_over_the_same_draws():
    rows = [
        {"case": "x", "seed": seed, "scheduler": name, "requests_per_s": rate * (1 + seed)}
        for seed in range(5)
        for name, rate in (("prefill_first", 1.0), ("sarathi 512", 3.0))
    ]
    entry = card_summary(rows, {}).of(
        "capacity_x", scheduler="sarathi", budget_tokens=512, case="x", than="prefill_first"
    )
    assert entry["value"] == entry["low"] == entry["high"] == pytest.approx(3.0)


def command(*arguments: str) -> argparse.Namespace:
    parsers: dict[str, argparse.ArgumentParser] = {}

    def made(name: str, _: str) -> argparse.ArgumentParser:
        return parsers.setdefault(name, argparse.ArgumentParser())

    add_options(made)
    return parsers["capacity"].parse_args(["--scheduler", "sarathi 512", *arguments])


def test_the_options_of_a_card_are_settings_of_its_hardware():
    given = command("--hardware", "h100-sxm", "--model", "yi-34b", "--gpus", "2")
    settings = _card(given)
    assert settings["hardware.costs"] == "h100-sxm" and settings["hardware.gpus"] == 2
    assert settings["hardware.model"] == "yi-34b" and settings["capacity.lengths"] in STATED
    assert _card(command()) == {}


@pytest.mark.parametrize("alone", [("--model", "yi-34b"), ("--gpus", "2")])
def test_a_model_without_a_card_is_refused(alone):
    with pytest.raises(ProfileError, match=r"--model and --gpus say what runs on a card: add --hardware NAME"):
        _card(command(*alone))


def test_the_help_names_every_card(capsys):
    with pytest.raises(SystemExit):
        command("--help")
    said = "".join(capsys.readouterr().out.split())
    assert all(card in said for card in CARDS)


def swept(batch, scheduler, bound, rates):
    where = {"case": "x", "scheduler": scheduler, "batch": batch, "bound_ms": bound}
    return [where | {"seed": seed, "requests_per_s": rate} for seed, rate in enumerate(rates)]


def test_sarathi_stands_over_the_best_batch_of_each_bound():
    rows = swept(32, "prefill_first", 100, [1.0] * 5) + swept(128, "prefill_first", 100, [0.5] * 5)
    rows += swept(32, "prefill_first", 500, [1.0] * 5) + swept(128, "prefill_first", 500, [2.0] * 5)
    rows += swept(128, "sarathi 512", 100, [3.0] * 5) + swept(128, "sarathi 512", 500, [3.0] * 5)
    summary = sweep_summary(rows, {})
    where = {"scheduler": "sarathi", "budget_tokens": 512, "case": "x"}
    where["than"] = "the best batch of prefill first"
    assert summary.value("capacity_x", **where, objective="100 ms") == pytest.approx(3.0)
    assert summary.value("capacity_x", **where, objective="500 ms") == pytest.approx(1.5)


def test_a_baseline_that_serves_nothing_has_no_factor():
    rows = swept(32, "prefill_first", 75, [0.0] * 5) + swept(128, "sarathi 512", 75, [1.0] * 5)
    assert not sweep_summary(rows, {}).all("capacity_x")
