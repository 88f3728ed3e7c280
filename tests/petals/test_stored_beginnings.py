"""Servers take stored keys and values of how a session begins, for the client that sends them alone, and only such as
fit; whoever refuses or dies, the tokens are the whole model's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import grpc
import pytest
import torch
from plain_tokens import TOLERANCE, check_greedy, judged
from safetensors.torch import save
from slots import check_slots
from swarms import ask_while_sessions_end, opening

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import Sampling
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import SESSION, SequenceChunk
from firsttoken.petals.wire import decode, encode
from firsttoken.study.errors import CacheError


class Stored:
    """What a store has of the first ``tokens`` tokens, layer by layer."""

    def __init__(self, kv: Sequence[torch.Tensor], tokens: int) -> None:
        self.kv, self.tokens, self.redo, self.complete, self.closed = kv, tokens, range(0), False, False

    def begin(self) -> None: ...

    def hidden_states(self) -> None: ...

    def arrived(self) -> list[tuple[int, torch.Tensor]]:
        self.complete = True
        return list(enumerate(self.kv))

    def close(self) -> None:
        self.closed = True


@torch.inference_mode()
def computed(tiny, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Keys and values [2, 1, kv_heads, tokens, head_dim] of each layer, by the whole model."""
    cache = tiny(torch.tensor([list(tokens)]), use_cache=True).past_key_values
    return [torch.stack([layer.keys, layer.values]) for layer in cache.layers]


def says(tiny, model, prompt: list[int], count: int = 8) -> bool:
    """Whether what is said is the whole model's, within 1e-3 of a logit."""
    request = model.engine.submit(prompt, Sampling(count))
    model.engine.run()
    try:
        check_greedy(request.output, judged(tiny, prompt, request.output), TOLERANCE)
    except AssertionError:
        return False
    return True


def two(here, client, share: bool = False):
    ups = here.serve((0, 3), (3, 6))
    return ups, client(ups[0].record.address, config=EngineConfig(share_prefixes=share))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("stored", [7, 16, 75, 80])
def test_only_what_follows_is_computed(tiny, here, client, asked, share, stored):
    ups, model = two(here, client, share)
    one = asked(90, 4)
    kv = computed(tiny, one.prompt[:stored])
    model.segments[""].stored = lambda prompt, variant: Stored(kv, stored)
    for turn in range(2):
        before = dict(model.swarm.served)
        assert says(tiny, model, one.prompt, 4)
        skipped = stored if not turn else max(stored, 80 if share else 0)
        computed_now = {model.swarm.served[key] - before.get(key, 0) for key in model.swarm.served}
        again = stored - stored % 16 or stored
        assert computed_now == {3 * (93 - skipped)} or (turn and computed_now == {3 * (93 - again)})
        assert model.chain.restored == turn + 1
    for up in ups:
        check_slots(up.sessions.slots)


@pytest.mark.parametrize("seed", range(2))
def test_random_sessions_with_stored_beginnings_and_deaths(tiny, here, client, seed):
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    ups = here.serve((0, 2), (2, 6), (0, 3), (3, 6), limits={"kv_tokens": 400})
    model = client(ups[0].record.address, config=EngineConfig(share_prefixes=bool(seed)))
    texts = [torch.randint(256, (length,), generator=draw).tolist() for length in (40, 64, 100)]
    stored = [(text, computed(tiny, text)) for text in texts]

    def find(prompt, variant):
        found = [(text, kv) for text, kv in stored if prompt[: len(text)] == text and len(prompt) > len(text)]
        return Stored(found[0][1], len(found[0][0])) if found and dice.random() < 0.8 else None

    model.segments[""].stored = find

    def prompts() -> list[list[int]]:
        return [
            dice.choice(texts) + [dice.randrange(256) for _ in range(dice.randint(1, 30))]
            for _ in range(dice.randint(1, 2))
        ]

    ask_while_sessions_end(tiny, model, ups, dice, prompts, 10)
    assert model.chain.restored > 5 and model.chain.faults


class Torn(Stored):
    def arrived(self):
        raise CacheError("its sha256 is not that of what was stored")


class Less(Stored):
    def arrived(self):
        return super().arrived()[:-1]


