"""The service as a user runs it: two replicas behind Ray Serve, asked over HTTP while their stages arrive.

What happens during the start is watched once, by several clients at a time, and then looked at by the tests. A stage
sets out when the clients have seen what there is to see of the one before, however slow the machine is.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import httpx
import pytest
from plain_tokens import generated
from replica_clients import LONG_ANSWER, TOKENS, Clients, Story, open_sessions, request, statuses
from services import TIMEOUT_S, free_port
from transformers import AutoModelForCausalLM
from waiting import until

from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.loading.read_plan import part_blobs
from firsttoken.progressiveserve.passlayer import pass_layers

if importlib.util.find_spec("ray") is None:  # importorskip would import it, and that is the service's affair
    pytest.skip("ray is not installed", allow_module_level=True)

pytestmark = pytest.mark.long(seconds=60)
STAGES = 3
MISSING = {1: (1, 2, 3, 4), 2: (3, 4), 3: ()}  # layers, by stage
SLOW = 0.002  # Gbit/s: stage 1 takes 0.4 s, stages 2 and 3 take 0.3 s each
SERVE = """
import sys
import time
from dataclasses import asdict
from pathlib import Path
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_serve.http.launch import serve_forever

class Gated(ServiceConfig):
    # each replica unpickles its own, and gets one whose wire waits for a file named after the stage
    def __reduce__(self):
        return gated, (asdict(self), Path(sys.argv[4]), [int(mark) for mark in sys.argv[5:]])

def gated(settings, gates, marks):
    from firsttoken.engine.async_engine import AsyncEngine
    from firsttoken.link.shaped import Link
    read, step = Link.read_into, AsyncEngine._step

    def read_into(link, *what):
        stage = sum(link.bytes_moved >= mark for mark in marks)
        while not (gates / str(stage)).exists():
            time.sleep(0.01)
        read(link, *what)

    Link.read_into = read_into
    # nobody has said 20,000 tokens before the clients, which may wait for both cores, have seen all that there is
    AsyncEngine._step = lambda engine: (time.sleep(0.01), step(engine))
    return ServiceConfig(**settings)

serve_forever(Gated(Path(sys.argv[1]), gbit_per_s=float(sys.argv[2]), replicas=2, port=int(sys.argv[3]),
                    max_running=12, max_waiting=0, max_new_tokens=20_000))
"""


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder; a stage sets out when a file with its number is there."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def service(tiny: Path, gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that has just come up; afterwards SIGTERM must end it without a word too many."""
    port, manifest = free_port(), read_manifest(tiny)
    sizes = [sum(blob.bytes for blob in part_blobs(tiny, manifest, [stage])) for stage in range(1, STAGES)]
    begins = map(str, accumulate(sizes, initial=0))
    command = [sys.executable, "-c", SERVE, str(tiny), str(SLOW), str(port), str(gates), *begins]
    out = tmp_path_factory.mktemp("serve") / "out.txt"
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            deadline = time.monotonic() + TIMEOUT_S
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
        assert process.wait(timeout=TIMEOUT_S) == 0
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
    code, body = story.health[0]
    assert code == 503 and body.pop("state") in ("starting", "loading") and body == {"stage": 0, "error": None}
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
    connection = http.client.HTTPConnection(service.base_url.host, service.base_url.port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(request(kind, LONG_ANSWER)))
    if kind == "streamed":
        assert connection.getresponse().readline().startswith(b"data: ")
    until(lambda: open_sessions(service) == 1, "the request is open")
    connection.close()
    until(lambda: open_sessions(service) == 0, "the place is free")


def test_a_refusal_comes_through_the_proxy(service):
    response = service.post("/v1/completions", content=b" " * 3_000_000)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
