"""Processes that each fetch a part say what the whole model says, however it is divided and whoever ends: tiny random
weights, fp32, a token wrong where another's logit is larger by 1e-3 (``plain_tokens``)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from borrowing import nothing_is_left, until
from plain_tokens import check_greedy, generated
from swarms import DEPTH, lose

from firsttoken.assets.needs import ModelFacts
from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.errors import ProfileError, StageError, SwarmError
from firsttoken.study.profile import load_profile
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_studies.nb56_a_start_that_borrows import parallel_start as experiment
from firsttoken_studies.nb56_a_start_that_borrows.division import bytes_of, divided
from firsttoken_studies.nb56_a_start_that_borrows.fetch_trial import MODULE, FetchSpec
from firsttoken_studies.nb56_a_start_that_borrows.parallel_start import TRIAL, parallel_start, parallel_start_summary
from firsttoken_studies.petals.fleet import ServerProcess
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, TrialLink, one_trial
from firsttoken_studies.record.results import Result

TOKENS = 8


def splits(first: int) -> Iterator[list[range]]:
    """Every way to divide [first, DEPTH) among one or more."""
    for count in range(DEPTH - first):
        for cuts in combinations(range(first + 1, DEPTH), count):
            yield [range(*ends) for ends in pairwise([first, *cuts, DEPTH])]


def lent_by(addresses: Sequence[str], layers: Sequence[range]) -> list[Lender]:
    return [Lender(address, span) for address, span in zip(addresses, layers, strict=True)]


@pytest.mark.parametrize("first", range(DEPTH))
def test_every_split_at_every_boundary(replica, neighbour, asked, first):
    """One layer more is here for each token: each boundary from the lowest on, through each row of lenders."""
    one, address = asked(17, TOKENS), neighbour.server.record.address
    for layers in splits(first):
        made = replica(lenders=lent_by([address] * len(layers), layers))
        made.arrivals.come(1 + first)
        request = made.submit(one.prompt, Sampling(TOKENS))
        for token in range(1, TOKENS + 1):
            until(request, token, made)
            if first + token <= DEPTH:
                assert made.here == first + token - 1
                made.arrivals.come()
        assert check_greedy(request.output, one.plain) == TOKENS and made.lease.steps
        assert made.lease.gone == "all layers are here"
        made.close()
    nothing_is_left(neighbour.server)


def test_nothing_is_computed_before_the_lowest_boundary_is_here(replica, neighbour, asked):
    one = asked(9, 3)
    made = replica(lenders=[Lender(neighbour.server.record.address, range(2, DEPTH))])
    request = made.submit(one.prompt, Sampling(3))
    made.arrivals.come(2)
    made.arrivals.fail(ConnectionError("nothing more comes"))
    with pytest.raises(ConnectionError):
        made.step()
    assert not request.output and not made.lease.steps


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lender_that_has_lost_its_session_is_told_again(replica, here, asked, lost):
    """It has heard nothing for long; the other one goes on, and hears what it knows once more."""
    one, up = asked(19, 6), here.serve((1, 4), (4, DEPTH))
    made = replica(lenders=lent_by([server.record.address for server in up], [range(1, 4), range(4, DEPTH)]))
    made.arrivals.come(2)
    request = made.submit(one.prompt, Sampling(6))
    for token in (2, 4, 6):
        until(request, token, made)
        while up[lost].sessions.ends["IdleClientError"] < token // 2:
            wait_for(lose(up[lost]))  # a short patience might end within a step, too
            time.sleep(0.01)
    assert not made.lease.gone and check_greedy(request.output, one.plain) == 6
    assert len(made.lease._spans[lost].sessions) > 1 == len(made.lease._spans[1 - lost].sessions)


@pytest.fixture(scope="module")
def pair(ends_folder) -> Iterator[Callable[[], list[ServerProcess]]]:
    """Two lenders in processes of their own, others where they have been killed."""
    spans, members = ("2:4", f"4:{DEPTH}"), []

    def up() -> list[ServerProcess]:
        for span in spans:
            if not any(one.blocks == span and not one.gone for one in members):
                members.append(ServerProcess(ends_folder, span, [], threads=1))
                members[-1].gone = False
        alive = [one.ready() for span in spans for one in members if one.blocks == span and not one.gone]
        return alive

    yield up
    for one in members:
        one.close()


@pytest.mark.parametrize("token", range(TOKENS))
@pytest.mark.parametrize("killed", [0, 1])
def test_a_lender_is_killed_at_any_token(replica, pair, asked, token, killed):
    """Own layers are waited for; the loan says who it was."""
    one, members = asked(21, TOKENS), pair()
    made = replica(lenders=lent_by([each.address for each in members], [range(2, 4), range(4, DEPTH)]))
    made.arrivals.come(3)
    request = made.submit(one.prompt, Sampling(TOKENS))
    until(request, token, made)
    members[killed].kill()
    members[killed].gone = True
    while not made.lease.gone:
        made.step()
    assert len(request.output) == token and members[killed].address in made.lease.gone
    made.arrivals.come(DEPTH - 2)
    until(request, TOKENS, made)
    assert check_greedy(request.output, one.plain) == TOKENS


@pytest.mark.parametrize(
    "layers", [[], [(0, 3), (4, DEPTH)], [(0, 4), (3, DEPTH)], [(2, 4)], [(3, DEPTH), (0, 3)], [(0, 6), (6, DEPTH)]]
)
def test_lenders_that_leave_a_gap_or_overlap_are_refused(layers):
    lenders = [Lender("127.0.0.1:9", range(*one)) for one in layers]
    with pytest.raises(SwarmError, match=r"name them in order up to the end of \[0, 6\), each layer once") as caught:
        Lease(lenders, "model", DEPTH, 32)
    assert "\n" not in str(caught.value)


def test_layers_are_divided_by_bytes_and_the_ends_count(ends_folder):
    manifest = read_manifest(ends_folder)
    assert divided(manifest, 1) == [range(DEPTH)]
    for count in range(2, DEPTH):
        layers = divided(manifest, count)
        assert [layer for one in layers for layer in one] == list(range(DEPTH)) and all(layers[1:])
        sizes = [bytes_of(manifest, one, with_ends=one is layers[0]) for one in layers]
        assert sum(sizes) == manifest.bytes and max(sizes) < 2 * manifest.bytes / count
    with pytest.raises(StageError, match="20 processes cannot share 6 layers and the ends: take fewer"):
        divided(manifest, 20)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("servers", [1, 2], "2 servers or more"),
        ("servers", [2, 2], "name every number of servers"),
        ("servers", [31], r"fetchers\.servers: 31 layers of .* there are 30; take fewer"),
        ("gbit_per_s", [0], "gbit_per_s above 0"),
        ("rounds", 0, "at least 1 round"),
        ("hops", 3, "hops"),
    ],
)
def test_an_experiment_that_is_none_is_refused(monkeypatch, key, value, said):
    monkeypatch.setattr(ModelFacts, "get", lambda *_: 30)
    with pytest.raises(ProfileError, match=said) as caught:
        parallel_start(load_profile("quick", **{f"fetchers.{key}": value}))
    assert "\n" not in str(caught.value)


def test_a_trial_of_real_processes(ends_folder, lent):
    """Three of them, a link each: what each brings, and tokens before the first has all layers."""
    manifest, prompt = read_manifest(ends_folder), list(range(1, 13))
    spec = FetchSpec("fetched", str(ends_folder), str(ends_folder), "", len(prompt), threads=1, readers=2)
    spec = FetchSpec(**vars(spec) | {"dtype": "float32", "tokens": 6, "servers": 3})
    row = one_trial(spec, TrialLink(0.002, BUCKET, cold=False), module=TRIAL)
    assert check_greedy(row["tokens"], generated(lent, prompt, 6)) == 6
    behind = [bytes_of(manifest, one, with_ends=False) for one in divided(manifest, 3)[1:]]
    assert row["bytes_each"] == [manifest.bytes, *behind]
    assert row["gone"] == "all layers are here" and row["lent_steps"]
    for size, seconds in zip(row["bytes_each"][1:], row["fetched_s"][1:], strict=True):
        assert seconds > 0.9 * size / 0.25e6  # 2 Mbit/s, and a receive buffer
    assert row["fetched_s"][0] <= row["ttft_request_s"] < row["local_s"]


def test_a_fetcher_ends_with_whoever_started_it(ends_folder):
    """Its standard input ends while its layers are still coming, at a rate at which that takes 12 s."""
    command = [sys.executable, "-m", MODULE, str(ends_folder), f"2:{DEPTH}", "--gbit-per-s", "1e-4", "--readers", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as one:
        assert one.stdout.readline() == "ready\n"
        one.stdin.write("\n")
        one.stdin.flush()
        assert one.stdout.readline().startswith("127.0.0.1:")
        said, failure = one.communicate(timeout=60)
    told = json.loads(said)
    assert one.returncode == 0 and not failure and told["loaded_s"] is None
    assert told["bytes"] < bytes_of(read_manifest(ends_folder), range(2, DEPTH), with_ends=False)


def start(servers: int, round_: int, ttft: float, tokens: Sequence[int], **more) -> dict:
    row = {"variant": "fetched" if servers > 1 else "whole", "servers": servers, "gbit_per_s": 1, "round": round_}
    told = {"ttft_request_s": ttft, "loaded_s": 2.0, "local_s": None, "gone": "", "tokens": list(tokens)}
    return row | told | {"bytes_each": [100], "fetched_s": [2.0]} | more


FETCHED = {"local_s": 2.2, "gone": "all layers are here", "bytes_each": [100, 60], "fetched_s": [0.9, 1.0]}
ROWS = [*(start(1, n, 2.1, [1, 2]) for n in range(2)), *(start(2, n, 1.2, [1, 2], **FETCHED) for n in range(2))]
ASKED = {"fetchers": {"gbit_per_s": [1], "servers": [2]}}


def test_the_summary_of_starts_made_by_hand():
    said, place = parallel_start_summary(ROWS, ASKED), {"variant": "fetched", "servers": 2, "gbit_per_s": 1}
    assert said.value("ttft_x", **place, than="whole") == pytest.approx(1.2 / 2.1)
    assert said.value("ttft_x", **place, than="T / k") == pytest.approx(2 * 1.2 / 2.1)
    assert said.value("loaded_x", **place, than="whole") == pytest.approx(1.1)
    assert said.value("moved_x", **place, than="model") == pytest.approx(1.6)
    assert said.value("parts_s", **place) == 1.0
    assert said.value("same_tokens_pct", variant="fetched", than="whole") == 100
    lost = [*ROWS, start(2, 2, 1.2, [1, 3], **FETCHED | {"gone": "it died", "fetched_s": [0.9, None]})]
    said = parallel_start_summary(lost, ASKED)
    assert said.value("same_tokens_pct", variant="fetched", than="whole") == pytest.approx(200 / 3)
    assert said.value("loans_that_failed", variant="fetched") == 1


def test_figures_and_tables_are_drawn_from_a_result_alone():
    floors = {f"first token, {count} over 1 Gbit/s": {"value": 1.6 / count, "unit": "s"} for count in (1, 2)}
    summary = parallel_start_summary(ROWS, ASKED)
    result = Result(
        "parallel_start", "quick", ASKED, {"slug": "x"}, {}, "", [0], "2026", 0.0, {}, ROWS, floors, summary
    )
    assert len(experiment.first_tokens(None, result).axes) == 1
    rows = list(experiment.fetch_rows(None, result))
    assert [row["floor, s"] for row in rows] == ["1.60", "0.80"] and rows[0]["over whole"] == ""
    assert rows[1]["over T / k"].startswith("1.14")
