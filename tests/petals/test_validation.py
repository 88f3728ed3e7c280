"""Servers that lie are convicted and left out, on real connections; what proves nothing convicts nobody."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import partial

import grpc
import pytest
import torch
from plain_tokens import check_greedy, generated
from swarms import DEPTH, asking, part
from waiting import until

from firsttoken.assets.models import load_model
from firsttoken.engine.request import Sampling
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.keys import parse_foreign, public_hex, server_key, signature_of
from firsttoken.petals.messages import ACCUSE, SequenceChunk
from firsttoken.petals.swarm import ServerConduct
from firsttoken.petals.trust import commitments
from firsttoken.petals.trust.arbitration import TOLERANCE, AuditRuling
from firsttoken.petals.trust.auditor import AGREED, CONVICTED, INCONCLUSIVE, WITNESS, Audits
from firsttoken.petals.trust.commitments import Charge, Evidence, digest_rows, read_commitment
from firsttoken.study.errors import SwarmError
from firsttoken_studies.nb54_validation_and_privacy.swarm_validation import LIES, ByzantineBackend

CLIENT = server_key(None)
ANSWER = 8


def audited(client, door: str, rate: float = 1.0, **options):
    return client(door, audits=Audits(rate, door, seed=0, **options))


def said_by(model, one, tokens: int = ANSWER) -> list[int]:
    request = model.engine.submit(one.prompt, Sampling(tokens))
    model.engine.run()
    return request.output


def look(model, *ups) -> None:
    wanted = {up.record.server for up in ups}

    def known() -> bool:
        wait_for(model.swarm.refresh())
        return wanted <= {record.server for record in model.swarm.servers()}

    until(known, "these servers are known to answer")


def lying(lie: str):
    return partial(ByzantineBackend, lie=lie, seed=1)


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_convicted_and_loses_its_place(lie, here, client, asked):
    """The rest of the answer is the local model's on what had been said until then."""
    (keeper,) = here.serve((3, 6))
    door = keeper.record.address
    (liar,) = here.serve((0, 3), peers=[door], make_backend=lying(lie))
    model, one = audited(client, door), asked(12, ANSWER)
    look(model, liar)
    wait_for(model.chain._extend(model.chain.layers))  # the liar alone has these blocks
    (honest,), others = here.serve((0, 3), peers=[door]), here.serve((3, 6), peers=[door])
    look(model, honest, *others)
    said = said_by(model, one)
    assert model.swarm.convicted == {liar.record.server} and model.chain.auditor.ends[CONVICTED] == 1
    assert [server for server, _ in model.chain.faults] == [liar.record.server]
    assert honest.record.server in {record.server for _, record in model.chain.sessions}
    if lie != "seldom":  # convicted before its first answer was used
        assert check_greedy(said, one.plain) == ANSWER
    assert said_by(model, one) == said_by(model, one)
    wait_for(model.swarm.refresh())
    assert liar.record.server not in {record.server for record in model.swarm.servers()}


def test_what_a_liar_told_the_servers_behind_it_is_told_them_again(here, client, asked, tiny):
    """Its first lies are not looked at: once it is convicted, the next token is that of honest servers throughout."""
    (keeper,) = here.serve((3, 6))
    door = keeper.record.address
    (liar,) = here.serve((0, 3), peers=[door], make_backend=lying("lazy"))
    model, one = audited(client, door), asked(12, ANSWER)
    look(model, liar)
    auditor, model.chain.auditor = model.chain.auditor, None
    request = model.engine.submit(one.prompt, Sampling(ANSWER))
    for _ in range(3):
        model.engine.step()
    look(model, *here.serve((0, 3), peers=[door]))
    model.chain.auditor = auditor
    while not request.finished:
        model.engine.step()
    assert auditor.ends[CONVICTED] == 1
    assert liar.sessions.batcher.backend.told >= 4 and len(request.output) == ANSWER
    assert [server for server, _ in model.chain.faults] == [liar.record.server]  # nobody behind it is blamed
    check_greedy(request.output[3:], generated(tiny, one.prompt + request.output[:3], ANSWER - 3))


