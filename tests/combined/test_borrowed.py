"""A replica that borrows says what the whole model says, wherever the boundary is and whenever it moves: tiny random
weights, fp32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import combinations

import pytest
import torch
from borrowing import SHORT, TIMEOUTS, nothing_is_left, until
from dying_link import DyingLink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loads import Held
from plain_tokens import check_greedy
from swarms import DEPTH, Asked

from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.link.shaped import Link
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import SequenceChunk
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.study.errors import LinkError, SwarmError
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals, follow
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

TOKENS = 9


def test_every_boundary_to_every_other(replica, neighbour, asked):
    one = asked(17, 6)
    for before, after in combinations(range(DEPTH + 1), 2):
        made = replica()
        made.arrivals.come(1 + before)
        request = made.submit(one.prompt, Sampling(6))
        until(request, 2, made)
        assert made.here == before
        made.arrivals.come(after - before)
        until(request, 6, made)
        assert made.here == after and made.lease.steps
        assert check_greedy(request.output, one.plain) == 6
        made.close()
    nothing_is_left(neighbour.server)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=3),
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=DEPTH),
)
def test_layers_that_come_at_any_time(replica, neighbour, known, prompts, arrivals):
    """Requests that begin in any step, groups of layers that come in any other, in steps of seven tokens."""
    with closing(replica()) as made:
        said = answered(made, known, prompts, arrivals)
    for request, one in said:
        assert check_greedy(request.output, one.plain) == TOKENS
    nothing_is_left(neighbour.server)


@pytest.fixture(scope="module")
def known(asked) -> dict[int, Asked]:
    """Prompts of all lengths: none can be answered by the model itself while it is in an engine."""
    return {length: asked(length, TOKENS) for length in range(1, 21)}


def answered(made, known, prompts, arrivals) -> list[tuple[Request, Asked]]:
    made.arrivals.come()
    left = DEPTH
    waiting, requests, step = sorted(prompts, key=lambda one: one[1]), [], 0
    coming = [(sum(after for after, _ in arrivals[: n + 1]), layers) for n, (_, layers) in enumerate(arrivals)]
    while waiting or made.engine.busy:
        while waiting and (waiting[0][1] <= step or not made.engine.busy):
            requests.append((made.submit(known[waiting[0][0]].prompt, Sampling(TOKENS)), known[waiting[0][0]]))
            waiting.pop(0)
        while coming and coming[0][0] <= step:
            layers = min(left, coming.pop(0)[1])
            if layers:
                made.arrivals.come(layers)
            left -= layers
        made.step()
        step += 1
    return requests


def test_what_is_taken_over_is_what_would_have_been_computed(replica, neighbour, lent, asked):
    """Keys and values of all layers, of all tokens; and the neighbour's session is closed with the last of them."""
    one, made = asked(33, 8), replica()
    made.arrivals.come()
    request = made.submit(one.prompt, Sampling(8))
    for _ in range(DEPTH):
        until(request, len(request.output) + 1, made)
        made.arrivals.come()
    made.settle()
    nothing_is_left(neighbour.server)
    assert made.here == DEPTH and not request.finished and [here for _, here in made.taken] == [*range(1, DEPTH + 1)]
    blocks, pool = list(request.blocks), made.engine.executor.pool.rows.clone()
    tokens, cached = list(request.tokens), request.cached
    made.close()
    executor = LiveExecutor(lent, 64)
    engine = Engine(executor)
    plain = engine.submit(tokens[:cached], Sampling(2))
    engine.step()
    size = executor.block_tokens
    for place in range(cached):
        said, wanted = (
            rows[owned[place // size], :, :, place % size]
            for rows, owned in ((pool, blocks), (executor.pool.rows, plain.blocks))
        )
        torch.testing.assert_close(said, wanted, atol=1e-4 * float(wanted.pow(2).mean().sqrt()), rtol=1e-4)
    executor.close()


@pytest.mark.parametrize("fault", ["kill", "stop", "cut", "hold"])
@pytest.mark.parametrize("token", range(TOKENS))
def test_the_neighbour_fails_at_any_token(replica, member, asked, token, fault):
    """kill -9, SIGSTOP, a link that is reset, one that falls silent, before each token: own layers are waited for."""
    one, lender = asked(21, TOKENS), member()
    made = replica(lender.proxy.address, timeouts=TIMEOUTS)
    made.arrivals.come(1 + token % DEPTH)
    request = made.submit(one.prompt, Sampling(TOKENS))
    until(request, token, made)
    getattr(lender, fault)()
    lender.gone = fault == "kill"
    made.lease._spans[0].sessions[-1]._timeouts = SHORT  # not before: a pause of the machine is no fault
    while not made.lease.gone:
        made.step()
    assert len(request.output) == token
    made.arrivals.come(DEPTH - token % DEPTH)
    until(request, TOKENS, made)
    assert check_greedy(request.output, one.plain) == TOKENS
    if fault != "kill":
        lender.heal()


def test_a_silent_neighbour_is_not_waited_for_once_all_layers_are_here(replica, member, asked):
    """However long its own patience: this one would be a minute."""
    one, lender = asked(21, 4), member()
    made = replica(lender.proxy.address, timeouts=TIMEOUTS)
    made.arrivals.come(3)
    request = made.submit(one.prompt, Sampling(4))
    until(request, 2, made)
    lender.hold()
    made.arrivals.come(DEPTH - 2)
    until(request, 4, made)
    lender.heal()
    assert check_greedy(request.output, one.plain) == 4


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("model", "has blocks of the model [0-9a-f]{12}, not of 'another'"),
        ("blocks", r"has blocks \[2, 6\), not \[0, 6\)"),
        ("unreachable", "connect"),
        ("gone", "no more are taken"),
    ],
)
def test_a_neighbour_that_cannot_lend_is_a_plain_wait(replica, neighbour, asked, here, spoilt, said):
    """It says why; the tokens are those of the replica's own layers."""
    one, changed = asked(12, 4), {}
    if spoilt == "model":
        changed["model"] = "another"
    elif spoilt == "blocks":
        changed["address"] = here.serve((2, DEPTH))[0].record.address
    elif spoilt == "unreachable":
        changed["address"] = "127.0.0.1:9"
    else:
        up = here.serve((0, DEPTH), limits={"sessions": 1, "spare_s": 600.0})[0]
        changed["address"] = up.record.address
        other = Lease([Lender(up.record.address, range(DEPTH))], here.model, DEPTH, 32)
        # a session for which nothing was computed would yield its place
        wait_for(other._spans[0].run([SequenceChunk(0, 0, 1)], torch.zeros(1, 32), 0))
    made = replica(**changed)
    made.arrivals.come(2)
    request = made.submit(one.prompt, Sampling(4))
    while not made.lease.gone:
        made.step()
    assert not request.output
    made.arrivals.come(DEPTH - 1)
    made.run()
    assert check_greedy(request.output, one.plain) == 4
    assert re.search(said, made.lease.gone), made.lease.gone
    if spoilt == "gone":
        other.close()


