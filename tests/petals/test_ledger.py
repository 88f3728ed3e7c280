"""Accounts and places: what is forged, replayed, negative or not there changes nothing; the books are exact."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from waiting import reached

from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.keys import public_hex
from firsttoken.petals.trust.ledger import MOST, Ledger, Order, Receipt, signed_slip, tell_slip
from firsttoken.petals.trust.priority_queue import OFFER, Bid, PriorityQueue
from firsttoken.petals.trust.receipts import give_receipts
from firsttoken.study.errors import SwarmError

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 5)]
WHO = [public_hex(key) for key in KEYS]
KEEPER = WHO[0]


def receipt(client: int, server: int, total: int) -> Receipt:
    return signed_slip(Receipt(WHO[client], WHO[server], total), KEYS[client])


def order(owner: int, points: int, number: int, purpose: str = "deposit", keeper: str = KEEPER) -> Order:
    return signed_slip(Order(WHO[owner], keeper, purpose, points, number), KEYS[owner])


def told(ledger: Ledger, slip) -> None:
    ledger.told(tell_slip(slip))


REFUSED = {
    "replayed receipt": (receipt(1, 2, 100), "receipt of 100 points where 100 are known: it is replayed"),
    "older receipt": (receipt(1, 2, 60), "where 100 are known: it is replayed"),
    "negative receipt": (receipt(1, 2, -5), "total: expected 1 to"),
    "forged receipt": (replace(receipt(1, 2, 900), total=901), "the receipt of .* it is forged"),
    "receipt in another's name": (replace(receipt(1, 2, 900), client=WHO[3]), "it is forged"),
    "receipt for oneself": (receipt(2, 2, 900), "has signed a receipt for itself"),
    "replayed order": (order(2, 10, 1), "order 1 of .* is not newer than 1: replayed"),
    "negative order": (order(2, -10, 2), "points: expected 1 to"),
    "no points": (order(2, 0, 2), "points: expected 1 to"),
    "more than there is": (order(2, 71, 2), "has 70 points here, not 71"),
    "another keeper's": (order(2, 10, 2, keeper=WHO[1]), "is for another keeper"),
    "an offer as a deposit": (order(2, 10, 2, "offer"), "no deposit"),
    "forged order": (replace(order(2, 10, 2), points=20), "the order of .* it is forged"),
    "a receipt signed as an order": (replace(order(2, 10, 2), signature=receipt(2, 1, 10).signature), "it is forged"),
}


@pytest.mark.parametrize(("slip", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_count_changes_nothing(slip, said):
    """On the wire and in the process."""
    ledger = Ledger(KEEPER)
    told(ledger, receipt(1, 2, 100))
    told(ledger, order(2, 30, 1))
    for act in (
        lambda: told(ledger, slip),
        lambda: ledger.credit(slip) if isinstance(slip, Receipt) else ledger.carry_out(slip, "deposit"),
    ):
        with pytest.raises(SwarmError, match=said):
            act()
    account = ledger.account(WHO[2])
    assert (account.points, account.deposit, account.number) == (70, 30, 1)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"receipt": {}}', b'{"points": 3}'])
def test_what_is_said_to_no_account_is_refused(data):
    with pytest.raises(SwarmError, match=r"an account is told of|what is said to an account cannot be read"):
        Ledger(KEEPER).told(data)


def test_a_conviction_takes_the_deposit_once():
    ledger = Ledger(KEEPER)
    told(ledger, receipt(1, 2, 100))
    told(ledger, order(2, 30, 1))
    assert ledger.convict(WHO[2], WHO[3]) == 30
    assert ledger.account(WHO[3]).points == 30 and ledger.account(WHO[2]).points == 0
    for again in (receipt(1, 2, 200), order(2, 1, 2)):
        with pytest.raises(SwarmError, match="was convicted, and has no account here any more"):
            told(ledger, again)
    ledger.refund(WHO[2], 50)
    assert ledger.account(WHO[2]).points == 0


def test_so_many_accounts_and_no_more():
    ledger = Ledger(KEEPER)
    for number in range(MOST):
        ledger.account(f"{number:064x}")
    with pytest.raises(SwarmError, match="4096 accounts are kept here, and no more"):
        told(ledger, receipt(1, 2, 5))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12), st.integers(0, 3))
def test_places_go_to_the_highest_offers_and_the_books_are_exact(offers, waiting):
    """Against a plain model of the queue; ``leaves`` are those who give up before anybody is called."""

    async def run() -> None:
        ledger = Ledger(KEEPER)
        told(ledger, receipt(1, 2, 1000))
        queue, model, tasks = PriorityQueue(1, waiting, ledger), [], {}
        await queue.take("")
        for number, (points, leaves) in enumerate(offers):
            offer = tell_offer(order(2, points, number + 1, "offer")) if points else ""
            tasks[number] = asyncio.create_task(queue.take(offer))
            await asyncio.sleep(0)
            if len(model) < waiting or (model and points > model[-1][0]):
                model = sorted([*model[: waiting - (len(model) == waiting)], (points, number)], key=by)
            if leaves:
                tasks[number].cancel()
                model = [one for one in model if one[1] != number]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ledger.account(WHO[2]).points == 1000 - sum(points for points, _ in model)
        called = []
        for _ in model:
            queue.give()
            await asyncio.sleep(0)
            called += [n for n, task in tasks.items() if task.done() and not failed(task) and n not in called]
        assert called == [number for _, number in model]
        queue.give()
        assert queue.taken == 0
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    asyncio.run(run())


def by(one: tuple[int, int]) -> tuple[int, int]:
    return -one[0], one[1]


def failed(task: asyncio.Task) -> bool:
    return task.cancelled() or task.exception() is not None


def tell_offer(slip: Order) -> str:
    return tell_slip(slip).decode()[len('{"order": ') : -1]


def test_an_offer_that_is_none_is_refused():
    async def run(offer: str, said: str) -> None:
        queue = PriorityQueue(1, 2, Ledger(KEEPER))
        await queue.take(offer)  # a free place costs nothing, whatever is offered
        with pytest.raises(SwarmError, match=said):
            await queue.take(offer)
        assert queue.taken == 1

    for offer, said in (
        ("{", "an offer cannot be read"),
        (tell_offer(order(2, 5, 1, "offer")), "has 0 points here, not 5"),
        (tell_offer(order(2, 5, 1)), "no offer"),
        (tell_offer(replace(order(2, 5, 1, "offer"), points=1)), "it is forged"),
        (tell_offer(replace(order(2, 5, 1, "offer"), points=-5)), "cannot be read: points: expected 1 to"),
    ):
        asyncio.run(run(offer, said))
    assert Bid(KEYS[2], 5).headers(KEEPER)[0][0] == OFFER


def test_who_has_served_is_served_first(here, client, asked):
    """Over gRPC: a client's receipts are points of the server's owner, which buy the next place at a full server."""
    (up,) = here.serve((0, 6), limits={"sessions": 1, "waiting": 1})
    door, one = up.record.address, asked(8, 4)
    first = client(door)
    request = first.engine.submit(one.prompt, Sampling(4))
    first.engine.run()
    assert first.swarm.served == Counter({up.record.server: (8 + 3) * 6})
    first.swarm.served = Counter({WHO[2]: first.swarm.served[up.record.server]})  # as if the owner of this key had
    wait_for(give_receipts(first.swarm, KEYS[1], door))
    assert up.ledger.account(WHO[2]).points == 66 and request.finished
    with pytest.raises(SwarmError, match="it is replayed"):
        wait_for(give_receipts(first.swarm, KEYS[1], door))
    poor, rich = client(door), client(door, bid=Bid(KEYS[2], 60))

    async def race() -> str:
        """The poor one comes first, and is outbid; the rich one gets the place that the first one leaves."""
        poor_line = poor.swarm.open_session(up.record, range(6), "float32")._call
        await poor_line.tell(b"")  # as a client does, which then waits
        await reached(lambda: up.sessions.queue._queue)
        rich_line = rich.swarm.open_session(up.record, range(6), "float32")
        said = await poor_line._call.details()
        first.chain.close()
        await reached(lambda: not up.sessions.queue._queue)
        rich_line.close()
        return said

    assert "others offer more for the next place" in wait_for(race())
    assert up.ledger.account(WHO[2]).points == 6
