"""The service as a user runs it: two replicas behind Ray Serve, asked over HTTP while their stages arrive.

What happens during the start is watched once, by several clients at a time, and then looked at by the tests.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

if importlib.util.find_spec("ray") is None:  # importorskip would import it, and that is the service's affair
    pytest.skip("ray is not installed", allow_module_level=True)

REPLICAS, TOKENS = 2, 120
SLOW = 0.00022  # Gbit/s: stage 1 takes 4 s, stages 2 and 3 take 2.8 s each
SERVE = """
import sys
from pathlib import Path
from firsttoken.progressive.service.config import ServiceConfig
from firsttoken.progressive.service.launch import serve_forever
serve_forever(ServiceConfig(Path(sys.argv[1]), gbit_per_s=float(sys.argv[2]), replicas=2, port=int(sys.argv[3]),
                            max_sessions=12, max_new_tokens=20_000))
"""


@dataclass(frozen=True)
class Answer:
    """One completion as its client saw it; times are the client's ``time.monotonic``."""

    kind: str
    replica: str
    stages: tuple[int, ...]  # of each token; only the last one's where the answer came whole
    times_s: tuple[float, ...]  # when each of these was there
    text: str
    tokens: int
    finish_reason: str


@dataclass
class Story:
    """What clients saw from the first sign of life until every replica was complete."""

    health: list[tuple[int, dict]] = field(default_factory=list)
    polls: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))  # by replica
    answers: list[Answer] = field(default_factory=list)

    def lowest(self) -> int:
        """The stage that every replica has come to."""
        return min(polls[-1][1] for polls in self.polls.values()) if len(self.polls) == REPLICAS else 0

    def outlives(self, answer: Answer, stage: int) -> bool:
        """Whether the answer was still going on in an earlier stage when its replica served ``stage`` already."""
        seen = list(self.polls[answer.replica])
        for other in self.answers:
            if other.replica == answer.replica:
                seen.extend(zip(other.times_s, other.stages, strict=True))
        return answer.stages[-1] < stage and any(s >= stage and at < answer.times_s[-1] for at, s in seen)


def complete(client: httpx.Client, kind: str, tokens: int = TOKENS) -> Answer:
    """Ask for one completion: "whole", "streamed" or "upgraded" (streamed too)."""
    body = {"prompt": "the inn", "max_tokens": tokens, "stream": kind != "whole", "upgrade": kind == "upgraded"}
    if kind == "whole":
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        arrived = [(time.monotonic(), response.json())]
        count = arrived[0][1]["usage"]["completion_tokens"]
    else:
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [(time.monotonic(), line.removeprefix("data: ")) for line in response.iter_lines() if line]
        assert lines.pop()[1] == "[DONE]"
        arrived = [(at, json.loads(line)) for at, line in lines]
        count = len(arrived) - 1  # the last one brings the reason only
    choices = [chunk["choices"][0] for _, chunk in arrived]
    return Answer(
        kind,
        response.headers["x-replica"],
        tuple(chunk["stage"] for _, chunk in arrived),
        tuple(at for at, _ in arrived),
        "".join(choice["text"] for choice in choices),
        count,
        choices[-1]["finish_reason"],
    )


def statuses(client: httpx.Client) -> list[dict]:
    """What /stage says, once for each replica."""
    found: dict[str, dict] = {}
    while len(found) < REPLICAS:
        status = client.get("/stage").json()
        found[status["replica"]] = status
    return list(found.values())


def open_sessions(client: httpx.Client) -> int:
    """How many requests are open."""
    return sum(status["sessions"] for status in statuses(client))


def watch(client: httpx.Client, story: Story) -> None:
    """Poll until every replica is complete."""
    while story.lowest() < 3:
        if story.lowest() < 1:
            response = client.get("/health")
            story.health.append((response.status_code, response.json()))
        status = client.get("/stage").json()
        story.polls[status["replica"]].append((time.monotonic(), status["stage"]))
        time.sleep(0.02)


def keep_asking(client: httpx.Client, kind: str, story: Story) -> None:
    """One completion after the other, the last one when every replica is complete."""
    last = False
    while not last:
        last = story.lowest() == 3
        story.answers.append(complete(client, kind))


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that has just come up; afterwards SIGTERM must end it without a word too many."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(tiny), str(SLOW), str(port)]
    out = tmp_path_factory.mktemp("serve") / "out.txt"
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 120
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
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    first, second, *rest = out.read_text().splitlines()
    assert first == f"tiny is served at http://127.0.0.1:{port}; Ctrl-C ends it. Try:"
    assert second.startswith(f"  curl -N http://127.0.0.1:{port}/v1/completions -d '{{") and rest == ["shutting down"]


