"""The swarm's experiments at their smallest, and the paper's arithmetic in their summaries."""

from __future__ import annotations

import pytest
import torch

from firsttoken.engine.linear8 import resting_bytes, to_8_bits
from firsttoken.petals.routing import best_chain
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb50_a_swarm_that_survives.study import LOCAL, survival_summary, transport_summary
from firsttoken_studies.nb52_chains_and_offloading.swarm_chains import chains_summary
from firsttoken_studies.nb52_chains_and_offloading.swarm_churn import churn_summary, swarm_churn
from firsttoken_studies.nb53_training_through_the_chain.study import tuning_summary
from firsttoken_studies.nb54_validation_and_privacy.swarm_privacy import (
    PrivacyConfig,
    _entering,
    _features,
    _learnt,
    _nearest,
)
from firsttoken_studies.nb54_validation_and_privacy.swarm_validation import validation_summary
from firsttoken_studies.petals.chain_costs import (
    BLOOM_BLOCKS,
    CARDS,
    NETWORKS,
    block_seconds,
    bloom_block,
    fourteen,
    published_compute_s,
    twelve,
)


def test_a_little_churn() -> None:
    smaller = {"churn.servers": 12, "churn.depth": 12, "churn.events": 4, "churn.rules": ["paper", "fewest"]}
    profile = load_profile("quick", **smaller)
    outcome = swarm_churn(profile)
    assert len(outcome.rows) == 8 and swarm_churn(profile).rows == outcome.rows, "the seed decides"
    events = [
        [(row["event"], row["kind"]) for row in outcome.rows if row["rule"] == rule] for rule in ("paper", "fewest")
    ]
    assert events[0] == events[1]
    summary = churn_summary(outcome.rows, profile.parameters())
    for rule in ("paper", "fewest"):
        assert 0 <= summary.value("back_within_a_period_pct", variant=rule) <= 100
        assert 0 < summary.value("share_after_pct", variant=rule) <= 100


def test_the_papers_servers_hold_all_of_bloom() -> None:
    assert len(CARDS) == 14
    for servers in (fourteen(), twelve(NETWORKS["100 Mbit/s, 100 ms"])):
        assert [block for one in servers for block in one.blocks] == list(range(BLOOM_BLOCKS))
        chain = best_chain(servers, range(BLOOM_BLOCKS))
        assert sum(hop.row_s for hop in chain) >= published_compute_s() * (1 - 1e-9), "no card is faster than an A100"


def test_the_summary_of_a_run_made_by_hand() -> None:
    rows = [
        {"what": "shape", "hidden": 64, "layers": 2},
        *({"what": "step", "context": 8, "repeat": n, "seconds": 0.01} for n in range(5)),
        *({"what": "forward", "rows": 2, "tokens": 10, "repeat": n, "seconds": 0.1} for n in range(5)),
        *(
            {"what": "offload", "from": place, "repeat": n, "seconds": 0.1, "bringing_s": bringing_s, "bytes": 10**8}
            for place, bringing_s in (("memory", 0.01), ("disk", 0.1))
            for n in range(5)
        ),
        {"what": "simulated", "swarm": "twelve", "clients": 8, "hops": 12, "seconds": 2.0, "alone_s": 1.5},
        *({"what": "block", "bits": 8, "repeat": n, "seconds": 0.01} for n in range(5)),
    ]
    asked = {"chains": {"contexts": [8], "forwards": [2], "block_bits": [8]}}
    summary, fast, slow = chains_summary(rows, asked), "1 Gbit/s, 5 ms", "100 Mbit/s, 100 ms"
    assert summary.value("steps_per_s", context_tokens=8, link=slow) == pytest.approx(1 / 0.31, rel=1e-3)
    for place, gb_per_s in (("memory", 10), ("disk", 1)):
        found = summary.value("bringing_gb_per_s", variant="offloading", machine=place)
        assert found == pytest.approx(gb_per_s)
    assert summary.value("crossover_gb", machine="memory", link=slow) == pytest.approx(3.0, rel=1e-3)
    (slower,) = summary.all("slower_pct", source="simulated", case="twelve", clients=8)
    assert slower["value"] == 25
    chain_s = 70 * 0.01 + 3 * NETWORKS[fast].hop_s(14336)
    (over,) = summary.all("steps_per_s_x", source="measured", bits=8, link=fast, gbit_per_s=128)
    assert over["value"] == pytest.approx(11.0 / chain_s)
    reckoned = {"model": "bloom-176b", "source": "arithmetic"}
    assert summary.value("nodes", bits=16, **reckoned) == 44
    assert summary.value("step_s", variant="offloading", link="PCIe 4.0 x16", **reckoned) == 5.5


