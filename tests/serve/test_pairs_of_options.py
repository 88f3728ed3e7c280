"""Every pair of options of ``serve``, tried: it answers as either alone would, or is refused in one line that says why.

``REFUSED`` of the service's configuration is the table. What is not in it is served here, in threes, with a real model,
real sockets, and for replicas a real Ray.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from services import TIMEOUT_S, free_port, said, tiny_model, write_endless, write_staged_endless
from waiting import until

from firsttoken.__main__ import main
from firsttoken.study import paths
from firsttoken.study.errors import StageError
from firsttoken.study.machine import identity
from firsttoken_serve.http.launch import running
from firsttoken_serve.service_config import REFUSED, STAGES, WHOLE, ServiceConfig

pytest.importorskip("starlette")
pytest.importorskip("peft")
pytest.importorskip("grpc")
pytestmark = pytest.mark.long(seconds=240)

TEXT = "the inn in the hat is a long way from here, and "
PROMPTS = [TEXT + end for end in ("in", "the", "a", "on", "it", "an")]
OPTIONS = (
    "--gbit-per-s",
    "--preemption",
    "--prefix-store",
    "--replicas",
    "--scheduler",
    "--share-prefixes",
    "--swarm",
    "--variant",
    STAGES,
)
PAIRS = list(combinations(OPTIONS, 2))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of what is measured here, also by replicas. By its rates this processor is slow at bfloat16: the ends of a model
    over a swarm then compute in float32, as its server does, and what is stored is in."""
    folder, patch = tmp_path_factory.mktemp("cache"), pytest.MonkeyPatch()
    rates = {"machine": identity(), "native_bf16": False, "float32": 1.0, "bfloat16": 0.5}
    (folder / "cpu-rates.json").write_text(json.dumps(rates), encoding="utf-8")
    patch.setattr(paths, "CACHE", folder)
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, the same in stages, an adapter on it, and a store with how all prompts begin."""
    from fine_tunes import tuned, written

    place = tmp_path_factory.mktemp("pairs")
    write_endless(place / "model")
    write_staged_endless(place / "stages" / "model", place / "model")
    written(tuned(tiny_model(), 1, ["q_proj", "up_proj"]), place / "qa")
    assert main(["prefix", "put", str(place / "store"), TEXT, "--model", str(place / "model")]) == 0
    return place


@pytest.fixture(scope="module")
def swarm(place) -> Iterator[str]:
    """A server of all blocks, which has the adapter."""
    from swarms import Here, servers_imported

    from firsttoken_serve.swarm.swarm_variants import with_variants

    with servers_imported():
        here = Here(place / "model")
        blocks = with_variants([("qa", place / "qa")], place / "model")
        yield here.serve((0, 6), make_backend=blocks)[0].record.address
        here.close()


@pytest.fixture(scope="module")
def staged_swarm(place) -> Iterator[str]:
    """A server of all blocks of the model in stages: a service takes a server of its own folder only."""
    from swarms import Here, servers_imported

    with servers_imported():
        here = Here(place / "stages" / "model")
        yield here.serve((0, 6))[0].record.address
        here.close()


@pytest.fixture(scope="module")
def arguments(place, request: pytest.FixtureRequest):
    """The options of a pair as a user writes them, beside those that make its case one."""

    def of(options: tuple[str, ...]) -> list[str]:
        staged = {STAGES, "--gbit-per-s"} & set(options)
        told = [str(place / "stages" / "model" if staged else place / "model")]
        told += ["--max-model-len", "120", "--max-running", "6", "--max-waiting", "6"]
        values = {
            "--gbit-per-s": lambda: ["1"],
            "--preemption": lambda: ["online", "--kv-blocks", "12"],
            "--prefix-store": lambda: [str(place / "store")],
            "--replicas": lambda: ["2"],
            "--scheduler": lambda: ["prefill_first"],
            "--swarm": lambda: [request.getfixturevalue("staged_swarm" if STAGES in options else "swarm")],
            "--variant": lambda: [f"qa={place / 'qa'}"],
        }
        for option in options:
            told += [option, *values.get(option, list)()] if option != STAGES else []
        return told

    return of


def refused(pair: tuple[str, str]) -> str | None:
    """Why, by the table; a link makes the model one in stages."""
    asked = {*pair, *([STAGES] if "--gbit-per-s" in pair else [])}
    return next((why for options, why in REFUSED.items() if set(options) <= asked), None)


@contextmanager
def served(arguments: list[str], cache: Path) -> Iterator[str]:
    """The command in a process of its own, once all of its model serves, in each of its replicas."""
    port, complete = free_port(), set[str]()
    command = [sys.executable, "-m", "firsttoken", "serve", *arguments, "--port", str(port), "--grace-s", "5"]
    environment = os.environ | {"FIRSTTOKEN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(complete := complete | _complete(url)) < 1 + ("--replicas" in arguments):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:  # how a service behind Ray ends is not what is tried here
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)


def _complete(url: str) -> set[str]:
    """The name of the replica that answers, if all of its model serves."""
    try:
        status = httpx.get(f"{url}/stage", timeout=10).json()
        return {status["replica"]} if status["state"] == "complete" else set()
    except (httpx.HTTPError, KeyError, ValueError):
        return set()


def answers(url: str, model: str | None = None) -> list[str]:
    """What all prompts are told, asked at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(lambda prompt: said(url, prompt, model, 40), PROMPTS))