@pytest.fixture(scope="module")
def story(service: httpx.Client) -> Story:
    """The start of the service."""
    story = Story()
    kinds = ["streamed"] * 3 + ["upgraded"] * 2 + ["whole"]
    with ThreadPoolExecutor(len(kinds) + 1) as pool:
        tasks = [pool.submit(keep_asking, service, kind, story) for kind in kinds]
        tasks.append(pool.submit(watch, service, story))
        for task in tasks:
            task.result(timeout=60)
    return story


def test_health_says_no_until_stage_1_is_there(service, story):
    assert story.health[0] == (503, {"state": "loading", "stage": 0, "error": None})
    assert all(code == (200 if body["stage"] else 503) for code, body in story.health)
    assert service.get("/health").status_code == 200


def test_every_replica_goes_through_the_stages_in_order(service, story):
    for status in statuses(service):
        stages = [stage for _, stage in story.polls[status["replica"]]]
        assert stages == sorted(stages)  # polls may miss one, its events do not
        assert [event["stage"] for event in status["events"] if event["what"] == "serving"] == [1, 2, 3]
        assert status["state"] == "complete" and status["bytes_loaded"] == status["bytes_total"]


def test_a_request_that_comes_before_the_weights_is_answered(story):
    first = min(story.answers, key=lambda answer: answer.times_s[0])
    assert first.tokens == TOKENS and first.stages[0] == 1


def test_every_answer_is_whole(story):
    assert {(answer.tokens, answer.finish_reason) for answer in story.answers} == {(TOKENS, "length")}


@pytest.mark.parametrize("stage", [2, 3])
def test_pinned_answers_outlive_a_transition_in_the_stage_they_began_in(story, stage):
    pinned = [answer for answer in story.answers if answer.kind == "streamed"]
    assert all(len(set(answer.stages)) == 1 for answer in pinned)
    assert [answer for answer in pinned if story.outlives(answer, stage)]


@pytest.mark.parametrize("stage", [2, 3])
def test_answers_that_asked_for_it_move_to_a_better_stage(story, stage):
    upgraded = [answer for answer in story.answers if answer.kind == "upgraded"]
    assert all(list(answer.stages) == sorted(answer.stages) for answer in upgraded)
    assert [answer for answer in upgraded if answer.stages[0] < stage <= answer.stages[-1]]


def test_a_stage_has_one_answer_whole_or_streamed_from_any_replica(story):
    texts = defaultdict(set)
    for answer in story.answers:
        if answer.kind != "upgraded":
            texts[answer.stages[-1]].add(answer.text)
    assert {stage: len(found) for stage, found in texts.items()} == {1: 1, 2: 1, 3: 1}
    assert len(set.union(*texts.values())) == 3
    assert {answer.stages[-1] for answer in story.answers if answer.kind == "whole"} >= {1, 3}


def test_the_complete_model_answers_as_stock_transformers_does(story, tiny, tokenizers):
    tokenizer = tokenizers["byte level"]
    ids = torch.tensor([tokenizer.encode("the inn").ids])
    with torch.inference_mode():
        out = AutoModelForCausalLM.from_pretrained(tiny).eval().generate(ids, max_new_tokens=TOKENS, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :].tolist())
    assert {a.text for a in story.answers if a.kind == "whole" and a.stages == (3,)} == {expected}


def test_both_replicas_answer(story):
    assert {answer.replica for answer in story.answers} == story.polls.keys()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_place(service, story, stream):
    body = {"prompt": "the inn", "max_tokens": 20_000, "stream": stream}  # a minute and more
    if stream:
        with service.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert open_sessions(service) == 1
    else:
        with ThreadPoolExecutor(1) as pool, pytest.raises(httpx.ReadTimeout):
            gone = pool.submit(service.post, "/v1/completions", json=body, timeout=1.5)
            time.sleep(0.5)
            assert open_sessions(service) == 1
            gone.result()
    deadline = time.monotonic() + 10
    while open_sessions(service) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_sessions(service) == 0


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