def test_a_block_of_bloom_takes_a_token_and_forgets_it() -> None:
    cpu = torch.device("cpu")
    whole, codes = (bloom_block(256, torch.float32, cpu, bits) for bits in (16, 8))
    values = 12 * 256**2
    assert 4 * values < resting_bytes([whole]) < 4.1 * values and values < resting_bytes([codes]) < 1.1 * values
    assert [len(block_seconds(block, 5, 2)) for block in (whole, codes)] == [2, 2]
    to_8_bits([whole])  # row by row, where the block was made of one
    ours, theirs = codes.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def struck(fault: str, recovery_s: float, generation: int, several: int = 1, equal: bool = True) -> dict:
    """A row of a fault: a round trip of 20 ms, a prefill of 0.1 s, a time-out of 1 s for who is stopped."""
    row = {"what": "fault", "fault": fault, "position": 3, "generation": generation, "faults_in_it": several}
    times = {"prefill_s": 0.1, "round_trip_s": 0.02, "timeout_s": 1.0 if fault == "stop" else 0.0}
    return row | times | {"recovery_s": recovery_s, "equal": equal}


def test_recoveries_are_held_to_their_bounds() -> None:
    rows = [struck("kill", 0.13, 1), struck("kill", 0.15, 2), struck("stop", 1.12, 3), struck("stop", 1.02, 4)]
    rows += [struck("kill", 9.0, 5, several=2, equal=False), struck("stop", 9.0, 5, several=2, equal=False)]
    rows += [{"what": "token", "generation": 0, "token": token, "seconds": 0.1} for token in range(4)]
    summary = survival_summary(rows, {"survival": {"faults": ["kill", "stop"]}})
    assert [entry["value"] for entry in summary.all("equal_pct")] == [100, 0], "one fault, several"
    within = summary.value("within_bound_pct", case="one fault")
    assert within == 75, "0.15 s are beyond 0.1 s and two round trips"
    assert summary.value("round_trips", case="kill") == pytest.approx(2.0)
    assert summary.value("bound_s", case="stop") == pytest.approx(1.14)


def test_the_transport_is_what_a_step_takes_longer() -> None:
    rows = [
        {"servers": servers, "round": number, "token": token, "seconds": seconds * (1 + number)}
        for servers, seconds in ((LOCAL, 0.018), (1, 0.02))
        for number in range(3)
        for token in range(2, 6)
    ]
    summary, place = transport_summary(rows, {"transport": {"chains": [1]}}), {"servers": 1, "than": "one process"}
    assert summary.value("tokens_per_s_x", **place) == pytest.approx(0.9)
    assert summary.value("transport_ms", **place) == pytest.approx(4.0), "the median of three rounds"


