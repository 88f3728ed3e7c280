"""What the choice of a group would do on links and under loads that were not run: computed from measured costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firsttoken.droidspeak.choose import Conditions, GroupCosts, Scored, choose_group
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.prefill import Group
from firsttoken.study.record import Result, Rows
from firsttoken_studies.droidspeak.profiling import BOUND, profiled_groups
from firsttoken_studies.droidspeak.tables import by_run

_PAPER_GBIT = (4, 16, 50, 64, 100, 200, 300, 400)  # Figure 20's links, and the report's "next steps"
_PAPER_PREFILL_S, _PAPER_RTT_S = 4.0, 2e-3  # of 40K tokens (section 3); the longer latency of the "next steps"
_PAPER_KV_BYTES_PER_S = 40e3 * 2 * 32 * 8 * 128 * 2 / _PAPER_PREFILL_S
_BUSY = 4.0  # times longer a computation takes


@dataclass(frozen=True)
class Plan:
    """The costs that were measured, and the groups that may be chosen, for prefixes of ``tokens`` tokens."""

    costs: GroupCosts
    candidates: tuple[Scored, ...]
    tokens: int

    @classmethod
    def of(cls, adaptive: Result, profile: Result) -> Plan:
        """Costs of ``adaptive`` (adaptive_group), groups of the first run of ``profile`` (layer_profile)."""
        rows = next(iter(by_run(profile).values()))
        scored = tuple(Scored(p.group, p.relative_loss) for p in profiled_groups(rows) if p.relative_loss <= BOUND)
        return cls(GroupCosts(**adaptive.provenance["costs"]), scored, adaptive.rows[0]["tokens"])

    def choice(self, bytes_per_s: float, latency_s: float = 0.0, load: float = 1.0) -> tuple[Group, float]:
        """The group, and the TTFT expected of it over full prefill's under the same load."""
        now = Conditions(self.tokens, bytes_per_s, latency_s, load)
        chosen = choose_group(self.candidates, self.costs, now, BOUND)
        return chosen.group, chosen.ttft_s / self.costs.ttft_s(self.costs.full, now, Schedule.RECOMPUTE)

    @property
    def prefill_s(self) -> float:
        """How long a full prefill computes here."""
        return self.costs.compute_s(self.costs.full, Conditions(self.tokens, 0.0))

    def here(self, gbit_per_s: float) -> float:
        """Gbit/s here that are to computing here what ``gbit_per_s`` are to the paper's A100 with 8B parameters."""
        kv_bytes_per_s = self.costs.depth * self.costs.kv_token_bytes * self.tokens / self.prefill_s
        return gbit_per_s * kv_bytes_per_s / _PAPER_KV_BYTES_PER_S


def scaled_rows(plan: Plan) -> Rows:
    """The paper's and the report's links, scaled to this machine: the choice, alone, far away, on a busy processor."""
    far_s = _PAPER_RTT_S / _PAPER_PREFILL_S * plan.prefill_s
    rows = []
    for gbit in _PAPER_GBIT:
        here = plan.here(gbit)
        line: dict[str, Any] = {"Gbit/s in the paper": gbit, "as much here": round(here, 3)}
        for name, load in (("", 1.0), (f" at {_BUSY:g} times the load", _BUSY)):
            group, over = plan.choice(here * 1e9 / 8, load=load)
            line[f"group{name}"] = f"{group} ({len(group)} of {plan.costs.depth})"
            line[f"TTFT / full prefill's{name}"] = round(over, 3)
        line[f"the same {1e3 * _PAPER_RTT_S:g} ms away"] = round(plan.choice(here * 1e9 / 8, far_s)[1], 3)
        rows.append(line)
    return rows