WRONG = {
    "torn": lambda kv: Torn(kv, 80),
    "a layer less": lambda kv: Less(kv, 80),
    "another dtype": lambda kv: Stored([one.half() for one in kv], 80),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_or_is_refused_is_computed(tiny, here, client, asked, make):
    _, model = two(here, client)
    one = asked(90, 6)
    source = make(computed(tiny, one.prompt[:80]))
    model.segments[""].stored = lambda prompt, variant: source
    assert says(tiny, model, one.prompt, 6)
    assert source.closed and model.chain.restored == 0 and not model.chain.faults
    assert set(model.swarm.served.values()) == {3 * 95}


def test_a_store_that_has_gone_ends_no_step(tiny, here, client, asked):
    def gone(prompt, variant):
        raise CacheError("the folder is not there")

    _, model = two(here, client)
    model.segments[""].stored = gone
    assert says(tiny, model, asked(90, 4).prompt, 4)


def test_values_of_another_shape_fail_the_server_that_is_sent_them_and_never_the_tokens(tiny, here, client, asked):
    """A store of another model is told by its identity before; where one came through, a server refuses it."""
    ups, model = two(here, client)
    here.serve((0, 3), (3, 6), peers=[ups[0].record.address])
    wait_for(model.swarm.refresh())
    one = asked(90, 6)
    kv = [torch.cat([layer, layer], 2) for layer in computed(tiny, one.prompt[:80])]
    sources = iter([Stored(kv, 80)])
    model.segments[""].stored = lambda prompt, variant: next(sources, None)
    assert says(tiny, model, one.prompt, 6)
    assert any("do not fit" in why for _, why in model.chain.faults) and model.chain.restored == 0


async def sent(here, server, blocks: str, data: bytes, then: bytes | None = None):
    """What a client is answered to ``data``, and to what it sends ``then``."""
    async with grpc.aio.insecure_channel(server.record.address) as channel:
        call = channel.stream_stream(SESSION)(metadata=opening(here.model, blocks))
        await call.write(data)
        said = [decode(await call.read(), "float32", 32, torch.float32, 0)]
        if then is not None:
            await call.write(then)
            said.append(decode(await call.read(), "float32", 32, torch.float32, 0))
        return [dict(one.shared) for one in said]


def kv_of(backend, tokens: int, layers: int = 3, **changes) -> torch.Tensor:
    shape = backend.pool.shape
    return torch.randn(layers, 2, shape.kv_heads, tokens, shape.head_dim, **changes)


def test_what_does_not_fit_is_refused_before_a_block_is_taken(here):
    (server,) = here.serve((0, 3))
    backend = server.sessions.batcher.backend
    step, good = [SequenceChunk(7, 0, 16)], kv_of(backend, 16)
    nan, huge = good.clone(), good.clone()
    nan[1, 1, 0, 3, 2], huge[0, 0, 0, 0, 0] = float("nan"), 1e30
    bad = {
        "do not fit": [
            encode(None, "float32", step, kv=kv_of(backend, 15)),
            encode(None, "float32", step, kv=kv_of(backend, 16, 2)),
            encode(None, "float32", step, kv=good.double()),
            encode(None, "float32", step, kv=good[0]),
            encode(None, "float32", [SequenceChunk(7, 0, 8), SequenceChunk(8, 0, 8)], kv=good),
        ],
        "NaN or infinity": [encode(None, "float32", step, kv=nan)],
        "beyond 16,777,216": [encode(None, "float32", step, kv=huge)],
        "has 0 tokens here": [encode(None, "float32", [SequenceChunk(7, 16, 32)], kv=good)],
        "exceeds the context": [encode(None, "float32", [SequenceChunk(7, 0, 32)], kv=kv_of(backend, 32))],
        "no hidden states": [save({"kv": good, "hidden": torch.zeros(16, 32)}, {"step": '{"chunks": [[7, 0, 16]]}'})],
    }
    backend_context, server.sessions.slots.context = server.sessions.slots.context, 24
    for said, messages in bad.items():
        for message in messages:
            with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
                wait_for(sent(here, server, "0:3", message))
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED)
    server.sessions.slots.context = backend_context
    big = encode(None, "float32", [SequenceChunk(7, 0, 512)], kv=kv_of(backend, 4096))
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
        wait_for(sent(here, server, "0:3", big))
    assert server.sessions.slots.held == 0 and server.sessions.slots.pool.free == server.sessions.slots.pool.count
    assert wait_for(sent(here, server, "0:3", encode(None, "float32", step, kv=good))) == [{7: 16}]
    assert wait_for(sent(here, server, "0:3", encode(None, "float32", step, kv=good.half()))) == [{7: 0}]


def test_what_one_client_sends_another_finds_by_no_name(tiny, here, client, asked):
    """And what others have is never written over: of two blocks with one name the first is found."""
    ups, model = two(here, client)
    one = asked(90, 6)
    kv = computed(tiny, asked(90, 1).prompt)  # of another text: whoever took it would say something else
    model.segments[""].stored = lambda prompt, variant: Stored(kv, 80)
    assert not says(tiny, model, one.prompt, 6)
    other = client(ups[0].record.address, config=EngineConfig(share_prefixes=True))
    assert says(tiny, other, one.prompt, 6) and says(tiny, other, one.prompt, 6)
    assert other.chain.shared_tokens == 80
    names = [f"{number:032x}" for number in range(2)]
    fill = encode(
        None, "float32", [SequenceChunk(7, 0, 32)], names={7: names}, kv=kv_of(ups[0].sessions.batcher.backend, 32)
    )
    ask = encode(None, "float32", names={9: names})
    assert wait_for(sent(here, ups[0], "0:3", fill, ask)) == [{7: 32}, {9: 32}]
    assert wait_for(sent(here, ups[1], "3:6", ask)) == [{9: 0}]
