"""The engine: it answers while the model grows, and goes on whatever happens to files, links and clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from plain_tokens import Plain, check_greedy, generated, judged
from transformers import AutoModelForCausalLM

from firsttoken.link import Link, LinkConfig
from firsttoken.progressive.checkpoint.manifest import MANIFEST
from firsttoken.progressive.checkpoint.plan import coarse_first, whole
from firsttoken.progressive.loading.blobs import adapter_blobs, part_blobs
from firsttoken.progressive.loading.loader import StageLoad
from firsttoken.progressive.recovery import growth
from firsttoken.progressive.recovery.engine import Engine, EngineConfig
from firsttoken.progressive.recovery.sessions import Session, TokenEvent
from firsttoken.progressive.recovery.transitions import FromBoundary, Naive, PrefillAgain, Transition
from firsttoken.progressive.served import at_stage
from firsttoken.study.errors import BusyError, LinkError, ModelError, RequestError

PROMPT = [20, 31, 42, 53, 64]
MOVING = [PROMPT, PROMPT[:1], [7, 8, 9]]
PATIENCE = 120.0  # s; nothing here takes one of them
OURS = ("engine", "recovery", "placer", "reader-")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines, and at the end holds them to having ended: none of their threads is left.

    What was mended is found soon, though a slow machine has failed many times by then: answers are open meanwhile.
    """
    monkeypatch.setattr(growth, "LONGEST_PAUSE_S", 0.05)
    engines: list[Engine] = []

    def start(staged, link: Link | None = None, policy: Transition | None = None, **config) -> Engine:
        options = EngineConfig(**({"retry_s": 0.02} | config))
        engine = Engine(staged.folder, [link or Link()], options, upgrade_policy=policy)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive(), "close() does not end"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]


def events_of(session: Session, stage: int = 0) -> list[TokenEvent]:
    """All events, or what the session raises; one that never ends fails instead of hanging.

    With a ``stage``, until 20 tokens of it have come, when the client leaves: however long it took to arrive.
    """

    def read() -> list[TokenEvent]:
        events = []
        for event in session.events():
            events.append(event)
            if stage and sum(one.stage == stage for one in events) == 20:
                session.cancel()
        return events

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            return reading.result(PATIENCE)
        except TimeoutError:
            session.end(RuntimeError("the session never ended"))
            raise


def tokens_of(session: Session) -> list[int]:
    return [event.token_id for event in events_of(session)]


def greedy(folder: Path, prompt: list[int], count: int) -> Plain:
    """What stock transformers generates with the whole model."""
    return generated(AutoModelForCausalLM.from_pretrained(folder).eval(), prompt, count)


def check_stage(staged, stage: int, prompt: list[int], said: list[int], count: int) -> None:
    """Hold an answer of ``count`` tokens to what a stage says, by PEFT and without a cache."""
    with at_stage(staged.served, stage, staged.adapters.get(stage)) as model:
        assert check_greedy(said, judged(model, prompt, said)) == count


def bytes_until(staged, stage: int) -> int:
    """Bytes that move until ``stage`` is there."""
    folder, manifest = staged.folder, staged.manifest
    blobs = [b for k in range(1, stage + 1) for f in (part_blobs, adapter_blobs) for b in f(folder, manifest, [k])]
    return sum(blob.bytes for blob in blobs)


def part_path(staged, stage: int, index: int = -1) -> Path:
    return staged.folder / staged.manifest.stages[stage - 1].parts[index].file