def test_an_address_beyond_this_machine_wants_a_certificate(lent):
    with pytest.raises(SwarmError, match="give --tls-ca"):
        Lease([Lender("192.0.2.1:4000", range(DEPTH))], "model", DEPTH, 32)


def test_requests_that_share_prefixes_are_refused(lent, neighbour):
    shared = EngineConfig(share_prefixes=True)
    lease = Lease([Lender("127.0.0.1:9", range(DEPTH))], "model", DEPTH, 32)
    with closing(LiveExecutor(lent, 4)) as executor, pytest.raises(SwarmError, match="cannot share prefixes"):
        BorrowingReplica(executor, lent.model.layers, LayerArrivals(DEPTH), lease, shared)
    lease.close()


@pytest.fixture
def loaded(ends_folder, neighbour, asked) -> Iterator[Callable]:
    """A replica whose layers come over a link, for what a link does."""
    made = []

    def start(link: Link) -> BorrowingReplica:
        manifest = read_manifest(ends_folder)
        meta_model = MetaModel(ends_folder, manifest)
        load = StageLoad(ends_folder, manifest, [1], [link], meta_model, meta_model.empty_view(), threads=1)
        name = neighbours_name(ends_folder, manifest)
        assert name == model_sha256(ends_folder)
        lease = Lease([Lender(neighbour.server.record.address, range(DEPTH))], name, DEPTH, 32)
        executor = LiveExecutor(meta_model.model, 64, device=meta_model.device)
        made.append((BorrowingReplica(executor, load.view.layers, follow(load, DEPTH), lease), load))
        return made[-1][0]

    yield start
    for one, load in made:
        one.close()
        load.close()


def part_ends(folder) -> list[int]:
    """Bytes until each part is there."""
    sizes = [part.bytes for part in read_manifest(folder).stages[0].parts]
    return [sum(sizes[: n + 1]) for n in range(len(sizes))]


def test_a_load_over_a_link(loaded, ends_folder, neighbour, asked):
    """The real thing: half of the layers are held back until four tokens have been said."""
    one, link = asked(15, 8), Held(part_ends(ends_folder)[3])
    made = loaded(link)
    request = made.submit(one.prompt, Sampling(8))
    until(request, 4, made)
    assert made.here < DEPTH and made.lease.steps
    link.go.set()
    made.settle()
    assert made.here == DEPTH
    made.run()
    assert check_greedy(request.output, one.plain) == 8
    nothing_is_left(neighbour.server)


def test_a_load_that_fails_is_told(loaded, ends_folder, asked):
    one = asked(15, 8)
    made = loaded(DyingLink(part_ends(ends_folder)[2]))
    made.submit(one.prompt, Sampling(8))
    with pytest.raises(LinkError, match="the link died after"):
        made.settle()
