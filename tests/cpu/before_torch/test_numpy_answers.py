"""Requests that are answered by numpy until there is an engine: in turn, in pieces, and handed over in any state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from small_models import small_model

from firsttoken.assets.servable import check_servable
from firsttoken.engine.async_engine import AsyncEngine, Stream
from firsttoken.engine.engine import Engine
from firsttoken.engine.model_server import EngineServer
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Sampling
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.study.errors import EngineError, NotLean, RequestError
from firsttoken_cpu.before_torch import numpy_answers
from firsttoken_cpu.before_torch.numpy_answers import NumpyAnswers
from firsttoken_cpu.before_torch.numpy_model import CacheSource, NumpyModel
from firsttoken_cpu.before_torch.numpy_weights import FolderWeights
from firsttoken_cpu.before_torch.torch_behind import take_over
from firsttoken_cpu.native.library import kernels

PROMPT, ANSWER = list(range(3, 32)), 24
DRAWN = [
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "top_p": 0.9, "seed": -7},
    {"temperature": 1.0, "top_p": 0.95, "seed": 2**64 - 1, "drawn": 3},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.9, "drawn": 3},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((5, 1.5),), "min_tokens": 9, "stop": (5, 8)},
]


class Served(EngineServer):
    """A server before its engine is there, and its answers."""

    def __init__(self, coming: Future[NumpyModel]) -> None:
        super().__init__(RequestLimits(max_prompt_tokens=100, max_new_tokens=100))
        self.answers = NumpyAnswers(coming, self._change, self._open)

    def ask(self, prompt: list[int] = PROMPT, **sampling: object) -> Stream:
        return self.submit(prompt, Sampling(**({"max_tokens": ANSWER} | sampling)))

    @property
    def open(self) -> int:
        return len(self._open)

    @contextmanager
    def engine(self) -> Iterator[AsyncEngine]:
        """An engine over the same weights, which goes on with who is open."""
        model = self.answers.model
        with AsyncEngine(Engine(take_over(model, 64, 64))) as engine:
            with self._change:
                self._server = engine
                for stream, asked in self._open.items():
                    engine.add(stream, *asked)
            yield engine


@pytest.fixture
def model(tmp_path: Path) -> NumpyModel:
    if kernels() is None:
        pytest.skip("there is no C++ compiler")
    small_model("Llama").save_pretrained(tmp_path)
    return NumpyModel(FolderWeights(check_servable(tmp_path), 1), threads=1)


@pytest.fixture
def served(model: NumpyModel) -> Iterator[Served]:
    coming: Future[NumpyModel] = Future()
    coming.set_result(model)
    served = Served(coming)
    yield served
    for thread in (thread for thread in threading.enumerate() if thread.name.endswith("(begin)")):
        thread.join()  # else it would leave to others how often threads take turns
    served.answers.end()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[threading.Event, threading.Event]]:
    """Let the model wait before its call of that number (from 0 on): when it does, and until when."""
    right, calls = NumpyModel.logits, []

    def hold(number: int) -> tuple[threading.Event, threading.Event]:
        there, go = threading.Event(), threading.Event()

        def slowly(self: NumpyModel, tokens: list[int]) -> np.ndarray:
            calls.append(len(tokens))
            if len(calls) > number:
                there.set()
                assert go.wait(60)
            return right(self, tokens)

        monkeypatch.setattr(NumpyModel, "logits", slowly)
        return there, go

    return hold


def alone(model: NumpyModel, prompt: list[int], count: int = ANSWER) -> list[int]:
    model.cached = 0
    said = [model.next_token(prompt)]
    while len(said) < count:
        said.append(model.next_token(said[-1:]))
    return said


def by_the_engine(model: NumpyModel, prompt: list[int], **sampling: object) -> list[int]:
    """What an engine that computes everything says."""
    engine = Engine(take_over(model, 64))
    request = engine.submit(prompt, Sampling(ANSWER, **sampling))
    engine.run()
    return request.output


def ended_during(served: Served, there: threading.Event, go: threading.Event) -> None:
    """The answers are ended while the model computes."""
    assert there.wait(60)
    ending = threading.Thread(target=served.answers.end)
    ending.start()
    while not served.answers._ended:
        time.sleep(0.001)
    go.set()
    ending.join()


def test_who_is_open_is_answered_in_turn(served, model) -> None:
    wanted = [alone(model, PROMPT[at:]) for at in range(3)]
    streams = [served.ask(PROMPT[at:]) for at in range(2)]
    served.answers.begin()
    streams.append(served.ask(PROMPT[2:]))
    assert [list(stream) for stream in streams] == wanted
    stop = wanted[0][3]
    assert list(served.ask(stop=(stop,))) == wanted[0][: wanted[0].index(stop) + 1]
    assert served.open == 0


@pytest.mark.parametrize("sampling", [{}, *DRAWN])
@pytest.mark.parametrize("calls", [0, 1, 5, 20])
def test_the_engine_goes_on(served, model, held, calls, sampling) -> None:
    """Before the first token of a prompt, and behind any other, also where others were drawn before; others begin with
    the engine."""
    wanted, other = by_the_engine(model, PROMPT, **sampling), by_the_engine(model, PROMPT[3:], **sampling)
    there, go = held(calls)
    stream, after = served.ask(**sampling), served.ask(PROMPT[3:], **sampling)
    threading.Thread(target=served.answers.begin).start()
    ended_during(served, there, go)
    assert served.open == 2
    with served.engine():
        assert list(stream) == wanted and list(after) == other
    assert stream.request.prompt_tokens == len(PROMPT) + calls + 1 and stream.request.fell_back == ""
    assert stream.request.sampling.drawn == sampling.get("drawn", 0) + calls + 1
    assert served.open == 0


def test_a_client_that_leaves_makes_room(served, model, held) -> None:
    wanted = alone(model, PROMPT[1:])
    there, go = held(4)
    stream, after = served.ask(), served.ask(PROMPT[1:])
    threading.Thread(target=served.answers.begin).start()
    assert there.wait(60)
    stream.cancel()
    go.set()
    assert list(after) == wanted and len(list(stream)) == 4


def test_draws_are_those_of_the_engine(served, model) -> None:
    """Beside greedy answers, by seed, and up to a stop."""
    wanted = [by_the_engine(model, PROMPT, **sampling) for sampling in DRAWN]
    greedy = alone(model, PROMPT)
    assert len({tuple(one) for one in (*wanted, greedy)}) == 6
    served.answers.begin()
    streams = [served.ask(**sampling) for sampling in (*DRAWN, {}, *DRAWN)]
    assert [list(stream) for stream in streams] == [*wanted, greedy, *wanted]
    assert list(served.ask(**DRAWN[0] | {"seed": 6})) != wanted[0]
    stop = wanted[1][7]
    assert list(served.ask(stop=(stop,), **DRAWN[1])) == wanted[1][: wanted[1].index(stop) + 1]


@pytest.mark.parametrize("calls", [2, 4, 9])
def test_pieces_of_a_prompt_draw_nothing(served, model, held, monkeypatch, calls) -> None:
    """The engine comes in the middle of a prompt, behind its last piece, and in the answer."""
    monkeypatch.setattr(numpy_answers, "PIECE", 7)
    wanted = by_the_engine(model, PROMPT, **DRAWN[0])
    there, go = held(calls)
    stream = served.ask(**DRAWN[0])
    threading.Thread(target=served.answers.begin).start()
    ended_during(served, there, go)
    assert model.cached == min(7 * (calls + 1), len(PROMPT)) + max(0, calls - 4)
    with served.engine():
        assert list(stream) == wanted


@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"prompt_logprobs": True}, DRAWN[0] | {"logprobs": 2}])
def test_what_is_scored_waits(served, model, sampling) -> None:
    wanted = alone(model, PROMPT)
    served.answers.begin()
    waits = served.ask(**sampling)
    assert list(served.ask()) == wanted and served.open == 1
    served.answers.end()
    with served.engine():
        assert len(list(waits)) == ANSWER


def test_a_request_that_fails_is_the_only_one(served, model) -> None:
    wanted = alone(model, PROMPT)
    served.answers.begin()
    wrong = served.ask([1, 97])
    with pytest.raises(RequestError, match="holds no token id"):
        list(wrong)
    assert list(served.ask()) == wanted


def test_an_error_that_nobody_foresaw(served, model, monkeypatch) -> None:
    def broken(self: NumpyModel, tokens: list[int]) -> np.ndarray:
        raise MemoryError("no room")

    monkeypatch.setattr(NumpyModel, "logits", broken)
    served.answers.begin()
    with pytest.raises(EngineError, match="the engine failed: no room"):
        list(served.ask())


def test_a_model_that_does_not_come(monkeypatch) -> None:
    monkeypatch.setattr(numpy_answers, "PATIENCE_S", 60.0)  # a busy machine takes a second to import numpy.random
    coming: Future[NumpyModel] = Future()
    coming.set_exception(NotLean("its head_dim is 24"))
    served = Served(coming)
    begun = time.monotonic()
    served.answers.begin()
    assert time.monotonic() - begun < numpy_answers.PATIENCE_S
    served.ask()
    assert served.answers.model is None and served.open == 1
    served.answers.end()
    assert served.open == 1


@pytest.mark.parametrize("patient", [True, False])
def test_torch_waits_for_a_first_token_and_not_for_long(served, held, monkeypatch, patient) -> None:
    there, go = held(0)
    served.ask()
    begun = time.monotonic()
    if patient:
        monkeypatch.setattr(numpy_answers, "PATIENCE_S", 30.0)
        threading.Timer(0.3, go.set).start()
        served.answers.begin()
        assert there.is_set() and go.is_set() and time.monotonic() - begun < 30
    else:
        monkeypatch.setattr(numpy_answers, "PATIENCE_S", 0.3)
        served.answers.begin()
        assert not go.is_set() and time.monotonic() - begun >= 0.3
        assert there.wait(60)
        go.set()


def test_what_began_before_the_engine_goes_on_with_the_version_that_took_it_over(model: NumpyModel) -> None:
    """Also where a better version is there before it is accepted: its keys and values are of the first."""
    token = model.next_token(PROMPT)
    executor = take_over(model, 64)
    executor.version.stage = 1
    better = ModelVersion(executor.version.decoder, stage=2)
    with AsyncEngine(Engine(executor)) as engine:
        engine.call(lambda: setattr(executor, "version", better))
        kept, fresh, moving = (Stream(engine.leave) for _ in range(3))
        engine.add(kept, [*PROMPT, token], Sampling(4), False, "", CacheSource(model))
        engine.add(fresh, PROMPT, Sampling(4), False)
        engine.add(moving, [*PROMPT, token], Sampling(4), True, "", CacheSource(model))
        stages = [{event.stage for event in stream.events()} for stream in (kept, fresh, moving)]
    assert stages == [{1}, {2}, {1}]
