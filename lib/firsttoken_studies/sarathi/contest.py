"""One scheduler against the record table: the same requests, costs and objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firsttoken.engine.trace import write_rows, write_trace
from firsttoken.sarathi.capacity import STRICT
from firsttoken.sarathi.policy import Policy
from firsttoken.simulation.hardware import Hardware
from firsttoken.simulation.workload.traces import RequestTrace
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.record.results import Result
from firsttoken_studies.record.show import interval
from firsttoken_studies.sarathi.leaderboard import enters, ranking

LASTING = 0.5  # of a run: requests that come within less are a burst
WORKLOAD = ("lengths", "requests", "batch", "start")  # of a capacity section: what must agree, to compare


@dataclass(frozen=True)
class CapacityBenchmark:
    """``policy`` on the workload of ``profile``, under the strict objective, for ``draws`` draws of the requests."""

    policy: Policy
    profile: Profile
    draws: int
    bench: Bench
    arriving: list[float] = field(default_factory=list)  # of each draw, at its capacity: the share with arrivals

    @classmethod
    def of(
        cls, text: str, profile: Profile, draws: int | None = None, trace: RequestTrace | None = None
    ) -> CapacityBenchmark:
        """Of the scheduler that ``text`` names; as many draws as the profile has, unless told otherwise. Of a ``trace``
        that has no more requests than a draw there is one draw.

        Raises ProfileError for a policy or a number that cannot be, AssetError for lengths and costs that are not here.
        """
        config, hardware = profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware)
        if draws is not None and draws < 1:
            raise ProfileError(f"capacity: seeds must be at least 1, not {draws}")
        bench = Bench(config, hardware, trace)
        if bench.trace is not None and len(bench.trace.items) <= config.requests:
            draws = 1
        return cls(Policy.named(text), profile, draws or config.seeds, bench)

    def run(self) -> list[float]:
        """The capacity in requests a second, by draw. Raises ProfileError for a policy that does what it may not."""
        objective, rates = self.bench.objective(STRICT), []
        with track(total=self.draws, desc=self.policy.text, unit="draw") as bar:
            for seed in range(self.profile.seed, self.profile.seed + self.draws):
                capacity = self.bench.search(
                    self.policy, objective, seed, lambda rate: bar.set_postfix_str(f"tried {rate:.2f} requests/s")
                )
                rates.append(capacity["requests_per_s"])
                self.arriving.append(capacity.get("arriving_share", 1.0))
                bar.update()
        return rates

    def write_run(self, rate: float, trace: Path | None, rows: Path | None) -> None:
        """Serve the first draw at ``rate`` once more, and write it for viewers and as a table, where a path is given.

        Raises ProfileError for a rate of 0, StorageError.
        """
        if not rate:
            raise ProfileError(f"{self.policy.text}: no rate is within the objective, so there is no run to write")
        requests, ran = self.bench.run(self.policy, self.bench.objective(STRICT), self.profile.seed, rate)
        for path, write in ((trace, write_trace), (rows, write_rows)):
            if path is not None:
                write(path, ran, requests)

    def content(self, rates: list[float], record: Result | None) -> dict[str, Any]:
        """Return the outcome for programs: what ``told`` says, with the capacity of each draw."""
        config, trace = self.bench.config, self.bench.trace
        same = record is not None and trace is None and self._same(record.parameters)
        return {
            "scheduler": self.policy.text,
            "hardware": self.bench.hardware.description,
            "objective": asdict(self.bench.objective(STRICT)),
            "requests": min(config.requests, len(trace.items)) if trace else config.requests,
            "workload": trace.description() if trace else config.lengths,
            "omitted": self.bench.omitted,
            "capacity_by_draw": rates,
            "arriving_share_by_draw": self.arriving,
            "capacity": bootstrap(rates).summary("requests/s"),
            "recorded": [vars(entry) for entry in ranking(record)] if same and record else None,
        }

    def told(self, rates: list[float], record: Result | None) -> str:
        """The outcome beside ``record``, where that is of the same workload."""
        objective, config = self.bench.objective(STRICT), self.bench.config
        own_capacity = bootstrap(rates).summary("requests/s")
        requests, lengths = config.requests, f"with the lengths of {config.lengths}"
        if trace := self.bench.trace:
            requests, lengths = min(requests, len(trace.items)), f"of {trace.description()}, at another rate"
        lines = [
            f"P99 between two tokens at most {1e3 * objective.tbt_s:.0f} ms, "
            f"median delay to the first step at most {objective.delay_s:g} s;",
            f"{requests:,} requests a draw {lengths}, simulated on {self.bench.hardware.description}",
            *([self.bench.omitted] if self.bench.omitted else []),
            "",
            _line(self.policy.text, own_capacity, "this run"),
        ]
        if (share := min(self.arriving, default=1.0)) < LASTING:
            lines.append(
                f"at that rate all requests came within {100 * share:.0f} % of the run: a burst, no load that lasts; "
                "ask for more of them (--set capacity.requests=N)"
            )
        if record is None or trace is not None or not self._same(record.parameters):
            workload_text = "this trace" if trace else f"the workload of profile {self.profile.name}"
            return "\n".join([*lines, f"nothing is recorded for {workload_text}"])
        places = ranking(record)
        lines += [_line(entry.scheduler, entry.capacity, "record") for entry in places]
        clears = enters(own_capacity, places[0].capacity)
        verdict = "enters the record table: its interval clears" if clears else "does not clear the interval of"
        return "\n".join([*lines, "", f"{self.policy.text} {verdict} {places[0].scheduler}, which holds the record"])

    def _same(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether a result with these parameters is of this workload and hardware."""
        own_config, theirs = asdict(self.bench.config), parameters["capacity"]
        hardware = asdict(self.bench.hardware)
        same_hardware = not hardware["model"] and all(
            hardware[name] == value for name, value in parameters["hardware"].items()
        )
        return same_hardware and all(own_config[name] == theirs[name] for name in WORKLOAD)


def _line(name: str, entry: Mapping[str, Any], source: str) -> str:
    kind = "range" if entry.get("range") else "     "
    number = interval(entry, 2) if entry["n"] > 1 else f"{entry['value']:.2f}"
    return f"{number:>22} {kind} requests/s  n={entry['n']}  {source:<8}  {name}"