def test_what_was_trained_is_held_to_the_run_that_it_should_equal() -> None:
    off = {("alone", "lora"): 0.001, ("at_once", "prompt"): 0.002, ("killed", "lora"): 0.003}
    rows = [{"what": "gradient", "kind": kind, "name": "w", "difference": 1e-6} for kind in ("prompt", "lora", "head")]
    rows += [
        {"what": "loss", "run": run, "kind": kind, "step": step, "loss": loss, "seconds": 1 + (run == "at_once")}
        for run in ("stock", "alone", "at_once", "killed")
        for kind in (("lora",) if run == "killed" else ("lora", "prompt"))
        for step, loss in ((0, 4.0), (1, 2.0 + off.get((run, kind), 0.0)))
    ]
    rows += [
        {"what": "chain", "servers": servers, "round": number, "seconds": (1 + servers) * (1 + number), "bytes": 5e6}
        for servers in (0, 1)
        for number in range(2)
    ]
    rows += [
        {"what": "folder", "kind": kind, "same_base": kind == "lora", "difference": 0.0} for kind in ("lora", "prompt")
    ]
    rows.append({"what": "fault", "step": 1, "replaced": 1})
    asked = {"swarm_tuning": {"steps": 2, "chains": [1], "rounds": 2}}
    summary = tuning_summary(rows, asked)
    assert summary.value("loss_difference", case="alone", than="stock") == pytest.approx(0.001 / 2)
    assert summary.value("loss_difference", case="at_once", than="alone") == pytest.approx(0.002 / 2)
    killed = summary.value("loss_difference", case="killed", than="alone")
    assert killed == pytest.approx(0.002 / 2.001), "to the same client's alone"
    assert summary.value("step_x", servers=1, than="one process") == 2 and summary.value("step_mb", servers=1) == 5
    assert summary.value("folders_pct") == 50
    assert summary.value("steps_per_s_x", case="at_once", than="alone", across="sum") == 1
    assert summary.value("fell_nats", variant="lora", case="alone") == pytest.approx(1.999)


def liar(lie: str, rate: float, caught_at: int) -> dict:
    row = {"what": "liar", "lie": lie, "rate": rate, "caught_at": caught_at}
    return row | {"told": 9, "others": 0}


def test_liars_are_counted_beside_what_the_draws_foresee() -> None:
    rows = [{"what": "audit", "batch": 1, "difference": one} for one in (1e-6, 2e-6, 3e-6)]
    rows += [{"what": "rounding", "against": "float64", "difference": 5e-5}]
    rows += [{"what": "honest", "batch": 1, "convicted": 0, "inconclusive": 0, "recomputed": 300, "computed": 30}]
    rows += [liar("noise", 0.5, 0), liar("noise", 0.5, 3), liar("seldom", 0.5, 1), liar("seldom", 0.5, -1)]
    asked = {"validation": {"lies": ["noise", "seldom"], "rates": [0.5], "tokens": 2}}
    summary = validation_summary(rows, asked)
    for lie, caught, expected in (("noise", 100, 75), ("seldom", 50, 100 * (1 - 0.875**2))):
        assert summary.value("caught_pct", case=lie, audited=0.5, source="measured") == caught
        assert summary.value("caught_pct", case=lie, audited=0.5, source="foreseen") == pytest.approx(expected)
    off = summary.value("caught_off_points", than="foreseen", across="mean")
    assert off == pytest.approx((25 + 50 - 23.4375) / 2)
    largest = summary.value("difference_x", case="honest", across="most", than="tolerance")
    assert largest == pytest.approx(0.05) and summary.value("convicted", case="honest") == 0
    assert summary.value("recomputed_x", case="honest", than="computed") == 10


def test_what_enters_a_layer_is_read(tiny) -> None:
    """All of it where no layer is local; behind three, a map that has seen the windows reads more than chance."""
    config = PrivacyConfig((0, 3), 4, 2, 32, 2)
    windows = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(7))
    known = torch.nn.functional.normalize(tiny.get_input_embeddings().weight, dim=1)
    probes, read = _learnt(tiny, windows, known, config), []
    for ids, states in _entering(tiny, windows, config):
        assert torch.equal(_nearest(states[0], known), ids)
        torch.testing.assert_close(states[3], tiny(ids, output_hidden_states=True).hidden_states[3])
        read.append(_nearest(_features(states[3]) @ probes[3], known) == ids)
    assert torch.cat(read).float().mean() > 5 / 256 and len(tiny.model.layers) == 6
    with pytest.raises(ProfileError, match="depths are 0 or more"):
        PrivacyConfig((), 4, 2, 32, 2)
