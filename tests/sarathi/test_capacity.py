"""The search for a capacity, on a server whose capacity is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.request import Request, Sampling
from firsttoken.sarathi.capacity import SHARE, ClientTimes, Objective, capacity
from firsttoken.sarathi.policy import Policy, scheduler_labels
from firsttoken.study.errors import ProfileError

OBJECTIVE = Objective(tbt_s=0.1)


def server(limit: float, seen: list[float]):
    """Within the objective up to ``limit`` requests a second."""

    def serve(rate: float) -> ClientTimes:
        seen.append(rate)
        return ClientTimes(0.05 if rate <= limit else 0.2, 0.3, 0.5, 1.0)

    return serve


@settings(max_examples=100, deadline=None)
@given(limit=st.floats(0.1, 400), start=st.floats(0.5, 4))
def test_it_finds_what_is_there(limit: float, start: float) -> None:
    seen: list[float] = []
    found, served = capacity(server(limit, seen), OBJECTIVE, start=start)
    assert (1 - 1.1 * SHARE) * limit <= found <= limit and served.within(OBJECTIVE)
    assert len(seen) == len(set(seen)) < 20, "a rate is never tried twice"


def test_a_server_that_never_is_in_time_has_none() -> None:
    assert capacity(server(0.0, []), OBJECTIVE, start=1.0) == (0.0, None)


def test_a_workload_too_small_to_tell_is_refused() -> None:
    with pytest.raises(ProfileError, match="all requests at once are within the objective; ask for more"):
        capacity(server(1e9, []), OBJECTIVE, start=1.0)


def test_both_bounds_count() -> None:
    assert ClientTimes(0.1, 1.0, 0.5, 2.0).within(OBJECTIVE)
    assert not ClientTimes(0.101, 1.0, 0.5, 0.1).within(OBJECTIVE)
    assert not ClientTimes(0.05, 1.0, 0.5, 2.1).within(OBJECTIVE)


def test_what_clients_saw() -> None:
    first, second = (Request(number, [1], Sampling(3), arrival_s=number) for number in (0, 1))
    first.begun_s, second.begun_s = 0.5, 3.0
    for request, times in ((first, (1.0, 2.0, 4.0)), (second, (4.0,))):
        for at in times:
            request.append(7, at)
    served = ClientTimes.of([first, second])
    assert served.tbt_max_s == 2.0 and served.tbt_p99_s == pytest.approx(1.99)
    assert (served.ttft_p50_s, served.delay_p50_s) == (2.0, 1.25)


def test_where_a_summary_has_a_scheduler() -> None:
    assert scheduler_labels("sarathi 512") == {"scheduler": "sarathi", "budget_tokens": 512}
    assert scheduler_labels("prefill_first") == {"scheduler": "prefill_first"}
    assert scheduler_labels("my own/mine.py") == {"scheduler": "my own/mine.py"}


def test_schedulers_by_their_names() -> None:
    config = Policy.named("sarathi 512").config(OBJECTIVE, 64)
    assert (config.scheduler, config.token_budget, config.requests, config.tbt_s) == ("sarathi", 512, 64, 0.1)
    assert Policy.named("orca").config(OBJECTIVE, 64).scheduler == "orca"
    with pytest.raises(
        ProfileError, match="scheduler 'sarathi small': write the name and, where it has one, the token"
    ):
        Policy.named("sarathi small").config(OBJECTIVE, 64)
    with pytest.raises(ProfileError, match="cannot hold a token of each of 64 requests"):
        Policy.named("sarathi 32").config(OBJECTIVE, 64)
