"""Figure 13, unit by unit, and what holds for any requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import LINK, PROCESSOR, BusySpan, ReuseRequest, Schedule, simulate
from firsttoken.study.errors import RequestError

FIGURE_13 = [ReuseRequest("A", 0, 10, Group(3, 10)), ReuseRequest("B", 2, 10, Group(0, 3))]


@pytest.mark.parametrize(
    ("schedule", "a", "b"), [(Schedule.SEND_ALL, 18, 29), (Schedule.SEND_REUSED, 11, 19), (Schedule.PIPELINED, 8, 9)]
)
def test_figure_13(schedule: Schedule, a: int, b: int) -> None:
    timeline = simulate(FIGURE_13, schedule)
    assert timeline.ttft == {"A": a, "B": b}
    assert timeline.total == {"send all": 47, "send reused": 30, "pipelined": 17}[schedule]


def test_the_pipelined_timeline_is_that_of_the_derivation() -> None:
    spans = simulate(FIGURE_13, Schedule.PIPELINED).spans
    assert spans[0] == BusySpan("A", LINK, "E", 0, 1)
    assert [(s.activity, s.start) for s in spans if s.job == "A" and s.resource == LINK][1:] == [
        ("KV 0", 1),
        ("KV 1", 2),
        ("KV 2", 3),
    ]
    assert [(s.activity, s.start, s.end) for s in spans if s.job == "A" and s.resource == PROCESSOR][-1] == ("9", 7, 8)
    loads = [s for s in spans if s.job == "B" and s.resource == LINK]
    computes = [s for s in spans if s.job == "B" and s.resource == PROCESSOR]
    assert (loads[0].start, loads[-1].end) == (4, 11)
    assert (computes[0].start, computes[-1].end) == (8, 11)


@pytest.mark.parametrize(
    ("schedule", "overlapping", "free_edge"),
    [(Schedule.SEND_ALL, 40, 45), (Schedule.SEND_REUSED, 23, 28), (Schedule.PIPELINED, 17, 15)],
)
def test_other_assumptions_give_other_sums(schedule: Schedule, overlapping: int, free_edge: int) -> None:
    assert simulate(FIGURE_13, schedule, overlap=True).total == overlapping
    assert simulate([replace(job, edge_units=0) for job in FIGURE_13], schedule).total == free_edge


def test_recomputing_moves_nothing() -> None:
    timeline = simulate(FIGURE_13, Schedule.RECOMPUTE)
    assert timeline.ttft == {"A": 10, "B": 18}
    assert all(span.resource == PROCESSOR for span in timeline.spans)


@st.composite
def jobs(draw: st.DrawFn) -> list[ReuseRequest]:
    made = []
    for name in draw(st.sets(st.sampled_from("ABCD"), min_size=1)):
        layers = draw(st.integers(1, 8))
        group = Group(*sorted(draw(st.tuples(st.integers(0, layers), st.integers(0, layers)))))
        costs = draw(st.tuples(*[st.integers(0, 5)] * 3))
        made.append(ReuseRequest(name, draw(st.integers(0, 30)), layers, group, *costs))
    return made


@given(jobs(), st.booleans())
def test_no_schedule_beats_the_floor_and_each_beats_the_one_before(jobs: list[ReuseRequest], overlap: bool) -> None:
    ways = [simulate(jobs, schedule, overlap=overlap).ttft for schedule in list(Schedule)[1:]]
    for job in jobs:
        send_all, send_reused, pipelined = (way[job.name] for way in ways)
        assert job.floor <= pipelined <= send_reused <= send_all


@given(jobs(), st.sampled_from(Schedule), st.booleans())
def test_link_and_processor_do_one_thing_at_a_time(jobs: list[ReuseRequest], schedule: Schedule, overlap: bool) -> None:
    timeline = simulate(jobs, schedule, overlap=overlap)
    for resource in (LINK, PROCESSOR):
        busy = [span for span in timeline.spans if span.resource == resource]
        assert all(before.end <= after.start for before, after in pairwise(busy))
    for job in jobs:
        own = [span for span in timeline.spans if span.job == job.name]
        assert all(span.start >= job.arrival for span in own)
        assert job.arrival + timeline.ttft[job.name] == max([job.arrival, *(span.end for span in own)])
        needed = [
            s.end for s in own if s.resource == LINK and (schedule is not Schedule.PIPELINED or s.activity == "E")
        ]
        assert all(s.start >= max(needed, default=0) for s in own if s.resource == PROCESSOR)


@pytest.mark.parametrize("given", [[], [FIGURE_13[0], FIGURE_13[0]]])
def test_no_requests_or_two_of_one_name_are_refused(given: list[ReuseRequest]) -> None:
    with pytest.raises(RequestError, match="at least one request"):
        simulate(given, Schedule.PIPELINED)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="edge_units must be 0 or more, not -1"):
        ReuseRequest("A", 0, 10, Group(0, 3), edge_units=-1)
    with pytest.raises(RequestError, match="does not fit 2 layers"):
        ReuseRequest("A", 0, 2, Group(0, 3))
