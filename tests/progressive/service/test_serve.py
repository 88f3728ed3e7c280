"""The service as a user runs it: two replicas behind Ray Serve, asked over HTTP while their stages arrive.

What happens during the start is watched once, by several clients at a time, and then looked at by the tests. A stage
sets out when the clients have seen what there is to see of the one before, however slow the machine is.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import httpx
import pytest
from plain_tokens import generated
from transformers import AutoModelForCausalLM

from firsttoken.progressive.checkpoint.manifest import read_manifest
from firsttoken.progressive.loading.blobs import part_blobs
from firsttoken.progressive.passlayer import pass_layers

if importlib.util.find_spec("ray") is None:  # importorskip would import it, and that is the service's affair
    pytest.skip("ray is not installed", allow_module_level=True)

pytestmark = pytest.mark.long(seconds=60)
REPLICAS, STAGES, TOKENS = 2, 3, 60
MISSING = {1: (1, 2, 3, 4), 2: (3, 4), 3: ()}  # layers, by stage
ENDLESS = 20_000  # tokens: a minute and more
PATIENCE = 300.0
SLOW = 0.002  # Gbit/s: stage 1 takes 0.4 s, stages 2 and 3 take 0.3 s each
SERVE = """
import sys
import time
from dataclasses import asdict
from pathlib import Path
from firsttoken.progressive.service.config import ServiceConfig
from firsttoken.progressive.service.launch import serve_forever

class Gated(ServiceConfig):
    # each replica unpickles its own, and gets one whose wire waits for a file named after the stage
    def __reduce__(self):
        return gated, (asdict(self), Path(sys.argv[4]), [int(mark) for mark in sys.argv[5:]])

def gated(settings, gates, marks):
    from firsttoken.link import Link
    read = Link.read_into

    def read_into(link, *what):
        stage = sum(link.bytes_moved >= mark for mark in marks)
        while not (gates / str(stage)).exists():
            time.sleep(0.01)
        read(link, *what)

    Link.read_into = read_into
    return ServiceConfig(**settings)

serve_forever(Gated(Path(sys.argv[1]), gbit_per_s=float(sys.argv[2]), replicas=2, port=int(sys.argv[3]),
                    max_sessions=12, max_new_tokens=20_000))