def test_honest_servers_stand_whoever_shares_their_batch(here, client, asked):
    """And a witness that lies is convicted in their place."""
    ups = here.serve((0, 6), (0, 6))
    model = audited(client, ups[0].record.address)
    look(model, *ups)
    known = [asked(length, ANSWER) for length in (1, 17, 40)]
    requests = [model.engine.submit(one.prompt, Sampling(ANSWER)) for one in known]
    model.engine.run()
    for request, one in zip(requests, known, strict=True):
        assert check_greedy(request.output, one.plain) == ANSWER
    auditor = model.chain.auditor
    assert set(auditor.ends) == {AGREED} and len(auditor.differences) == ANSWER
    assert max(auditor.differences) < TOLERANCE / 10  # often none at all: the kernels add in one order
    chosen = model.chain.sessions[0][1].server
    (witness,) = here.serve((0, 6), peers=[ups[0].record.address], make_backend=lying("noise"))
    look(model, witness)
    model.swarm._pings = {a: s for a, s in model.swarm._pings.items() if a != other_of(ups, chosen)}
    assert check_greedy(said_by(model, known[0]), known[0].plain) == ANSWER
    assert model.swarm.convicted == {witness.record.server} and auditor.ends[WITNESS] == 1
    assert auditor.ends[CONVICTED] == 0 and model.chain.sessions[0][1].server == chosen


def other_of(ups, chosen: str) -> str:
    return next(up.record.address for up in ups if up.record.server != chosen)


def believe_in_a_ghost(model, record, ping_s: float) -> None:
    """The client knows a server like that of ``record``, at an address where nobody listens."""
    ghost = replace(record, server=public_hex(CLIENT), address="127.0.0.1:1", throughput=1.0).signed(CLIENT)
    model.swarm.registry.accept(ghost, time.time())
    model.swarm._pings[ghost.address] = ping_s


def test_an_audit_is_inconclusive_where_somebody_is_gone(here, client, asked):
    """The witness, or the only other server: nobody is convicted, and the answer goes on."""
    (door,) = here.serve((0, 6))
    model, one = audited(client, door.record.address), asked(9, ANSWER)
    assert check_greedy(said_by(model, one), one.plain) == ANSWER  # nobody else has the blocks
    believe_in_a_ghost(model, door.record, 1.0)
    assert check_greedy(said_by(model, one), one.plain) == ANSWER  # who has does not answer
    auditor = model.chain.auditor
    assert auditor.ends == {INCONCLUSIVE: 2 * ANSWER} and auditor.differences == []


def test_a_liar_that_alone_has_all_blocks_is_found_by_a_chain_of_the_others(here, client, asked):
    """They hold halves: each answer is computed again by two, and what the liar has said reaches nobody."""
    halves = here.serve((0, 3), (3, 6))
    door = halves[0].record.address
    (liar,) = here.serve((0, 6), peers=[door], make_backend=lying("noise"))
    model, one = audited(client, door), asked(12, ANSWER)
    look(model, *halves, liar)
    assert check_greedy(said_by(model, one), one.plain) == ANSWER
    auditor = model.chain.auditor
    assert auditor.ends[CONVICTED] == 1 and model.swarm.convicted == {liar.record.server}
    # later clients: as a chain, and as a witness of the halves, it is convicted by what the keeper knows
    for wanted, chosen in ((CONVICTED, (liar,)), (WITNESS, halves)):
        later = audited(client, door)
        look(later, *halves, liar)
        prefer(later, *chosen)
        assert check_greedy(said_by(later, one), one.plain) == ANSWER
        assert later.chain.auditor.ends[wanted] == 1 and later.swarm.convicted == {liar.record.server}


def prefer(model, *ups) -> None:
    """These are the nearest, by far."""
    near = {up.record.address for up in ups}
    model.swarm._pings = {address: 0.0 if address in near else 100.0 for address in model.swarm._pings}


def test_a_chain_of_honest_halves_is_agreed_with_by_one_that_has_all(here, client, asked):
    halves = here.serve((0, 2), (2, 6))
    whole, other = here.serve((0, 6), (0, 3), peers=[halves[0].record.address])
    model, one = audited(client, halves[0].record.address), asked(9, ANSWER)
    look(model, *halves, whole, other)
    for chosen in (halves, (whole,)):
        part(model)
        prefer(model, *chosen)
        assert check_greedy(said_by(model, one), one.plain) == ANSWER
    assert set(model.chain.auditor.ends) == {AGREED} and max(model.chain.auditor.differences) < TOLERANCE / 10


def test_a_witness_that_is_silent_is_passed_by(here, client, asked):
    ups = here.serve((0, 6), (0, 6))
    model, one = audited(client, ups[0].record.address), asked(9, ANSWER)
    look(model, *ups)
    believe_in_a_ghost(model, ups[0].record, 50.0)
    assert check_greedy(said_by(model, one), one.plain) == ANSWER
    assert model.chain.auditor.ends == {AGREED: ANSWER}