class Spoilt:
    """A file with one byte changed, until it is mended."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, path.read_bytes()
        path.write_bytes(self.content[:-1] + bytes([self.content[-1] ^ 1]))

    def mend(self) -> None:
        self.path.write_bytes(self.content)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.005)


def first_event(session: Session) -> TokenEvent:
    return next(session.events())


# what is answered


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_the_whole_model_answers_as_stock_transformers_does(stage, serve, kind, tied):
    staged = stage(kind, tied, adapters=(1, 2))
    engine = serve(staged)
    assert engine.wait_stage(3, PATIENCE)
    status = engine.status()
    assert (status["stage"], status["stages"], status["state"], status["error"]) == (3, 3, "complete", None)
    assert status["bytes_loaded"] == status["bytes_total"] == bytes_until(staged, 3)
    session = engine.submit(PROMPT, 24)
    events = events_of(session)
    check_greedy([event.token_id for event in events], greedy(staged.folder, PROMPT, 24))
    assert {event.stage for event in events} == {3}
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert engine.status()["sessions"] == 0


@pytest.mark.parametrize("number", [1, 2])
def test_an_early_stage_answers_as_peft_does(stage, serve, number):
    staged = stage(adapters=(1, 2))
    spoilt = Spoilt(part_path(staged, number + 1))
    engine = serve(staged, retry_s=PATIENCE)
    assert engine.wait_stage(number, PATIENCE)
    check_stage(staged, number, PROMPT, tokens_of(engine.submit(PROMPT, 16)), 16)
    until(lambda: spoilt.path.name in (engine.status()["error"] or ""), "the failure is told")


def test_a_request_that_comes_before_the_first_byte(stage, serve):
    """It computes behind the layers as they arrive, from an embedding that is not there yet."""
    staged = stage(adapters=(1,))
    link = Link(LinkConfig(0.01))
    engine = serve(staged, link, recover=False)
    sessions = [engine.submit(PROMPT, 12), engine.submit(PROMPT[:2], 3, upgrade=True)]
    assert engine.status()["state"] == "loading" and engine.status()["stage"] == 0
    check_stage(staged, 1, PROMPT, tokens_of(sessions[0]), 12)
    check_stage(staged, 1, PROMPT[:2], tokens_of(sessions[1]), 3)
    assert engine.wait_stage(1, PATIENCE)
    assert not engine.wait_stage(2, 0.05)
    assert engine.status()["state"] == "complete", "it was asked to stay there"
    assert link.bytes_moved == bytes_until(staged, 1)


def test_stop_ids_end_an_answer_and_are_handed_over(stage, serve):
    staged = stage()
    engine = serve(staged)
    assert engine.wait_stage(3, PATIENCE)
    expected = greedy(staged.folder, PROMPT, 24).exact()
    stop = expected[5]
    assert tokens_of(engine.submit(PROMPT, 24, stop_ids=[stop, 999])) == expected[: expected.index(stop) + 1]
    assert tokens_of(engine.submit(PROMPT, 1)) == expected[:1]


def across_both(staged, serve, policy: Transition) -> tuple[Engine, list[Session], list[list[TokenEvent]]]:
    """A pinned session and three that move on, open while the wire is dead after stage 1 and stage 3 has a bad shard.

    Each fault is mended when all have seen the stage before, and they go on until the last stage has been seen.
    """
    link, spoilt = Link(fail_after_bytes=bytes_until(staged, 1)), Spoilt(part_path(staged, 3))
    engine = serve(staged, link, policy, max_new_tokens=4000)
    assert engine.wait_stage(1, PATIENCE)
    sessions = [engine.submit(PROMPT, 4000)] + [engine.submit(prompt, 4000, upgrade=True) for prompt in MOVING]
    heads = [first_event(session) for session in sessions]
    link.restore()
    assert engine.wait_stage(2, PATIENCE)
    spoilt.mend()
    assert engine.wait_stage(3, PATIENCE)
    answers = [[head, *events_of(session, 3)] for head, session in zip(heads[1:], sessions[1:], strict=True)]
    sessions[0].cancel()
    return engine, sessions, [[heads[0], *events_of(sessions[0])], *answers]


def check_moved(staged, prompt: list[int], answer: list[TokenEvent]) -> None:
    """Hold each token to the stage that said it, as if that had begun it all."""
    said = [event.token_id for event in answer]
    for number in (1, 2, 3):
        places = [i for i, event in enumerate(answer) if event.stage == number]
        with at_stage(staged.served, number, staged.adapters.get(number)) as model:
            plain = judged(model, prompt, said)
        told = Plain([said[i] for i in places], plain.logits[places])
        assert check_greedy(told.tokens, told) == len(places) > 0


@pytest.mark.parametrize("policy", [PrefillAgain(), FromBoundary()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("adapters", [(), (1, 2)], ids=["bare", "healed"])
def test_open_sessions_across_both_transitions(stage, serve, policy, adapters):
    staged = stage(adapters=adapters)
    engine, sessions, (pinned, *moving) = across_both(staged, serve, policy)
    assert {event.stage for event in pinned} == {1}
    assert {session.context.keep for session in sessions[1:]} == {2 if isinstance(policy, FromBoundary) else None}
    check_stage(staged, 1, PROMPT, [event.token_id for event in pinned], len(pinned))
    for prompt, answer in zip(MOVING, moving, strict=True):
        stages = [event.stage for event in answer]
        assert stages == sorted(stages) and set(stages) == {1, 2, 3}
        check_moved(staged, prompt, answer)
    moved = [event for event in engine.status()["events"] if "moved over" in event["what"]]
    assert sorted(event["stage"] for event in moved) == [2, 2, 2, 3, 3, 3]
    assert all(event["took_s"] > 0 for event in moved)
    assert not any("took_s" in event for event in engine.status()["events"] if event not in moved)
    assert engine.status()["state"] == "complete" and engine.status()["error"] is None
    check_greedy(tokens_of(engine.submit(PROMPT, 12)), greedy(staged.folder, PROMPT, 12))


def test_a_transition_that_is_wrong_shows_in_the_tokens(stage, serve):
    """The control of the one above."""
    staged = stage()
    _, _, (_, *moving) = across_both(staged, serve, Naive())
    for prompt, answer in zip(MOVING, moving, strict=True):
        with pytest.raises(AssertionError, match="wins by"):
            check_moved(staged, prompt, answer)


def test_the_story_of_a_start(stage, serve):
    staged = stage()
    begun = time.monotonic()
    engine = serve(staged)
    assert engine.wait_stage(3, PATIENCE)
    lasted = time.monotonic() - begun
    events = engine.status()["events"]
    told = [(event["stage"], event["what"]) for event in events]
    assert told[:3] == [(0, "started"), (1, "loading"), (1, "serving")]
    assert set(told[3:]) <= {(k, what) for k in (2, 3) for what in ("loading", "arrived", "serving")}
    assert told[-1] == (3, "serving") and (2, "arrived") in told and (3, "arrived") in told
    times = [event["at_s"] for event in events]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= lasted
    assert json.loads(json.dumps(engine.status())) == engine.status()
    assert engine.status()["bytes_loaded"] == engine.status()["bytes_total"] == staged.manifest.bytes


def test_a_plan_of_one_stage(stage, serve):
    staged = stage(plan=lambda names: whole(names, 6))
    engine = serve(staged)
    session = engine.submit(PROMPT, 10, upgrade=True)
    check_greedy(tokens_of(session), greedy(staged.folder, PROMPT, 10))
    assert engine.wait_stage(1, PATIENCE) and not engine.wait_stage(2, 0.02)
    assert (engine.status()["stages"], engine.status()["state"]) == (1, "complete")


def test_coarse_first(stage, serve):
    staged = stage(plan=lambda names: coarse_first(names, 6))
    link = Link(fail_after_bytes=bytes_until(staged, 1))
    engine = serve(staged, link, max_new_tokens=4000)
    assert engine.wait_stage(1, PATIENCE)
    pinned, moving = engine.submit(PROMPT, 4000), engine.submit(PROMPT, 4000, upgrade=True)
    assert first_event(pinned).stage == first_event(moving).stage == 1
    link.restore()
    assert engine.wait_stage(2, PATIENCE)
    assert {event.stage for event in events_of(moving, 2)} == {1, 2}
    pinned.cancel()
    assert {event.stage for event in events_of(pinned)} == {1}
    check_greedy(tokens_of(engine.submit(PROMPT, 12)), greedy(staged.folder, PROMPT, 12))


# limits


def test_what_is_asked_for_has_limits(stage):
    engine = Engine(stage().folder, [Link()], EngineConfig(max_prompt_tokens=4, max_new_tokens=9, max_sessions=2))
    for prompt, count, words in [
        ([], 3, "the prompt has 0 tokens; 1 to 4 are taken"),
        (PROMPT, 3, "the prompt has 5 tokens; 1 to 4 are taken"),
        ([1], 0, "max_tokens is 0; 1 to 9 can be asked for"),
        ([1], -1, "max_tokens is -1"),
        ([1], 10, "max_tokens is 10; 1 to 9"),
    ]:
        with pytest.raises(RequestError, match=words):
            engine.submit(prompt, count)
    sessions = [engine.submit([1, 2, 3, 4], 9), engine.submit([1], 1)]
    with pytest.raises(BusyError, match="2 requests are open, which is all that is served; try again later"):
        engine.submit([1], 1)
    engine.start()
    assert [len(tokens_of(session)) for session in sessions] == [9, 1]
    until(lambda: engine.status()["sessions"] == 0, "both places are free")
    assert len(tokens_of(engine.submit([1], 1))) == 1
    engine.close()


def test_a_cancelled_session_gives_its_place_back(stage, serve):
    engine = serve(stage(), max_sessions=1)
    session = engine.submit(PROMPT, 1000)
    assert first_event(session)
    with pytest.raises(BusyError):
        engine.submit(PROMPT, 1)
    session.cancel()
    assert len(events_of(session)) < 999, "the iterator ends early, and without an error"
    until(lambda: engine.status()["sessions"] == 0, "the place is free")
    assert len(tokens_of(engine.submit(PROMPT, 2))) == 2


def test_one_bad_request_is_its_own_affair(stage, serve):
    engine = serve(stage())
    good, bad = engine.submit(PROMPT, 30), engine.submit([10_000_000], 5)
    long = engine.submit(PROMPT * 700, 900)
    with pytest.raises(RequestError, match="token 10000000 is not in the vocabulary of 260"):
        events_of(bad)
    with pytest.raises(RequestError, match="the model's context has 4096"):
        events_of(long)
    assert len(events_of(good)) == 30
    assert engine.wait_stage(3, PATIENCE) and len(tokens_of(engine.submit(PROMPT, 3))) == 3


def test_eight_clients_at_once(stage, serve):
    staged = stage()
    engine = serve(staged, max_sessions=8)
    assert engine.wait_stage(3, PATIENCE)

    def client(number: int) -> list[list[int]]:
        return [tokens_of(engine.submit([number + 1, *PROMPT], 5 + number + again)) for again in range(2)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client, range(8)))
    for number, (once, again) in enumerate(answers):
        expected = greedy(staged.folder, [number + 1, *PROMPT], 6 + number).exact()
        assert once == expected[:-1] and again == expected
    assert engine.status()["sessions"] == 0


# faults


@pytest.mark.parametrize("fault", ["altered", "missing", "truncated"])
def test_a_bad_shard_of_stage_2(stage, serve, fault):
    staged = stage(adapters=(1, 2))
    path = part_path(staged, 2, 0)
    content = path.read_bytes()
    if fault == "altered":
        Spoilt(path)
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-20])
    engine = serve(staged)
    until(lambda: engine.status()["state"] == "degraded", "the failure is told")
    status = engine.status()
    assert status["stage"] == 1 and status["error"].startswith("stage 2: layer 02: 000-layer-02.safetensors")
    assert "\n" not in status["error"]
    until(lambda: sum("failed" in e["what"] for e in engine.status()["events"]) > 1, "it is tried again")
    check_stage(staged, 1, PROMPT, tokens_of(engine.submit(PROMPT, 8)), 8)
    path.write_bytes(content)
    assert engine.wait_stage(3, PATIENCE)
    assert engine.status()["state"] == "complete" and engine.status()["error"] is None
    check_greedy(tokens_of(engine.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


def test_a_link_that_dies_in_the_middle_of_stage_2(stage, serve):
    staged = stage(adapters=(1, 2))
    middle = (bytes_until(staged, 1) + bytes_until(staged, 2)) // 2
    link = Link(fail_after_bytes=middle)
    engine = serve(staged, link)
    until(lambda: engine.status()["state"] == "degraded", "the failure is told")
    assert engine.status()["stage"] == 1 and f"the link died after {middle} bytes" in engine.status()["error"]
    error = engine.status()["error"]
    assert error.startswith("stage 2: ") and " cannot be read: the link died" in error
    check_stage(staged, 1, PROMPT, tokens_of(engine.submit(PROMPT, 8)), 8)
    link.restore()
    assert engine.wait_stage(3, PATIENCE)
    check_greedy(tokens_of(engine.submit(PROMPT, 8)), greedy(staged.folder, PROMPT, 8))


@pytest.mark.parametrize("missing", ["shard", "manifest", "config", "adapter"])
def test_stage_1_is_not_there_yet(stage, serve, missing):
    staged = stage(adapters=(1,))
    adapter = staged.folder / staged.manifest.stages[0].adapter.folder / "adapter_model.safetensors"
    names = {"manifest": staged.folder / MANIFEST, "config": staged.folder / "config.json", "adapter": adapter}
    path = names.get(missing) or part_path(staged, 1, 3)
    away = path.with_name("away")
    path.rename(away)
    engine = serve(staged)
    session = engine.submit(PROMPT, 4)
    with pytest.raises(ModelError, match=path.name.replace(".", r"\.")):
        events_of(session)
    status = engine.status()
    assert (status["stage"], status["state"]) == (0, "degraded") and path.name in status["error"]
    away.rename(path)
    assert engine.wait_stage(1, PATIENCE)
    assert tokens_of(engine.submit(PROMPT, 4, upgrade=False))
    assert engine.wait_stage(3, PATIENCE) and engine.status()["error"] is None


def test_who_is_told_of_a_failure_finds_it_in_the_status(stage, serve, monkeypatch):
    """However long the engine takes to hear of it itself."""
    staged, wait = stage(), StageLoad.wait
    monkeypatch.setattr(StageLoad, "wait", lambda load: (time.sleep(0.3), wait(load))[1])
    Spoilt(part_path(staged, 1, 1))
    engine = serve(staged)
    with pytest.raises(ModelError, match="has a wrong sha256"):
        events_of(engine.submit(PROMPT, 4))
    assert "has a wrong sha256" in engine.status()["error"]


def test_a_link_that_is_dead_from_the_start(stage, serve):
    staged, link = stage(), Link(fail_after_bytes=0)
    engine = serve(staged, link)
    with pytest.raises(LinkError, match="the link died after 0 bytes"):
        events_of(engine.submit(PROMPT, 4))
    link.restore()
    assert engine.wait_stage(3, PATIENCE)
    check_greedy(tokens_of(engine.submit(PROMPT, 4)), greedy(staged.folder, PROMPT, 4))


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_that_nobody_thought_of(stage, serve, number, monkeypatch):
    """No error of ours when a layer is put in its place, but no reason to leave clients waiting for ever either."""
    staged, place = stage(), StageLoad._place
    broken = staged.manifest.stages[number - 1].parts[1]

    def fail(self, index, part):
        if part == broken:
            raise RuntimeError("an odd byte\nand more")
        return place(self, index, part)

    monkeypatch.setattr(StageLoad, "_place", fail)
    engine = serve(staged)
    until(lambda: engine.status()["state"] == "degraded", "the failure is told")
    assert engine.status()["stage"] == number - 1
    assert engine.status()["error"].startswith(f"stage {number}: ") and "\n" not in engine.status()["error"]
    if number == 1:
        monkeypatch.undo()
        assert engine.wait_stage(3, PATIENCE)
    assert len(tokens_of(engine.submit(PROMPT, 4))) == 4


class Failing(Naive):
    """A transition that meets what it does not expect, such as a device without memory left."""

    name = "failing"

    def carry(self, context, view) -> None:
        raise RuntimeError("out of memory")


def test_a_transition_that_fails_ends_that_session_only(stage, serve):
    staged = stage()
    link = Link(fail_after_bytes=bytes_until(staged, 1))
    engine = serve(staged, link, Failing())
    assert engine.wait_stage(1, PATIENCE)
    pinned, moving = engine.submit(PROMPT, 100), engine.submit(PROMPT, 1000, upgrade=True)
    assert first_event(moving)
    link.restore()
    with pytest.raises(RuntimeError, match="out of memory"):
        events_of(moving)
    assert len(events_of(pinned)) == 100
    assert engine.wait_stage(3, PATIENCE)
    check_greedy(tokens_of(engine.submit(PROMPT, 4)), greedy(staged.folder, PROMPT, 4))


def test_a_failure_of_stage_3_is_not_forgotten_while_stage_2_takes_over(stage, serve):
    staged = stage()
    part_path(staged, 3).unlink()
    link = Link(fail_after_bytes=bytes_until(staged, 1))
    engine = None

    class Slow(Naive):
        """Carries on when stage 3 has failed."""

        def carry(self, context, view) -> None:
            until(lambda: "stage 3" in (engine.status()["error"] or ""), "stage 3 fails")
            super().carry(context, view)

    engine = serve(staged, link, Slow(), retry_s=0.2)
    assert engine.wait_stage(1, PATIENCE)
    session = engine.submit(PROMPT, 1000, upgrade=True)
    assert first_event(session)
    engine._growth._retry_s = PATIENCE  # of stage 3: one failure, and a long time until the next
    link.restore()
    assert engine.wait_stage(2, PATIENCE)
    session.cancel()
    assert engine.status()["state"] == "degraded" and "stage 3" in engine.status()["error"]


# the end


@pytest.mark.parametrize("when", ["stage 1", "stage 2", "complete"])
def test_closing_ends_everything(stage, serve, when):
    staged = stage()
    link = Link(LinkConfig({"stage 1": 0.0015, "stage 2": 0.003, "complete": 0.0}[when]))
    engine = serve(staged, link, threads=1)
    if when != "stage 1":
        assert engine.wait_stage(1 if when == "stage 2" else 3, PATIENCE)
    sessions = [engine.submit(PROMPT, 1000), engine.submit(PROMPT, 1000, upgrade=True)]
    if when != "stage 1":
        assert first_event(sessions[0])
    else:
        until(lambda: link.bytes_moved > 0, "it reads")
    engine.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]
    for session in sessions:
        with pytest.raises(BusyError, match="the server was closed"):
            events_of(session)
    with pytest.raises(BusyError, match="the server is shutting down"):
        engine.submit(PROMPT, 1)
    moved = link.bytes_moved
    assert moved < bytes_until(staged, int(when[-1])) if when != "complete" else moved, "nothing more is waited for"
    assert not any("failed" in event["what"] for event in engine.status()["events"]), "and is no failure"
    engine.close()
    assert link.bytes_moved == moved


def test_closing_during_a_pause_between_two_tries(stage, serve):
    staged = stage()
    part_path(staged, 1).unlink()
    engine = serve(staged, retry_s=1000)
    until(lambda: engine.status()["state"] == "degraded", "the failure is told")
    waiting = engine.submit(PROMPT, 3)
    engine.close()
    with pytest.raises(BusyError, match="the server was closed"):
        events_of(waiting)


def test_closing_what_never_started(stage):
    engine = Engine(stage().folder, [Link()])
    engine.close()
    with pytest.raises(BusyError):
        engine.submit(PROMPT, 1)


def test_clients_that_come_while_it_closes_are_not_forgotten(stage, serve):
    staged = stage()
    engine = serve(staged, max_sessions=1000)
    sessions: list[Session] = []

    def client() -> None:
        try:
            while True:
                sessions.append(engine.submit(PROMPT, 1000))
        except BusyError:
            pass

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join(PATIENCE)
    for session in sessions:
        with pytest.raises(BusyError):
            events_of(session)