"""


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
    held: list[Answer] = field(default_factory=list)  # ENDLESS, and open until every replica was complete
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


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.02)


def request(kind: str, tokens: int) -> dict:
    """The body that asks for one completion: "whole", "streamed" or "upgraded" (streamed too)."""
    return {"prompt": "the inn", "max_tokens": tokens, "stream": kind != "whole", "upgrade": kind == "upgraded"}


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
        self._tasks.append(self._pool.submit(stream, self._client, answer, ENDLESS, self._story))
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


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder; a stage sets out when a file with its number is there."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def service(tiny: Path, gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that has just come up; afterwards SIGTERM must end it without a word too many."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    manifest = read_manifest(tiny)
    sizes = [sum(blob.bytes for blob in part_blobs(tiny, manifest, [stage])) for stage in range(1, STAGES)]
    begins = map(str, accumulate(sizes, initial=0))
    command = [sys.executable, "-c", SERVE, str(tiny), str(SLOW), str(port), str(gates), *begins]
    out = tmp_path_factory.mktemp("serve") / "out.txt"
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            deadline = time.monotonic() + PATIENCE
            while True:
                assert process.poll() is None and time.monotonic() < deadline, out.read_text()
                try:
                    if "state" in client.get("/health").text:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.kill()
    first, second, *rest = out.read_text().splitlines()
    assert first == f"tiny is served at http://127.0.0.1:{port}; Ctrl-C ends it. Try:"
    assert second.startswith(f"  curl -N http://127.0.0.1:{port}/v1/completions -d '{{") and rest == ["shutting down"]


@pytest.fixture(scope="module")
def story(service: httpx.Client, gates: Path) -> Story:
    """The start of the service: every stage comes when the one before has been seen on every replica."""
    story = Story()
    replicas = {status["replica"] for status in statuses(service)}
    with ThreadPoolExecutor(64) as pool:
        clients = Clients(pool, service, story)
        try:
            clients.until(lambda: bool(story.health), "/health is asked")
            asked = clients.ask()
            clients.until(lambda: open_sessions(service) == len(asked), "all requests are open")
            for stage in (1, 2):
                (gates / str(stage)).touch()
                if stage == 2:
                    clients.until(lambda: all(story.serves(name, 2) < 1e99 for name in replicas), "stage 2 is served")
                    clients.until(lambda: all(story.goes_on(answer, 2) for answer in story.held), "all go on")
                    asked = clients.ask()
                story.answers.extend(clients.results(asked))
                for kind in ("upgraded", "streamed") if stage == 1 else ("streamed",):
                    clients.hold_everywhere(kind, stage, replicas)
            (gates / "3").touch()
            clients.until(lambda: all(story.goes_on(answer, 3) for answer in story.held), "all go on")
        finally:
            story.over.set()
            for stage in range(1, STAGES + 1):
                (gates / str(stage)).touch()
        story.answers.extend(clients.results(clients.ask()))
    until(lambda: open_sessions(service) == 0, "every place is free")
    return story


def test_health_says_no_until_stage_1_is_there(service, story):
    assert story.health[0] == (503, {"state": "loading", "stage": 0, "error": None})
    assert all(code == (200 if body["stage"] else 503) for code, body in story.health)
    assert service.get("/health").status_code == 200


def test_every_replica_goes_through_the_stages_in_order(service, story):
    for status in statuses(service):
        stages = story.polls[status["replica"]]
        assert stages == sorted(stages)  # polls may miss one, its events do not
        assert [event["stage"] for event in status["events"] if event["what"] == "serving"] == [1, 2, 3]
        assert status["state"] == "complete" and status["bytes_loaded"] == status["bytes_total"]


def test_requests_that_come_before_the_weights_are_answered(story):
    assert all(answer.tokens == TOKENS and set(answer.stages) == {1} for answer in story.answers[:4])


def test_every_answer_is_whole(story):
    assert {(answer.tokens, answer.finish_reason) for answer in story.answers} == {(TOKENS, "length")}


@pytest.mark.parametrize("stage", [2, 3])
def test_pinned_answers_outlive_a_transition_in_the_stage_they_began_in(story, stage):
    pinned = [answer for answer in story.answers + story.held if answer.kind == "streamed"]
    assert all(len(set(answer.stages)) == 1 for answer in pinned)
    outliving = [answer for answer in pinned if story.outlives(answer, stage)]
    assert {answer.stages[0] for answer in outliving} == set(range(1, stage))
    assert {answer.replica for answer in outliving} == {name for name, _ in story.since_s}


@pytest.mark.parametrize("stage", [2, 3])
def test_answers_that_asked_for_it_move_to_a_better_stage(story, stage):
    upgraded = [answer for answer in story.held if answer.kind == "upgraded"]
    assert all(answer.stages == sorted(answer.stages) for answer in upgraded)
    assert upgraded and all(answer.stages[0] < stage <= answer.stages[-1] for answer in upgraded)


def test_a_stage_has_one_answer_whole_or_streamed_from_any_replica(story):
    texts, kinds = defaultdict(set), defaultdict(set)
    for answer in story.answers:
        texts[answer.stages[-1]].add(answer.text)
        kinds[answer.stages[-1]].add(answer.kind)
    assert {stage: len(found) for stage, found in texts.items()} == {1: 1, 2: 1, 3: 1}
    assert len(set.union(*texts.values())) == 3
    assert all(found == {"whole", "streamed"} for found in kinds.values())
    for answer in story.held:
        if answer.kind == "streamed":
            text = next(iter(texts[answer.stages[0]])).rstrip("\ufffd")  # cut in the middle of a character
            assert answer.text.startswith(text) or text.startswith(answer.text)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_answers_as_stock_transformers_does(story, tiny, tokenizers, stage):
    tokenizer, model = tokenizers["byte level"], AutoModelForCausalLM.from_pretrained(tiny).eval()
    pass_layers(model, MISSING[stage])
    plain = generated(model, tokenizer.encode("the inn").ids, TOKENS, use_cache=False)
    assert {a.text for a in story.answers if a.kind == "whole" and a.stages == [stage]} == {
        tokenizer.decode(plain.exact())
    }


def test_both_replicas_answer(service, story):
    assert {a.replica for a in story.answers + story.held} == {status["replica"] for status in statuses(service)}


@pytest.mark.parametrize("kind", ["streamed", "whole"])
def test_a_client_that_goes_frees_its_place(service, story, kind):
    connection = http.client.HTTPConnection(service.base_url.host, service.base_url.port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(request(kind, ENDLESS)))
    if kind == "streamed":
        assert connection.getresponse().readline().startswith(b"data: ")
    until(lambda: open_sessions(service) == 1, "the request is open")
    connection.close()
    until(lambda: open_sessions(service) == 0, "the place is free")


@pytest.mark.parametrize(
    "content, status",
    [(b"{", 400), (b'{"prompt": "hi", "temperature": 1}', 400), (b'{"prompt": "hi", "model": "gpt"}', 404)],
)
def test_refusals_come_through_the_proxy(service, content, status):
    response = service.post("/v1/completions", content=content)
    assert response.status_code == status and response.json()["error"]["message"]


def test_a_body_too_large_is_refused(service):
    response = service.post("/v1/completions", content=b" " * 3_000_000)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_the_page_is_there(service):
    assert re.search(r"<title>firsttoken</title>", service.get("/").text)