def test_what_nobody_can_decide_ends_the_answer_or_takes_another_chain(here, client, asked):
    """A liar and one who is honest, of whom each says that the other is wrong, while no keeper judges."""
    (honest,) = here.serve((0, 6))
    (liar,) = here.serve((0, 6), peers=[honest.record.address], make_backend=lying("noise"))
    one = asked(9, 40)
    model = client(honest.record.address, audits=Audits(1.0, "127.0.0.1:1"))
    look(model, honest, liar)
    with pytest.raises(SwarmError, match=r"4 of 4 audits of .* showed nothing \(the last: .*\), and nobody else has"):
        said_by(model, one, 40)
    (left,) = [server for server, _ in model.chain.faults]  # whichever was asked first: then the other was tried
    assert left in (liar.record.server, honest.record.server)
    assert model.chain.auditor.ends == {INCONCLUSIVE: 8} and model.swarm.convicted == set()
    assert min(model.chain.auditor.differences) > TOLERANCE  # it is seen, and not shown to anybody


async def answered(model, up) -> Evidence:
    """One answer of blocks [1, 4) of this server, as it signed it."""
    session = model.swarm.open_session(up.record, range(1, 4), "float32")
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    outputs = await session.run([SequenceChunk(0, 0, 5)], inputs)
    session.close()
    return Evidence(Charge(read_commitment(session.commitment), 0), inputs, outputs)


def test_an_accusation_costs_the_accuser_first(here, client):
    """Of an honest server: a few are computed, however many are made; of one that nobody has met none is."""
    (keeper,) = here.serve((0, 6))
    model = client(keeper.record.address)

    evidence = wait_for(answered(model, keeper))

    async def accuse(what: Evidence, times: int) -> list[str]:
        async with model.swarm.access.channel(keeper.record.address, 32) as channel:
            said = []
            for _ in range(times):
                try:
                    call = channel.stream_unary(ACCUSE)(iter(list(what.messages())), timeout=20)
                    said.append(json.loads(await call)["convicted"])
                except grpc.aio.AioRpcError as error:
                    said.append(error.details())
            return said

    said = wait_for(accuse(evidence, 8))
    assert said[:4] == [False] * 4
    assert all("too much was asked from 127.0.0.1: ask again in" in one for one in said[4:])
    stranger = evidence.charge.commitment
    fresh = replace(stranger, server=public_hex(CLIENT))
    fresh = replace(fresh, signature=signature_of(CLIENT, commitments._DOMAIN, asdict(fresh)))
    made_up = replace(evidence, charge=replace(evidence.charge, commitment=fresh))
    assert "is not a server that this keeper has met" in wait_for(accuse(made_up, 1))[0]


def test_who_does_not_vouch_for_an_answer_is_left_out(here, client, asked):
    """Unsigned, or signed for other rows: no proof of a lie, and no reason to go on."""
    first, second = here.serve((0, 6), (0, 6))
    model, one = audited(client, first.record.address), asked(9, ANSWER)
    look(model, first, second)
    said_by(model, one)
    chosen = model.chain.sessions[0][1].server
    up = first if first.record.server == chosen else second
    commit = up.sessions.committer.commit
    for wrong, why in ((lambda *_: "", "carries no commitment"), (swapped(commit), "of other inputs or outputs")):
        part(model)
        model.swarm.conduct = ServerConduct(model.swarm.timeouts)
        for server in (first, second):
            model.swarm._pings[server.record.address] = 0.0 if server is up else 1.0
        up.sessions.committer.commit = wrong
        assert check_greedy(said_by(model, one), one.plain) == ANSWER
        assert model.chain.faults[-1][0] == chosen and why in model.chain.faults[-1][1]
    assert model.swarm.convicted == set()


def swapped(commit):
    return lambda layers, trails, chunks, hidden, out: commit(layers, trails, chunks, hidden, out + 1)


@pytest.fixture
def case(here, client, asked):
    """A liar, its keeper, and the evidence of one of its answers."""
    (keeper,) = here.serve((0, 6))
    door = keeper.record.address
    (liar,) = here.serve((1, 4), peers=[door], make_backend=lying("noise"))
    model = client(door)
    look(model, liar)

    def accuse(messages) -> dict | str:
        async def call():
            try:
                return json.loads(await model.swarm.channel(door).stream_unary(ACCUSE)(iter(messages), timeout=20))
            except grpc.aio.AioRpcError as error:
                return error.details()

        return wait_for(call())

    return wait_for(answered(model, liar)), accuse


