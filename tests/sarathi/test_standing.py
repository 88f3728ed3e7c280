"""Who holds the record and who may enter it, and one scheduler tried from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.__main__ import main
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile, load_profile
from firsttoken.study.stats import bootstrap
from firsttoken_studies import ledger
from firsttoken_studies.record.results import pick
from firsttoken_studies.sarathi.contest import CapacityBenchmark
from firsttoken_studies.sarathi.leaderboard import enters, ranking, record_table

POLICY = """from firsttoken.engine.schedulers.sarathi import Sarathi


class Mine(Sarathi):
    name = "mine"
"""


def entry(low: float, high: float, n: int = 5) -> dict[str, Any]:
    return {"value": (low + high) / 2, "low": low, "high": high, "n": n}


def test_a_newcomer_enters_when_its_interval_clears_the_holders() -> None:
    holder = entry(2.0, 2.5)
    assert enters(entry(2.51, 2.6), holder)
    assert not enters(entry(2.5, 9.0), holder), "touching is not clearing"
    assert not enters(entry(2.4, 3.0), holder), "a higher value alone is not enough"
    assert not enters(entry(3.0, 3.1, n=4), holder), "the range of four draws is no interval"


def test_the_table_is_of_recorded_results() -> None:
    result = pick(ledger.recorded(), "serving_capacity", machine="any")
    assert result is not None
    places = ranking(result)
    capacities = [place.capacity["value"] for place in places]
    assert capacities == sorted(capacities, reverse=True) and len(places) == len({p.scheduler for p in places}) > 5
    (base,) = [place for place in places if place.scheduler == "prefill_first"]
    assert base.over_base is None and all(place.over_base for place in places if place is not base)
    lines = record_table(result).splitlines()
    assert lines[2].startswith(f"| {places[0].scheduler} | ") and len(lines) == len(places) + 4
    text = (paths.DATA / "CAPACITY.md").read_text(encoding="utf-8")
    assert record_table(result) in text


@pytest.fixture
def short(tmp_path: Path) -> dict[str, Any]:
    """Settings for the quick profile: 40 requests of 2,000 tokens, which take 20 s of prefill at least."""
    table = tmp_path / "lengths.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n" + "2000,12\n" * 40)
    return {"capacity.lengths": str(table), "capacity.requests": 40, "capacity.start": 2}


@pytest.fixture
def profile(short: dict[str, Any]) -> Profile:
    return load_profile("quick", **short)


def set_to(short: dict[str, Any]) -> list[str]:
    """The same for the command line."""
    return [part for key, value in short.items() for part in ("--set", f"{key}={value}")]


def test_one_scheduler_beside_the_record(short: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(POLICY)
    arguments = ["capacity", "--scheduler", f"{mine} 512", "--profile", "quick", "--seeds", "2"]
    files = ["--trace", str(tmp_path / "trace.json"), "--rows", str(tmp_path / "rows.csv")]
    assert main([*arguments, *set_to(short), *files]) == 0
    out = capsys.readouterr().out
    assert "P99 between two tokens at most 241 ms, median delay to the first step at most 2 s" in out
    assert f"n=2  this run  {mine} 512" in out and "nothing is recorded for the workload of profile quick" in out
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "waits" for event in events) == 40
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").count("\nrequest,") == 40
    assert main([*arguments, *set_to(short), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["capacity_by_draw"]) == found["capacity"]["n"] == 2 and found["recorded"] is None


def test_the_outcome_says_whether_it_enters(profile: Profile) -> None:
    contest = CapacityBenchmark.of("sarathi 512", profile, 5)
    assert contest.draws == 5
    assert CapacityBenchmark.of("sarathi 512", profile).draws == profile.sections["capacity"]["seeds"]
    record = pick(ledger.recorded(), "serving_capacity", machine="any")
    parameters = record.parameters | {"capacity": vars(contest.bench.config), "hardware": vars(contest.bench.hardware)}
    object.__setattr__(record, "parameters", parameters)
    holder = ranking(record)[0]
    better = [holder.capacity["high"] + 0.1 * step for step in range(1, 6)]
    told = contest.told(better, record).splitlines()
    assert told[-1] == (
        f"sarathi 512 enters the record table: its interval clears {holder.scheduler}, which holds the record"
    )
    assert sum("  record  " in line for line in told) == len(ranking(record))
    assert contest.content(better, record)["recorded"][0]["scheduler"] == holder.scheduler
    contest.arriving[:] = [0.9, 0.3]
    burst = "at that rate all requests came within 30 % of the run: a burst, no load that lasts; ask for more of them"
    assert any(line.startswith(burst) for line in contest.told(better, record).splitlines())
    worse = contest.told([rate / 2 for rate in better], record).splitlines()[-1]
    assert worse.startswith("sarathi 512 does not clear the interval of ") and bootstrap(better).n == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheduler", "sarathy"], "no scheduler 'sarathy'; known: "),
        (["--scheduler", "sarathi 64"], "a token budget of 64 cannot hold a token of each of 128 requests"),
        (["--scheduler", "nowhere.py"], "there is no policy file nowhere.py"),
        (["--scheduler", "sarathi 512", "--seeds", "0"], "capacity: seeds must be at least 1, not 0"),
        (["--scheduler", "sarathi 512", "--profile", "huge"], "no profile 'huge'"),
    ],
)
def test_an_error_is_one_line(short: dict[str, Any], arguments: list[str], message: str, capsys) -> None:
    chosen = [] if "--profile" in arguments else ["--profile", "quick"]
    assert main(["capacity", *arguments, *chosen, *set_to(short)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_scheduler_without_a_capacity_has_no_run_to_write(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="prefill_first: no rate is within the objective, so there is no run"):
        CapacityBenchmark.of("prefill_first", profile, 1).write_run(0.0, tmp_path / "trace.json", None)
