"""A chain whose servers die, hang and come back says what the local model says, or fails: never a part of a model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from mortal import DEPTH, Known, MortalSwarm, Schedules, impatient, write_known
from waiting import until

from firsttoken.petals.routing import check_cover, gaps
from firsttoken.study.errors import SwarmError


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Iterator[tuple[Path, list[Known]]]:
    """The model's folder, and what it says to some prompts."""
    folder = tmp_path_factory.mktemp("mortal") / "tiny"
    with impatient():
        yield folder, write_known(folder, 4)


@pytest.fixture(scope="module")
def three(known) -> Iterator[MortalSwarm]:
    """Three servers, each of which holds what nobody else does."""
    swarm = MortalSwarm(known[0], [(0, 2), (2, 4), (4, 6)])
    yield swarm
    swarm.close()


def until_right(ask, one) -> None:
    """A busy machine may take more than one try to find who is back; what is said meanwhile is an error."""
    deadline = time.monotonic() + 60
    while (said := ask(one)) != "right":
        assert said == "error" and time.monotonic() < deadline


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("same_key", [True, False])
def test_a_place_is_lost_for_longer_than_the_patience(three, known, place, same_key):
    one = known[1][place]
    three.heal()
    until_right(three.by_http, one)
    until_right(three.by_python, one)
    three.places[place].kill()
    for _ in range(2):
        assert (three.by_http(one), three.by_python(one)) == ("error", "error")
    health, stage = three.http.get("/health"), three.http.get("/stage").json()
    assert health.status_code == 503 and health.json()["state"] == stage["state"] == "degraded"
    assert "no server that answers has blocks" in health.json()["error"]
    until(lambda: three.model.chain._hidden_cache.nbytes == 0, "nothing is kept for who was told that it failed")
    three.places[place].start(same_key=same_key)
    until(lambda: three.http.get("/health").status_code == 200, "it has come back by itself: nobody asks")
    assert three.http.get("/stage").json()["state"] == "complete"
    until_right(three.by_http, one)
    until_right(three.by_python, one)


def test_schedules_of_deaths_returns_hangs_and_requests(three, known):
    """Some of those that ``soak_chain.py`` tries a thousand of."""
    counts = Schedules(three, known[1], random.Random(5)).run(12)
    assert counts["wrong"] == 0 and counts["stuck"] == 0 and counts["right"] > 0


def test_what_is_composed_covers_what_it_must():
    """Any list of spans but the one that has each layer once, in order."""
    draw, layers = random.Random(3), range(DEPTH)
    for _ in range(300):
        cuts = sorted(draw.sample(range(1, DEPTH), draw.randint(0, 4)))
        whole = [range(*one) for one in pairwise([0, *cuts, DEPTH])]
        check_cover(whole, layers)
        assert gaps(whole, layers) == []
        lost = draw.randrange(len(whole))
        part = [span for place, span in enumerate(whole) if place != lost]
        assert gaps(draw.sample(part, len(part)), layers) == [whole[lost]]
        twice = [*whole[:lost], whole[lost], *whole[lost:]]
        longer = [*whole[:-1], range(whole[-1].start, DEPTH + 1)]
        for wrong in (part, twice, longer, whole[::-1] if len(whole) > 1 else [], [*whole, range(DEPTH, DEPTH)]):
            with pytest.raises(SwarmError, match="each once and in order"):
                check_cover(wrong, layers)