@pytest.fixture(scope="module")
def expected(arguments, cache) -> dict[str, list[str]]:
    """What the model says, and its variant, with no other option. A swarm's ends may compute in another dtype."""
    with served(arguments(("--variant",)), cache) as url:
        alone = {"": answers(url), "qa": answers(url, "qa")}
    assert alone[""] != alone["qa"]
    with served(arguments(("--swarm",)), cache) as url:
        alone |= {"--swarm": answers(url)}
    return alone


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if refused(pair)], ids=" ".join)
def test_a_pair_is_refused(pair, arguments, capsys) -> None:
    assert main(["serve", *arguments(pair), "--port", str(free_port())]) == 2
    told = capsys.readouterr().err
    assert told.startswith("firsttoken: serve: ") and f": {refused(pair)}; leave one of them out" in told
    assert told.count("\n") == 1


def served_together() -> list[tuple[str, ...]]:
    """Options in threes, of which none refuses another: every pair that is served stands in one of them, and a service
    that starts for three of its pairs at once costs a third."""
    left = {pair for pair in PAIRS if not refused(pair)}
    threes = [three for three in combinations(OPTIONS, 3) if set(combinations(three, 2)) <= left]
    found = []
    while left:
        found.append(max(threes, key=lambda three: len(left & set(combinations(three, 2)))))
        left -= set(combinations(found[-1], 2))
    return found


@pytest.mark.parametrize("options", served_together(), ids=" ".join)
def test_options_together_answer_as_each_alone(options, arguments, cache, expected) -> None:
    with served(arguments(options), cache) as url:
        if "--prefix-store" in options:
            until(lambda: "stored prefixes are used" in httpx.get(f"{url}/stage").text, "the store is open")
        assert answers(url) == expected["--swarm" if "--swarm" in options else ""]
        if "--variant" in options and "--swarm" in options:  # what it says, ``test_over_swarm.py`` knows in float32
            assert answers(url, "qa") not in (expected["--swarm"], expected[""])
        elif "--variant" in options:
            assert answers(url, "qa") == expected["qa"]
        status = httpx.get(f"{url}/stage").json()
        if "--prefix-store" in options and "--replicas" not in options:
            assert status["restored"] == len(PROMPTS)


def test_the_table_has_what_is_refused_and_no_more() -> None:
    """Each of its lines is of options that there are, and names the two; and it stays short."""
    assert {option for pair in REFUSED for option in pair} <= {*OPTIONS, WHOLE}
    assert len(REFUSED) == 5 and all(re.fullmatch(r"[^\n.;]{20,110}", why) for why in REFUSED.values())


def test_what_no_pair_above_can_try(place) -> None:
    """A whole model has no link. (Another device may not be here: ``test_over_swarm.py`` tries one over a swarm.)"""
    link: Any = ServiceConfig(place / "model", port=free_port(), gbit_per_s=1.0)
    with pytest.raises(StageError, match="--gbit-per-s does not go with a model that is whole: only"), running(link):
        pass
