"""OpenAI's interface over a swarm, on real sockets: streams go on when a server of the chain is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import httpx
import pytest
from services import free_port, write_plain
from swarms import Here
from waiting import until

from firsttoken.__main__ import main
from firsttoken.petals.checkpoint_blocks import write_8_bits
from firsttoken.study import dtypes
from firsttoken.study.errors import StageError, SwarmError
from firsttoken_serve.http.launch import running
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_studies.nb54_validation_and_privacy.swarm_validation import ByzantineBackend
from firsttoken_studies.petals.fleet import Fleet

SPANS = ("0:3", "3:6")
ASKED = {"prompt": "the inn in the north", "max_tokens": 160, "temperature": 0.8, "seed": 5, "logprobs": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service") / "plain"
    write_plain(folder)
    return folder


@pytest.fixture(scope="module")
def fleet(plain, imported) -> Iterator[Fleet]:
    fleet = Fleet(plain, SPANS)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def url(plain, fleet) -> Iterator[str]:
    """All computes in float32, as the servers do: in bfloat16 a near tie made an answer another one now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtypes, "cpu_rates", lambda: dtypes.ProductRates(False, 1.0, 0.5))
        with running(ServiceConfig(plain, port=free_port(), swarm=(fleet.door,))) as url:
            yield url


def streamed(url: str, asked: dict, after: int = 0, what=lambda: None) -> list[dict]:
    """The chunks of a stream; ``what`` is called when so many have come."""
    chunks = []
    with httpx.stream("POST", f"{url}/v1/completions", json=asked | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
                if len(chunks) == after:
                    what()
    return chunks


def text_of(chunks: list[dict]) -> str:
    return "".join(one["choices"][0]["text"] for one in chunks)


def test_an_answer_goes_on_when_a_server_is_killed(url, fleet):
    whole = httpx.post(f"{url}/v1/completions", json=ASKED).json()["choices"][0]
    servers = httpx.get(f"{url}/stage").json()["servers"]
    assert [one["blocks"] for one in servers] == [[0, 3], [3, 6]]
    assert {one["address"] for one in servers} <= set(fleet.members)

    def kill() -> None:
        fleet.members[servers[1]["address"]].kill()

    chunks = streamed(url, ASKED, 12, kill)
    assert text_of(chunks) == whole["text"] and chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert {one["stage"] for one in chunks} == {1}
    status = httpx.get(f"{url}/stage").json()
    assert status["servers"][1]["address"] != servers[1]["address"] and status["servers"][0] == servers[0]
    assert [one["what"].split(":")[0] for one in status["events"]] == [f"replaced {servers[1]['key']}"]
    assert [one["blocks"] for one in status["servers"]] == [[0, 3], [3, 6]]


def test_several_answers_share_the_steps(url):
    """Two prompts, chosen three times each; what each says is what it says alone."""
    both = httpx.post(f"{url}/v1/completions", json=ASKED | {"prompt": ["the inn", "a hat"], "n": 3}).json()
    assert len(both["choices"]) == 6 and len({one["text"] for one in both["choices"]}) > 2
    alone = httpx.post(f"{url}/v1/completions", json=ASKED | {"prompt": "the inn", "n": 3}).json()
    assert [one["text"] for one in alone["choices"]] == [one["text"] for one in both["choices"][:3]]
    page = httpx.get(url).text
    assert "servers of the swarm that answer" in page
    until(lambda: httpx.get(f"{url}/stage").json()["sessions"] == 0, "all sessions have ended")


def test_a_swarm_that_cannot_serve_is_said_in_one_line(plain, here, capsys, tmp_path):
    door = here.serve((0, 3), model=here.model)[0].record.address
    nobody = f"127.0.0.1:{free_port()}"
    assert main(["serve", str(plain), "--swarm", nobody, "--port", str(free_port())]) == 2
    assert f"no server of a swarm answers at {nobody}: name HOST:PORT" in capsys.readouterr().err
    with (
        pytest.raises(SwarmError, match="no server that answers has blocks 0 to 5"),
        running(ServiceConfig(plain, port=free_port(), swarm=(door,))),
    ):
        pass
    for wrong in ({"preemption": "swap"}, {"prefix_store": tmp_path}, {"share_prefixes": True}):
        with pytest.raises(StageError, match="--swarm does not go with --"):
            ServiceConfig(plain, swarm=(door,), **wrong)


def test_a_service_over_servers_of_8_bits(plain, imported, tmp_path):
    """Its folder has the blocks in 8 bits as well, and it loads none of them."""
    write_8_bits(plain, tmp_path / "small")
    with closing(Here(tmp_path / "small")) as here:
        (up,) = here.serve((0, 6))
        with running(ServiceConfig(here.folder, port=free_port(), swarm=(up.record.address,))) as url:
            said = httpx.post(f"{url}/v1/completions", json=ASKED | {"max_tokens": 8}).json()
            assert said["usage"]["completion_tokens"] == 8 or said["choices"][0]["finish_reason"] == "stop"
            assert httpx.get(f"{url}/stage").json()["servers"][0]["address"] == up.record.address


def test_the_service_audits_as_the_client_does(plain):
    """A liar alone has all blocks: it is convicted before anything that it said is answered."""
    with closing(Here(plain)) as here:
        halves = here.serve((0, 3), (3, 6))
        door = halves[0].record.address
        (liar,) = here.serve((0, 6), peers=[door], make_backend=partial(ByzantineBackend, lie="noise", seed=1))
        until(lambda: len(halves[0].registry.live(time.time())) == 3, "all are known")
        honest = {up.record.server for up in halves}
        with running(ServiceConfig(plain, port=free_port(), swarm=(door,), swarm_audit_rate=1.0)) as url:
            asked = ASKED | {"max_tokens": 8}
            assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 200
            told = httpx.get(f"{url}/stage").json()
            assert {one["key"] for one in told["servers"]} == {key[:8] for key in honest}
            (event,) = told["events"]
            assert event["what"].startswith(f"replaced {liar.record.server[:8]}: ")
