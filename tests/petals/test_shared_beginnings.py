"""Sessions that begin alike share what servers keep of it, say what the whole model says whoever dies or forgets
meanwhile, and neither find nor spoil what is another client's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tokens import TOLERANCE, check_greedy, judged
from slots import check_slots
from swarms import answer, ask_while_sessions_end, opening
from waiting import until

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.fairness import Client
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import SESSION, SequenceChunk
from firsttoken.petals.placement import Rebalancing
from firsttoken.petals.server_session import ServerSession
from firsttoken.petals.trust.auditor import Audits
from firsttoken.petals.wire import decode, encode
from firsttoken.study.errors import BusyError, FirstTokenError, SwarmError

SHARED = EngineConfig(share_prefixes=True)
CLIENTS = (Client("one", "a"), Client("two", "b"))
DO = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["begin", "begin", "step", "step", "back", "finish", "leave"]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(1, 13),
)


class Books:
    """Sequences of two clients whose tokens, and what lies in which block, are written down beside ``slots``."""

    def __init__(self, slots: KVSlots) -> None:
        self.slots, self.size = slots, slots.block_tokens
        self.sessions: tuple[dict, dict] = ({}, {})
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.held: dict[int, list] = {}  # by block, what was written there
        self.way: list[tuple[int, int, SequenceChunk, list]] = []
        self.shared = 0

    def keys(self, who: int, text: Sequence[int]) -> list[bytes]:
        return [repr((who, text[:end])).encode() for end in range(self.size, len(text) + 1, self.size)]

    def begin(self, who: int, number: int, text: list[int]) -> None:
        if any(one[:2] == (who, number) for one in self.way):
            return
        self.texts[who, number] = text
        self.shared += self.slots.reuse(self.sessions[who], number, self.keys(who, text), 0, CLIENTS[who])
        self.look(who, number)

    def step(self, who: int, number: int, back: int, tokens: int) -> None:
        mine, text = self.sessions[who], self.texts.get((who, number))
        if text is None or any(one[:2] == (who, number) for one in self.way):
            return
        cached = mine[number].cached if number in mine else 0
        start = max(0, cached - back)
        chunk = SequenceChunk(number, start, min(start + tokens, len(text)))
        if chunk.start == chunk.end:
            return
        scheduled = self.slots.place(mine, [chunk], 0, CLIENTS[who])
        self.slots.lease(scheduled)
        for place in range(chunk.start, chunk.end):
            block = self.held.setdefault(scheduled[0].request.blocks[place // self.size], [None] * self.size)
            block[place % self.size] = who, text[: place + 1]
        self.way.append((who, number, chunk, scheduled))

    def finish(self) -> None:
        who, number, chunk, scheduled = self.way.pop(0)
        self.slots.release(scheduled)
        self.slots.computed(self.sessions[who], [chunk])
        names = self.keys(who, self.texts[who, number])[chunk.start // self.size : chunk.end // self.size]
        self.slots.publish(self.sessions[who], number, chunk.start // self.size, names)

    def look(self, who: int, number: int) -> None:
        """What a sequence is said to have is there, and is its own."""
        if (one := self.sessions[who].get(number)) is not None:
            for place in range(one.cached):
                there = self.held[one.blocks[place // self.size]][place % self.size]
                assert there == (who, self.texts[who, number][: place + 1])

    def check(self) -> None:
        check_slots(self.slots)
        for who, mine in enumerate(self.sessions):
            for number in mine:
                self.look(who, number)


def run_books(slots: KVSlots, doings: Sequence[tuple[int, str, int, int, int]]) -> int:
    """How many tokens were shared in these ``doings``."""
    books = Books(slots)
    for who, what, number, text, tokens in doings:
        try:
            if what == "begin":
                books.begin(who, number, [0] * 4 * text + [number] * 3 + list(range(5)))
            elif what in ("step", "back"):
                books.step(who, number, 0 if what == "step" else tokens, tokens)
            elif what == "finish" and books.way:
                books.finish()
            elif what == "leave":
                slots.free(books.sessions[who], [number])
        except FirstTokenError:
            pass
        books.check()
    while books.way:
        books.finish()
        books.check()
    for mine in books.sessions:
        slots.free(mine, list(mine))
    assert slots.pool.free == slots.pool.count and slots.held == 0
    return books.shared


@settings(max_examples=200)
@given(st.lists(DO, max_size=60), st.sampled_from([0.0, 1000.0]))
def test_whatever_is_shared_evicted_and_gone_back_over_a_sequence_has_its_own_tokens(doings, spare_s):
    run_books(KVSlots(9, 4, 5, 40, spare_s), doings)


def walks(seeds: range) -> list[list[tuple[int, str, int, int, int]]]:
    what = ["begin", "step", "step", "back", "finish", "finish", "leave"]
    draws = [random.Random(seed) for seed in seeds]
    return [
        [(d.randrange(2), d.choice(what), d.randrange(3), d.randrange(4), d.randint(1, 13)) for _ in range(80)]
        for d in draws
    ]


def test_walks_share_and_those_that_write_to_what_others_have_are_found_out(monkeypatch):
    assert sum(run_books(KVSlots(9, 4, 5, 40), walk) for walk in walks(range(60))) > 300
    monkeypatch.setattr(KVSlots, "_private_blocks", lambda self, sequence, start: sequence.blocks)
    with pytest.raises(AssertionError):
        for walk in walks(range(60)):
            run_books(KVSlots(9, 4, 5, 40), walk)


def test_what_is_kept_goes_before_a_sequence_does_and_who_left_first_goes_first():
    slots, mine = KVSlots(4, 4, 4, 40), {}
    for number, key in enumerate((b"a", b"b")):
        slots.place(mine, [SequenceChunk(number, 0, 4)])
        slots.computed(mine, [SequenceChunk(number, 0, 4)])
        slots.publish(mine, number, 0, [key])
    slots.free(mine, [0])
    slots.free(mine, [1])
    slots.place(mine, [SequenceChunk(2, 0, 12)])
    assert slots.reuse(mine, 3, [b"a"]) == 0 and slots.reuse(mine, 3, [b"b"]) == 4
    with pytest.raises(BusyError, match="full"):  # of one client, both in use
        slots.place({}, [SequenceChunk(0, 0, 4)])
    check_slots(slots)


@pytest.fixture
def texts():
    """Prompts of the tiny model that begin alike in several ways."""
    draw = torch.Generator().manual_seed(8)
    stems = [torch.randint(256, (length,), generator=draw).tolist() for length in (64, 96)]

    def text(dice: random.Random) -> list[int]:
        stem = dice.choice(stems)
        return stem[: dice.choice([20, 48, len(stem)])] + [dice.randrange(256) for _ in range(dice.randint(1, 20))]

    return text


def right(tiny, model, prompts: Sequence[list[int]], count: int = 6) -> None:
    """All are asked at once, and each token is the whole model's, or one that nearly ties with it (1e-3 of a logit)."""
    engine = model.engine
    requests = [engine.submit(prompt, Sampling(count)) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        check_greedy(request.output, judged(tiny, prompt, request.output), TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_random_sessions_deaths_and_evictions_leave_the_tokens_alone(tiny, here, client, texts, seed):
    dice = random.Random(seed)
    limits = {"kv_tokens": 400}  # less than what is kept: beginnings are evicted
    ups = here.serve((0, 2), (2, 4), (4, 6), (0, 2), (2, 6), limits=limits)
    model = client(ups[0].record.address, config=SHARED)
    ask_while_sessions_end(tiny, model, ups, dice, lambda: [texts(dice) for _ in range(dice.randint(1, 3))], 12)
    assert model.chain.shared_tokens > 300 and model.chain.faults


def idle(ups) -> None:
    until(lambda: not any(up.sessions.slots.held for up in ups), "the servers have heard that all sequences are over")


def two(here, client, **options):
    """Two servers, one for each half, and a client of them that shares."""
    ups = here.serve((0, 3), (3, 6))
    return ups, client(ups[0].record.address, config=SHARED, **options)


def test_what_all_servers_have_is_not_sent_again(tiny, here, client, asked):
    ups, model = two(here, client)
    one = asked(100, 8)
    for turn in range(3):
        before = sum(up.sessions.slots.pool.free for up in ups), dict(model.swarm.served)
        assert answer(model, one.prompt, 8) == one.plain.tokens
        computed = [model.swarm.served[key] - before[1].get(key, 0) for key in model.swarm.served]
        assert computed == [3 * (107 if not turn else 107 - 96)] * 2  # all full blocks, and never the last token
    assert (model.chain.shared_tokens, model.chain.asked_tokens) == (192, 300)
    follow = [*one.prompt, *one.plain.tokens, 7, 9]  # what was said is kept, too
    right(tiny, model, [follow])
    assert model.chain.shared_tokens == 192 + 96


def test_what_was_sent_under_another_salt_is_not_found(here, client, asked):
    _, model = two(here, client)
    one = asked(100, 4)
    for salt, found in (("a", 0), ("b", 0), ("", 0), ("a", 96), ("", 192)):
        request = model.engine.submit(one.prompt, Sampling(4, cache_salt=salt))
        model.engine.run()
        assert request.output == one.plain.tokens and model.chain.shared_tokens == found


def test_the_least_that_a_server_of_the_chain_has_is_what_all_begin_with(tiny, here, client, asked):
    ups, model = two(here, client)
    one = asked(100, 4)
    answer(model, one.prompt, 4)
    idle(ups)
    slots = ups[1].sessions.slots
    kept = list(slots.pool._evictable)  # the end of a beginning is the first to go
    for block in kept[:4]:
        del slots.pool._evictable[block], slots.pool._blocks[slots.pool._keys.pop(block)]
        slots.pool._blank.append(block)
    assert answer(model, one.prompt, 4) == one.plain.tokens
    assert model.chain.shared_tokens == 96 - 64 and not model.chain.faults
    for up in ups:
        check_slots(up.sessions.slots)


def test_wrong_keys_and_values_would_be_seen(here, client, asked):
    """The control of all tests here: what is shared is what the tokens come of."""
    ups, model = two(here, client)
    one = asked(100, 8)
    answer(model, one.prompt, 8)
    ups[1].sessions.batcher.backend.pool.rows.zero_()
    assert answer(model, one.prompt, 8) != one.plain.tokens


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_server_that_is_replaced_in_the_middle_is_sent_all_from_the_first_token(
    tiny, here, client, asked, place, after
):
    """The skipped tokens' hidden states are nowhere, so the servers before it compute them again, too."""
    ups, model = two(here, client)
    spare = here.serve([(0, 3), (3, 6)][place], peers=[ups[0].record.address])[0]
    wait_for(model.swarm.refresh())
    one = asked(100, 8)
    answer(model, one.prompt, 8)
    served = {record.server for _, record in model.chain.sessions}
    dies = next(up for up in (*ups, spare) if up.record.server in served and up.record.blocks[0] == 3 * place)
    request = model.engine.submit(one.prompt, Sampling(8))
    for _ in range(after):
        model.engine.step()
    wait_for(dies.sessions.drain(0.0))
    model.engine.run()
    assert request.output == one.plain.tokens and model.chain.faults
    heir = next(record for session, record in model.chain.sessions if session.layers.start == 3 * place)
    assert heir.server != dies.record.server and model.swarm.served[heir.server] >= 3 * 100


def test_likelihoods_of_a_prompt_come_of_all_its_tokens(here, client, asked):
    _, model = two(here, client)
    one = asked(50, 2)
    said = []
    for _ in range(2):
        request = model.engine.submit(one.prompt, Sampling(2, prompt_logprobs=True, logprobs=1))
        model.engine.run()
        said.append([each.logprob for each in request.prompt_logprobs])
    assert len(said[0]) == 49 and said[0] == pytest.approx(said[1], abs=TOLERANCE)
    assert model.chain.asked_tokens == 0


# Another client.


def test_another_client_finds_nothing(here, client, asked):
    ups, model = two(here, client)
    other = client(ups[0].record.address, config=SHARED)
    one = asked(100, 4)
    for each in (model, other):
        assert answer(each, one.prompt, 4) == one.plain.tokens
    assert (model.chain.shared_tokens, other.chain.shared_tokens) == (0, 0)
    assert answer(other, one.prompt, 4) == one.plain.tokens
    assert other.chain.shared_tokens == 96


def heard(monkeypatch) -> dict[str, list[str]]:
    """By server, the names that clients say to it."""
    said: dict[str, list[str]] = {}
    names = ServerSession._names

    def overheard(self, keys):
        said.setdefault(self.name, []).extend(found := names(self, keys))
        return found

    monkeypatch.setattr(ServerSession, "_names", overheard)
    return said


async def ask(here, server, blocks: str, names: Sequence[str], coding: str = "float32", hidden=None):
    """What a stranger is answered who asks for ``names``, or says that ``hidden`` [16, hidden] has them."""
    async with grpc.aio.insecure_channel(server.record.address) as channel:
        call = channel.stream_stream(SESSION)(metadata=opening(here.model, blocks, coding))
        if hidden is not None:
            await call.write(encode(hidden, coding, [SequenceChunk(7, 0, len(hidden))], names={7: names}))
            return decode(await call.read(), coding, 32, torch.float32, len(hidden))
        await call.write(encode(None, coding, names={7: names}))
        return dict(decode(await call.read(), coding, 32, torch.float32, 0).shared)[7]


def test_names_say_nothing_to_another_server_and_are_of_blocks_and_coding(here, client, asked, monkeypatch):
    said = heard(monkeypatch)
    ups, model = two(here, client)
    one = asked(40, 2)
    answer(model, one.prompt, 2)
    first, second = (said[name][:2] for name in said)
    assert not set(first) & set(second)
    assert wait_for(ask(here, ups[0], "0:3", first)) == 32  # so these are names, which a server alone has heard
    assert wait_for(ask(here, ups[1], "3:6", first)) == 0
    assert wait_for(ask(here, ups[0], "0:2", first)) == 0
    assert wait_for(ask(here, ups[0], "0:3", first, "bfloat16")) == 0
    forged = [f"{int(name, 16) ^ 1:032x}" for name in first]
    assert wait_for(ask(here, ups[0], "0:3", forged)) == 0


def test_nobody_puts_something_in_the_place_of_what_is_there_or_is_to_come(here, client, asked, monkeypatch):
    """A server of the chain that turns against the next one knows its own names only; a name that is there stays."""
    said = heard(monkeypatch)
    ups, model = two(here, client)
    one = asked(40, 6)
    answer(model, one.prompt, 6)
    for blocks, server in (("0:3", ups[0]), ("3:6", ups[1])):
        for names in list(said.values()):
            wait_for(ask(here, server, blocks, names[:1], hidden=torch.randn(16, 32)))
    assert answer(model, one.prompt, 6) == one.plain.tokens
    assert model.chain.shared_tokens == 32


BAD_NAMES = {
    "no digits": ["x" * 32],
    "too short": ["0" * 31],
    "upper case": ["A" * 32],
    "one twice": ["0" * 32] * 2,
    "more than a message has room for": ["0" * 32] * 8000,
}


@pytest.mark.parametrize("names", BAD_NAMES.values(), ids=BAD_NAMES)
def test_names_that_are_none_are_refused_and_others_are_served(here, client, asked, names):
    ups, model = two(here, client)
    with pytest.raises((SwarmError, grpc.aio.AioRpcError)):
        wait_for(ask(here, ups[0], "0:3", names))
    one = asked(40, 2)
    assert answer(model, one.prompt, 2) == one.plain.tokens
    idle(ups)


def test_names_behind_the_context_or_of_no_sequence_of_the_step_change_nothing(here):
    (server,) = here.serve((0, 6))
    many = [f"{number:032x}" for number in range(1024)]
    assert wait_for(ask(here, server, "0:6", many)) == 0
    wait_for(ask(here, server, "0:6", many, hidden=torch.randn(24, 32)))
    assert wait_for(ask(here, server, "0:6", many)) == 16  # one block was full
    check_slots(server.sessions.slots)


ANSWERS = {
    "more than was asked": lambda shared: {number: 10_000 for number in shared},
    "no block": lambda shared: {number: 8 for number in shared},
    "another sequence": lambda shared: {number + 1: 0 for number in shared},
    "nothing": lambda shared: {},
}


@pytest.mark.parametrize("told", ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_says_nonsense_of_what_it_has_is_replaced(here, client, asked, monkeypatch, told):
    from firsttoken.petals import session

    ups, model = two(here, client)
    here.serve((0, 3), (3, 6), peers=[ups[0].record.address])
    wait_for(model.swarm.refresh())
    one, wrong = asked(40, 4), iter([True])

    def said(*args, shared=None, **more):
        shared = told(shared) if shared and next(wrong, False) else shared or {}
        return encode(*args, shared=shared, **more)

    monkeypatch.setattr(session, "encode", said)
    assert answer(model, one.prompt, 4) == one.plain.tokens
    assert any("says that it has" in why for _, why in model.chain.faults)


def test_a_server_that_moves_keeps_nothing_of_its_other_blocks(here, client, asked):
    class Stays(Rebalancing):
        def move(self, name, servers, depth):
            return None

    server, _ = here.serve((0, 3), (3, 6), rebalancing=Stays())
    model = client(server.record.address, config=SHARED)
    one = asked(40, 2)
    answer(model, one.prompt, 2)
    assert server.sessions.slots.pool._keys
    wait_for(server.rebalancer._move(range(2, 5)))
    assert not server.sessions.slots.pool._keys
    check_slots(server.sessions.slots)


def test_a_client_that_audits_shares_nothing(here, client):
    ups = here.serve((0, 6))
    audits = Audits(1.0, ups[0].record.address, 1e-3)
    with pytest.raises(SwarmError, match="not shared where answers are audited: an audit begins with the first token"):
        client(ups[0].record.address, config=SHARED, audits=audits)