FORGED = {
    "signature": lambda c: replace(c, signature="0" * 128),
    "another server": lambda c: replace(c, server="a" * 64),
    "other blocks": lambda c: replace(c, layers=(0, 3)),
    "other outputs": lambda c: replace(c, steps=(replace(c.steps[0], outputs="b" * 64),)),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_commitment_convicts_nobody(change, case):
    evidence, accuse = case
    forged = replace(evidence, charge=replace(evidence.charge, commitment=change(evidence.charge.commitment)))
    assert "is not signed by its key: it is forged" in accuse(list(forged.messages()))


def test_evidence_that_proves_nothing_is_refused(case):
    evidence, accuse = case
    other = replace(evidence, inputs=evidence.inputs + 1)
    assert "has signed other inputs or outputs: this proves nothing" in accuse(list(other.messages()))
    short = list(evidence.messages())[:-1]
    assert "proves nothing" in accuse(short)
    charge, inputs, _ = evidence.messages()
    assert "are not those that come next" in accuse([charge, inputs, inputs])
    assert "begins with a charge" in accuse([])
    for wrong in (b"{}", b"\xff", json.dumps(asdict(replace(evidence.charge, step=3))).encode()):
        assert "charge cannot be read" in (said := accuse([wrong])) or "none is number 3" in said
    assert accuse(list(evidence.messages()))["convicted"]  # and this does prove it
    again = accuse(list(evidence.messages()))
    assert again == {"convicted": True, "difference": 0.0}  # by its signature alone


def test_a_row_has_one_digest_however_its_sequence_came():
    rows = torch.randn(7, 8)
    whole = digest_rows(rows, 3)
    assert digest_rows(rows[4:], 3, digest_rows(rows[:4], 3)[-1]) == whole[4:]
    assert digest_rows(rows, 2)[0] != whole[0] and len(set(whole)) == 7


def test_what_is_no_audit_is_refused(here, client):
    (door,) = here.serve((0, 6))
    for wrong in ({"rate": 1.5}, {"rate": -0.1}, {"tolerance": 0.0}):
        with pytest.raises(SwarmError, match="a rate of audits lies between 0 and 1"):
            Audits(**({"rate": 0.1, "keeper": ""} | wrong))
    with pytest.raises(SwarmError, match="audits compare answers in float32"):
        client(door.record.address, audits=Audits(0.1, door.record.address), coding="int8")


def test_two_versions_of_a_block_live_side_by_side(here, client, asked, folder, tmp_path):
    """In one registry; each client asks for its own, and gets the answers of its own model."""
    model = load_model(str(folder), with_tokenizer=False).model
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight.mul_(-1.5)
    newer = tmp_path / "newer"
    model.save_pretrained(newer)
    old = here.serve((0, 3), (3, 6))
    here.folder, here.model = newer, model_sha256(newer)
    new = here.serve((0, 3), (3, 6), peers=[old[0].record.address])
    door = old[0].record.address
    clients = client(door), client(door, folder=newer)
    for one, ups in zip(clients, (old, new), strict=True):
        look(one, *ups)
    assert len(clients[0].swarm.registry.live(0.0)) == 4 == len(clients[1].swarm.registry.live(0.0))
    for one, ups, said in zip(clients, (old, new), (asked(12, ANSWER), asking(model)(12, ANSWER)), strict=True):
        assert {record.server for record in one.swarm.servers()} == {up.record.server for up in ups}
        assert check_greedy(said_by(one, said), said.plain) == ANSWER
    with pytest.raises(SwarmError, match="no server that answers has blocks 0 to 5"):
        wait_for(unserved(clients[0]))


async def unserved(model) -> None:
    model.swarm.model = "c" * 64
    await model.swarm.check(range(DEPTH))


@pytest.mark.parametrize("said", [b"\xff", b"{", b"{}", b'{"convicted": 1, "difference": 0.0}'])
def test_a_ruling_that_cannot_be_read_convicts_nobody(said: bytes) -> None:
    """Bytes that are no text are a keeper's fault, too, and end an audit without a finding."""
    with pytest.raises(SwarmError, match=r"^the keeper's ruling cannot be read: "):
        parse_foreign(AuditRuling, said, "the keeper's ruling cannot be read")
