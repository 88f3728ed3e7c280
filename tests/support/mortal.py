"""A swarm in this process whose servers die, hang, lose their sessions and come back, and who asks it.

Each server holds a part of a tiny model, and nobody else does unless spares are asked for. A server that is killed says
nothing to anybody; one that comes back does so on the same port, under the same key or a new one.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from plain_tokens import TOLERANCE, Plain, check_greedy, generated
from services import COMPLETIONS, tiny_model, write_endless
from starlette.testclient import TestClient
from swarms import lose

from firsttoken.engine.request import Sampling
from firsttoken.petals import server as server_module
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.server import RunningServer, ServerConfig, serving
from firsttoken.petals.session import ServerLimits
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import SwarmError
from firsttoken_serve.http.app import build_replica
from firsttoken_serve.service_config import ServiceConfig

DEPTH, ANSWER = 6, 4
SHORT = Timeouts(
    step_s=0.5, token_s=0.001, ban_s=0.5, refresh_s=0.2, answer_s=5.0, find_s=0.4, late_s=5.0
)  # a server is missed for longer than this within a second; on a busy machine healthy ones are, too


EVENTS = {"kill": 4, "leave": 1, "hang": 2, "lose": 2, "back": 5, "back new": 3, "heal": 4}
_STUCK_S = 60.0


class Killed(Exception):
    """A server ends with this, and has no time to say goodbye."""


class Mortal:
    """The server of ``span`` of the model in ``folder``, which begins with ``peers`` (addresses, which may grow)."""

    def __init__(self, folder: Path, model: str, span: tuple[int, int], peers: list[str]) -> None:
        self.span, self._model, self._peers = span, model, peers
        self._key = folder.parent / f"key-{id(self)}"
        self._config = ServerConfig(folder, range(*span), torch.float32, limits=ServerLimits(expiry_s=10.0))
        self._port, self._awake = 0, asyncio.Event()
        self.up: RunningServer | None = None
        self.start(same_key=True)
        self.address = self.up.record.address
        peers.append(self.address)

    def start(self, *, same_key: bool) -> None:
        """Come back; does nothing for one that is up."""
        if self.up is None:
            wait_for(self._start(self._key if same_key else None))

    def kill(self) -> None:
        """End without a word."""
        self._end(Killed())

    def leave(self) -> None:
        """End, and tell the others."""
        self._end(None)

    def hang(self) -> None:
        """Steps are taken, and not answered any more."""
        self._awake.clear()

    def heal(self) -> None:
        """Steps are answered again."""
        wait_for(self._wake())

    def lose(self) -> None:
        """Sessions end, as those of clients that were idle for too long; the server goes on."""
        if self.up is not None:
            wait_for(self._lose())

    async def _start(self, key: Path | None) -> None:
        config = self._config
        self._awake, self._stack = asyncio.Event(), AsyncExitStack()
        self._awake.set()
        peers = tuple(peer for peer in self._peers if not peer.endswith(f":{self._port}"))
        config = ServerConfig(**vars(config) | {"port": self._port, "peers": peers, "key": key})
        self.up = await self._stack.enter_async_context(serving(config, self._model))
        self._port = self.up.port
        batcher = self.up.sessions.batcher
        run = batcher.run

        async def when_awake(*step: object) -> torch.Tensor:
            await self._awake.wait()
            return await run(*step)

        batcher.run = when_awake

    async def _wake(self) -> None:
        self._awake.set()

    async def _lose(self) -> None:
        await lose(self.up)
        await asyncio.sleep(0.01)

    def _end(self, error: Exception | None) -> None:
        async def end() -> None:
            with suppress(Killed):
                await self._stack.__aexit__(type(error) if error else None, error, None)

        if self.up is not None:
            self.up = None
            wait_for(end())


@dataclass(frozen=True)
class Known:
    """A prompt, what the local model says to it, and the text of that."""

    prompt: list[int]
    plain: Plain
    text: str


class MortalSwarm:
    """Servers of each of ``spans`` of the model in ``folder``, and what asks them: ``model`` from Python, and a service
    over HTTP."""

    def __init__(self, folder: Path, spans: Sequence[tuple[int, int]], timeouts: Timeouts = SHORT) -> None:
        sha256, self.peers = model_sha256(folder), []
        self.places = [Mortal(folder, sha256, span, self.peers) for span in spans]
        self.model = RemoteModel(folder, self.peers, timeouts=timeouts)
        app = build_replica(ServiceConfig(folder, swarm=tuple(self.peers)), "mortal")
        self._client = TestClient(app, base_url="http://127.0.0.1")
        self.http = self._client.__enter__()
        app.state.begin()

    def by_python(self, known: Known, between: Callable[[], None] = lambda: None, cancel_after: int = 99) -> str:
        """Ask from Python, call ``between`` two steps: "right", "wrong", "cancelled", or "error" for a SwarmError."""
        engine = self.model.engine
        request = engine.submit(known.prompt, Sampling(ANSWER))
        try:
            while not request.finished:
                if len(request.output) >= cancel_after:
                    return "cancelled"
                engine.step()
                between()
        except SwarmError:
            return "error"
        finally:
            engine.cancel(request)
        try:
            return "right" if check_greedy(request.output, known.plain) == ANSWER else "wrong"
        except AssertionError:
            return "wrong"

    def by_http(self, known: Known) -> str:
        """Ask over HTTP: "right", "wrong", or "error" for an answer of 500 and more."""
        asked = {"prompt": known.prompt, "max_tokens": ANSWER, "temperature": 0}
        said = self.http.post(COMPLETIONS, json=asked)
        if said.status_code >= 500:
            return "error"
        return "right" if said.status_code == 200 and said.json()["choices"][0]["text"] == known.text else "wrong"

    def heal(self) -> None:
        """All servers are up and answer."""
        for place in self.places:
            place.start(same_key=True)
            place.heal()

    def close(self) -> None:
        """End all."""
        self._client.__exit__(None, None, None)
        self.model.close()
        for place in self.places:
            place.heal()
            place.kill()


class Schedules:
    """Random schedules on ``swarm``, which is asked the ``known``."""

    def __init__(self, swarm: MortalSwarm, known: Sequence[Known], draw: random.Random) -> None:
        self.swarm, self.known, self.draw = swarm, known, draw

    def run(self, schedules: int) -> Counter[str]:
        """How all of their answers were."""
        counts: Counter[str] = Counter()
        for _ in range(schedules):
            for _ in range(self.draw.randint(2, 4)):
                if self.draw.random() < 0.7:
                    self.befall()
                counts[self.ask()] += 1
            self.swarm.heal()
            if self.draw.random() < 0.25:  # else the next one begins with what this one has left
                counts["stuck"] += not self.recovers(counts)
            counts["schedules"] += 1
        counts["stuck"] += not self.recovers(counts)
        return counts

    def befall(self) -> None:
        """Something happens to one of the servers."""
        place = self.draw.choice(self.swarm.places)
        event = self.draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        if event.startswith("back"):
            place.start(same_key=event == "back")
        else:
            getattr(place, event)()

    def ask(self) -> str:
        """One request, in whose course something may happen."""
        one = self.draw.choice(self.known)
        if self.draw.random() < 0.4:
            if self.draw.random() < 0.3:
                happens = threading.Timer(self.draw.uniform(0, 0.03), self.befall)
                happens.start()
                said = self.swarm.by_http(one)
                happens.join()
                return said
            return self.swarm.by_http(one)
        cancel_after = self.draw.choice([99, 99, 99, 99, 0, 2])
        return self.swarm.by_python(one, lambda: self.befall() if self.draw.random() < 0.15 else None, cancel_after)

    def recovers(self, counts: Counter[str]) -> bool:
        """Whether both ways of asking are answered rightly again, and nothing else but errors is said until then."""
        deadline = time.monotonic() + _STUCK_S
        for ask in (self.swarm.by_python, self.swarm.by_http):
            while (said := ask(self.known[0])) != "right":
                counts[said] += 1
                if time.monotonic() > deadline:
                    return False
            counts[said] += 1
        return True


def write_known(folder: Path, count: int, lengths: Sequence[int] = (3, 9, 21, 40)) -> list[Known]:
    """Write the tiny model into ``folder``; ``count`` prompts, none of whose answers hangs on a near tie."""
    write_endless(folder)
    model, draw, found = tiny_model(), torch.Generator().manual_seed(7), []
    local = build_replica(ServiceConfig(folder), "local")
    with TestClient(local, base_url="http://127.0.0.1") as client:
        local.state.begin()
        while len(found) < count:
            prompt = torch.randint(1, 250, (lengths[len(found) % len(lengths)],), generator=draw).tolist()
            plain = generated(model, prompt, ANSWER)
            if plain.margin > TOLERANCE:
                asked = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
                said = client.post(COMPLETIONS, json=asked)
                found.append(Known(prompt, plain, said.json()["choices"][0]["text"]))
    return found


@contextmanager
def impatient() -> Iterator[None]:
    """A service over a swarm has the patience of ``SHORT``, and servers that end do not wait for their clients."""
    from firsttoken_serve.swarm import over_swarm

    kept = over_swarm.Timeouts, server_module._GRACE_S
    fields = {name: value for name, value in vars(SHORT).items() if name != "step_s"}
    over_swarm.Timeouts = lambda step_s: Timeouts(step_s=SHORT.step_s, **fields)
    server_module._GRACE_S = 0.0
    try:
        yield
    finally:
        over_swarm.Timeouts, server_module._GRACE_S = kept
