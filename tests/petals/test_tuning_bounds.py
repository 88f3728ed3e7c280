"""What a pass of training may take of a server, and what is left of clients that go, or of servers that lie."""

from __future__ import annotations

import threading
from dataclasses import replace

import grpc
import pytest
import torch
from swarms import opening
from torch.autograd.graph import saved_tensors_hooks
from waiting import reached

from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import MOST_TOKENS, PASS
from firsttoken.petals.server import RunningServer
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.tuning import frozen as blocks
from firsttoken.petals.tuning.client_adapters import Lora, module_widths
from firsttoken.petals.tuning.frozen import MOST_WAITING, FrozenBlocks
from firsttoken.petals.tuning.passes import Pass, encode_pass
from firsttoken.petals.tuning.remote_training import RemoteTraining
from firsttoken.study.errors import RequestError

TOKENS = 48


def a_pass(config, tokens: int = TOKENS) -> Pass:
    """Backward, with LoRA whose second half is not zero."""
    draw = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, 1, tokens, config.hidden_size, generator=draw)
    lora = Lora(config, 2)
    adapters = {where: (a.detach(), torch.randn(b.shape, generator=draw)) for where, (a, b) in lora.adapters().items()}
    return Pass(hidden, adapters, 2.0, gradient)


class FinishedWindows:
    """Bytes that autograd keeps, the most of them at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> FinishedWindows.One:
        return FinishedWindows.One(self, tensor)

    class One:
        def __init__(self, kept: FinishedWindows, tensor: torch.Tensor) -> None:
            self.kept, self.tensor = kept, tensor
            kept.now += tensor.nbytes
            kept.most = max(kept.most, kept.now)

        def __del__(self) -> None:
            self.kept.now -= self.tensor.nbytes


def test_backward_keeps_a_few_layers_at_a_time_and_says_the_same(folder, tiny, monkeypatch):
    found = {}
    for layers in (6, 2, 1):
        monkeypatch.setattr(blocks, "MOST_KEPT", layers * TOKENS)
        kept, server = FinishedWindows(), FrozenBlocks(folder, range(6), torch.float32)
        with saved_tensors_hooks(kept.pack, lambda one: one.tensor):
            said = server.run(range(6), a_pass(tiny.config))
        found[layers] = kept.most, said
        server.close()
    whole = found[6][1]
    for layers, (most, said) in found.items():
        assert most <= 1.1 * found[6][0] * layers / 6, (layers, most)
        torch.testing.assert_close(said.hidden, whole.hidden)
        assert said.adapters.keys() == whole.adapters.keys()
        for where, halves in said.adapters.items():
            torch.testing.assert_close(halves, whole.adapters[where])


def test_a_whole_row_trains_with_lora_beside_every_module_and_no_more(here, folder, tiny):
    door = here.serve((0, 6), trains=True)[0].record.address
    ids = torch.zeros(1, MOST_TOKENS, dtype=torch.long)
    lora = Lora(tiny.config, 8, modules=list(module_widths(tiny.config)))
    with RemoteTraining(folder, [door], lora=lora) as model:
        model.loss(ids, ids).backward()
        assert all(one.grad is not None for one in lora.parameters()) and model.chain.faults == []
        moved = model.chain.moved_bytes
        of_states, of_lora = 5 * MOST_TOKENS * 32 * 4, 3 * sum(one.nbytes for one in lora.parameters())
        assert 0 <= moved - of_states - of_lora < 0.05 * moved, "headers"
        model.lora = Lora(tiny.config, 64, modules=list(module_widths(tiny.config)))
        with pytest.raises(RequestError, match="fewer tokens or ranks"):
            model.hidden(ids)


@pytest.fixture
def held(here):
    """A server whose passes wait until they are let go, and how a client asks it for one."""
    server, go = here.serve((0, 6), trains=True)[0], threading.Event()
    run = server.frozen.run
    server.frozen.run = lambda layers, one: go.wait(30) and run(layers, one)
    yield server, go
    go.set()


def test_passes_wait_within_a_bound_and_nothing_is_left_of_who_goes(here, held, tiny):
    server, go = held
    message, opened = encode_pass(a_pass(tiny.config)), opening(here.model)

    async def crowd() -> tuple[str, str, int]:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            ask, waiting = channel.unary_unary(PASS), lambda: len(server.frozen._waiting)
            running = ask(message, metadata=opened)
            await reached(lambda: server.frozen.busy)
            crowd = [ask(message, metadata=opened) for _ in range(MOST_WAITING)]
            await reached(lambda: waiting() == MOST_WAITING)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(b"x" * len(message), metadata=opened)
            running.cancel()  # its client dies in the middle of backward
            for one in crowd:
                one.cancel()
            await reached(lambda: not waiting())
            for _ in range(3):
                gone = ask(message, metadata=opened)
                await reached(lambda: waiting() == 1)
                gone.cancel()
                await reached(lambda: not waiting())
            queued = server.frozen._thread._work_queue.qsize()
            go.set()
            await ask(message, metadata=opened)
            return refused.value.code().name, refused.value.details(), queued

    code, said, queued = wait_for(crowd())
    assert (code, said) == ("RESOURCE_EXHAUSTED", f"{MOST_WAITING} passes wait here, and no more are taken")
    assert queued == 0, "messages of clients that went"


def test_a_client_that_says_nothing_is_not_waited_for(here):
    impatient, server = (here.serve((0, 6), trains=True, limits={"idle_s": idle_s})[0] for idle_s in (0.2, 60.0))

    async def silent(server: RunningServer, *said: bytes) -> str:
        async with grpc.aio.insecure_channel(server.record.address) as channel:
            call = channel.stream_unary(PASS)(metadata=opening(here.model))
            if said:
                await call.done_writing()
            await call.code()
            return await call.details()

    assert "said nothing for 0.2 s" in wait_for(silent(impatient))
    assert "a pass came without a message" in wait_for(silent(server, b"nothing"))
    assert impatient.frozen._waiting == server.frozen._waiting == []


@pytest.mark.parametrize("lie", ["adapters", "shapes", "NaN"])
def test_a_server_whose_gradients_fit_nothing_is_replaced(here, folder, tiny, lie):
    liar = here.serve((0, 6), trains=True)[0]
    run, lora = liar.frozen.run, Lora(tiny.config, 2)
    ids = torch.arange(12)[None]

    def lying(layers: range, one: Pass) -> Pass:
        said = run(layers, one)
        if one.gradient is None:
            return said
        if lie == "NaN":
            return replace(said, hidden=said.hidden / 0)
        first, *others = said.adapters.items()
        where, (a, b) = first
        return replace(said, adapters=dict(others) | ({where: (a[:1], b[:, :1])} if lie == "shapes" else {}))

    with RemoteTraining(folder, [liar.record.address], lora=lora, timeouts=Timeouts(refresh_s=30.0)) as model:
        model.loss(ids, ids).backward()
        right = [one.grad.clone() for one in lora.parameters()]
        lora.zero_grad()
        liar.frozen.run = lying
        loss = model.loss(ids, ids)
        here.serve((0, 6), peers=[liar.record.address], trains=True)
        loss.backward()  # the client knows the liar alone, until it has lied
        torch.testing.assert_close([one.grad for one in lora.parameters()], right)
        ((_, said),) = model.chain.faults
        assert ("NaN or infinity" if lie == "NaN" else "gradients of other adapters") in said
