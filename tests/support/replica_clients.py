"""Clients of a service of several replicas that starts, and what they saw of it."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
from waiting import until

REPLICAS, TOKENS = 2, 60
LONG_ANSWER = 20_000  # tokens: three minutes and more, of a service whose steps take 0.01 s


@dataclass(eq=False)
class Answer:
    """One completion as its client sees it, growing as it comes; times are the client's ``time.monotonic``."""

    kind: str
    replica: str = ""
    stages: list[int] = field(default_factory=list)  # of each token; only the last one's where the answer came whole
    times_s: list[float] = field(default_factory=list)  # when each of these was there
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None  # none where its client left

    def take(self, body: str) -> dict:
        """Add a chunk, or a whole answer."""
        content = json.loads(body)
        self.stages.append(content["stage"])
        self.text += content["choices"][0]["text"]
        self.finish_reason = content["choices"][0]["finish_reason"]
        self.tokens += self.finish_reason is None  # the last chunk brings the reason only
        self.times_s.append(time.monotonic())
        return content


@dataclass
class Story:
    """What clients saw from the first sign of life until every replica was complete."""

    health: list[tuple[int, dict]] = field(default_factory=list)
    polls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # stages by replica
    since_s: dict[tuple[str, int], float] = field(default_factory=dict)  # when a replica was first seen in a stage
    answers: list[Answer] = field(default_factory=list)  # of TOKENS; the first were asked for before the first byte
    held: list[Answer] = field(default_factory=list)  # LONG_ANSWER, and open until every replica was complete
    over: threading.Event = field(default_factory=threading.Event)

    def note(self, replica: str, stage: int) -> None:
        """The replica serves ``stage`` now."""
        self.since_s.setdefault((replica, stage), time.monotonic())

    def serves(self, replica: str, stage: int) -> float:
        """When the replica was known to serve ``stage`` or a later one."""
        return min((at for (name, s), at in list(self.since_s.items()) if name == replica and s >= stage), default=1e99)

    def outlives(self, answer: Answer, stage: int) -> bool:
        """Whether the answer was still going on in an earlier stage when its replica served ``stage`` already."""
        if not answer.times_s:
            return False
        return answer.stages[-1] < stage and self.serves(answer.replica, stage) < answer.times_s[-1]

    def goes_on(self, answer: Answer, stage: int) -> bool:
        """Whether a held answer has a token of the time in which its replica serves ``stage``."""
        return answer.stages[-1:] == [stage] or (answer.kind == "streamed" and self.outlives(answer, stage))


def request(kind: str, tokens: int) -> dict:
    """The body that asks for one completion: "whole", "streamed" or "upgraded" (streamed too)."""
    asked = {"prompt": "the inn", "max_tokens": tokens, "temperature": 0}
    return asked | {"stream": kind != "whole", "upgrade": kind == "upgraded"}


def complete(client: httpx.Client, kind: str) -> Answer:
    """One completion, to its end."""
    answer = Answer(kind)
    if kind != "whole":
        return stream(client, answer, TOKENS)
    response = client.post("/v1/completions", json=request(kind, TOKENS))
    assert response.status_code == 200, response.text
    answer.tokens = answer.take(response.text)["usage"]["completion_tokens"]
    answer.replica = response.headers["x-replica"]
    return answer


def stream(client: httpx.Client, answer: Answer, tokens: int, story: Story | None = None) -> Answer:
    """One streamed completion, to its end; of a ``story``, until that is over, when its client leaves."""
    with client.stream("POST", "/v1/completions", json=request(answer.kind, tokens)) as response:
        assert response.status_code == 200, response.read()
        answer.replica = response.headers["x-replica"]
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for line in lines:
            if line == "[DONE]":
                assert not story and next(lines, None) is None
                return answer
            stage = answer.take(line)["stage"]
            if story:
                if answer.kind == "upgraded":
                    story.note(answer.replica, stage)
                if story.over.is_set():
                    return answer
    raise AssertionError("the stream broke off")


def statuses(client: httpx.Client) -> list[dict]:
    """What /stage says, once for each replica; several ask at once, as Serve sends one alone to the less busy."""
    found: dict[str, dict] = {}
    with ThreadPoolExecutor(8) as pool:
        while len(found) < REPLICAS:
            for response in pool.map(client.get, ["/stage"] * 8):
                found[response.json()["replica"]] = response.json()
    return list(found.values())


def open_sessions(client: httpx.Client) -> int:
    """How many requests are open."""
    return sum(status["sessions"] for status in statuses(client))


def watch(client: httpx.Client, story: Story) -> None:
    """Poll until the story is over."""
    while not story.over.is_set():
        if not any(stage for _, stage in list(story.since_s)):
            response = client.get("/health")
            story.health.append((response.status_code, response.json()))
        status = client.get("/stage").json()
        story.polls[status["replica"]].append(status["stage"])
        story.note(status["replica"], status["stage"])
        time.sleep(0.05)


class Clients:
    """Those that the story is about; what one of them meets, the story raises."""

    def __init__(self, pool: ThreadPoolExecutor, client: httpx.Client, story: Story) -> None:
        self._pool, self._client, self._story = pool, client, story
        self._tasks: list[Future] = [pool.submit(watch, client, story)]

    def hold(self, kind: str) -> Answer:
        """One more completion that goes on until the story is over."""
        answer = Answer(kind)
        self._story.held.append(answer)
        self._tasks.append(self._pool.submit(stream, self._client, answer, LONG_ANSWER, self._story))
        return answer

    def hold_everywhere(self, kind: str, stage: int, replicas: set[str]) -> None:
        """At least one in ``stage`` on each replica; the service chooses which replica the next one is for."""
        while not replicas <= {a.replica for a in self._story.held if a.kind == kind and stage in a.stages[:1]}:
            answer = self.hold(kind)
            self.until(lambda one=answer: bool(one.stages), f"an answer in stage {stage}")

    def ask(self) -> list[Future]:
        """Some completions that end."""
        tasks = [self._pool.submit(complete, self._client, kind) for kind in ("whole", "streamed") * 2]
        self._tasks.extend(tasks)
        return tasks

    def results(self, tasks: list[Future]) -> list[Answer]:
        """Their answers."""
        self.until(lambda: all(task.done() for task in tasks), "the answers are whole")
        return [task.result() for task in tasks]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for ``condition``."""

        def met() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return condition()

        until(met, what)
