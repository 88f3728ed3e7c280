"""Whether the time that the host takes explains what the sum of measured operators misses: two numbers, fitted to the
servers of one model on one card and judged on all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.fitted import non_negative
from firsttoken.engine.request import Request
from firsttoken.simulation.costs.operator_tables import tables_from
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.nb46_on_the_stated_gpus.operator_error import (
    KIND,
    OperatorErrorConfig,
    ServerRun,
    add_errors,
    costs_of,
    mean_times,
    rounded,
    served,
    server_runs,
)
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    import pandas

BEFORE, AFTER = "operators alone", "with the host's time"
HOPPER = ("h100-sxm", "h200-sxm")
_TIMES = ("ttft", "tpot")


class CountedSteps(Costs):
    """The costs ``inner``, which notes when each step ends, and how many steps and rows there were until then.

    A row is a chunk or a decode, for each of which the host prepares inputs and takes up a token.
    """

    def __init__(self, inner: Costs) -> None:
        self._inner = inner
        self._ends_s, self._rows = [0.0], [0]

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        seconds = self._inner.step_s(prefills, contexts)
        self._ends_s.append(self._ends_s[-1] + seconds)
        self._rows.append(self._rows[-1] + len(prefills) + len(contexts))
        return seconds

    def swap_out_s(self, tokens: int) -> float:
        return self._inner.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self._inner.swap_in_s(tokens)

    def waited(self, requests: Sequence[Request]) -> dict[str, float]:
        """The mean steps and rows that a request waits for its first token, and for each further one.

        Clients of a closed loop send when an answer has ended, so that neither depends on how long a step takes: the
        host's time adds to a simulated time in proportion to both.
        """
        arrived, first, last = (
            np.searchsorted(self._ends_s, [moment(request) for request in requests])
            for moment in (
                lambda served_request: served_request.arrival_s,
                lambda served_request: served_request.times_s[0],
                lambda served_request: served_request.times_s[-1],
            )
        )
        gaps = np.array([max(1, len(request.times_s) - 1) for request in requests])
        rows = np.array(self._rows)
        return {
            "ttft_steps": float(np.mean(first - arrived)),
            "ttft_rows": float(np.mean(rows[first] - rows[arrived])),
            "tpot_steps": float(np.mean((last - first) / gaps)),
            "tpot_rows": float(np.mean((rows[last] - rows[first]) / gaps)),
        }


def host_time(profile: Profile) -> Outcome:
    """Rows {card, model, clients, vllm_ttft_ms, vllm_tpot_ms, ttft_ms, tpot_ms, ttft_steps, ttft_rows, tpot_steps,
    tpot_rows}: a server's times, those of the operators alone, and what the host's time would be added for."""
    config = profile.section("operator_error", OperatorErrorConfig)
    rows = [
        counted(run, CountedSteps(costs := costs_of(run)), costs.blocks, config, profile.seed)
        for run in track(server_runs()[:: config.every], desc="host_time")
    ]
    return Outcome(rounded(rows, 5), provenance={"kind": KIND, "costs": tables_from()})


def counted(run: ServerRun, costs: CountedSteps, blocks: int, config: OperatorErrorConfig, seed: int) -> dict[str, Any]:
    """Serve one run on ``costs``; return its row."""
    requests = served(run, costs, blocks, config, seed)
    ttft_ms, tpot_ms = mean_times(requests)
    row = {"card": run.card, "model": run.model, "clients": run.clients}
    row |= {"vllm_ttft_ms": run.ttft_ms, "vllm_tpot_ms": run.tpot_ms, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
    return row | costs.waited(requests)


def fitted(servers: pandas.DataFrame) -> tuple[float, float]:
    """Milliseconds of the host by step and by row, neither below 0, that make the relative errors of the time per token
    of ``servers`` least, squared and summed up."""
    theirs = servers.vllm_tpot_ms.to_numpy()
    matrix = np.column_stack([servers.tpot_steps, servers.tpot_rows])
    step_ms, row_ms = non_negative(matrix / theirs[:, None], 1 - servers.tpot_ms.to_numpy() / theirs)
    return float(step_ms), float(row_ms)


def host_summary(rows: Rows, parameters: dict[str, Any]) -> Summary:
    """For each model and card: the two numbers that fit it, and the error in % of the time per token and of the first
    token without and with them, on its own rows, on all others, and on those others that are of the Hopper cards."""
    summary, servers = Summary(), frame_of(rows)
    for (model, card), server_rows in servers.groupby(["model", "card"], sort=False):
        name, (step_ms, row_ms) = f"{model} on {card}", fitted(server_rows)
        summary.add("host_step_ms", {"value": step_ms, "unit": "ms", "n": len(server_rows)}, case=name)
        summary.add("host_row_us", {"value": 1e3 * row_ms, "unit": "us", "n": len(server_rows)}, case=name)
        others = servers.drop(server_rows.index)
        judged = {f"fitted on {name}": server_rows, f"held out from {name}": others}
        judged[f"held out from {name}, Hopper"] = others[others.card.isin(HOPPER)]
        for case, chosen in judged.items():
            for variant, step, row in ((BEFORE, 0.0, 0.0), (AFTER, step_ms, row_ms)) if len(chosen) else ():
                for time in _TIMES:
                    waits = step * chosen[f"{time}_steps"] + row * chosen[f"{time}_rows"]
                    off = 100 * ((chosen[f"{time}_ms"] + waits) / chosen[f"vllm_{time}_ms"] - 1)
                    add_errors(summary, f"{time}_off_pct", off, case=case, variant=variant, than="vllm")
    return summary


def host_rows(result: Result) -> Table:
    """A line for each model and card that the two numbers were fitted to: the numbers, and the errors without and with
    them, on the rows that they were fitted to and on all others."""
    for entry in result.summary.all("host_step_ms"):
        name = entry["where"]["case"]
        row_us = result.summary.value("host_row_us", case=name)
        line: dict[str, Any] = {"fitted on": name, "ms a step": f"{entry['value']:.2f}", "us a row": f"{row_us:.0f}"}
        for case, label in ((f"fitted on {name}", "its own"), (f"held out from {name}", "held out")):
            for variant, short in ((BEFORE, "before"), (AFTER, "after")):
                off_entry = result.summary.get("tpot_off_pct", case=case, variant=variant, than="vllm", across="median")
                line[f"{label}, {short}: median %"] = interval(off_entry, 1)
        yield line


def first_token_rows(result: Result, name: str) -> Table:
    """A line a time and case of the fit on ``name``: median and 90th percentile of the error, before and after."""
    for case in (f"fitted on {name}", f"held out from {name}", f"held out from {name}, Hopper"):
        for time, label in (("tpot", "time per token"), ("ttft", "TTFT")):
            line: dict[str, Any] = {"runs": f"{case}: {label}"}
            for variant, short in ((BEFORE, "before"), (AFTER, "after")):
                labels = {"case": case, "variant": variant, "than": "vllm"}
                median = result.summary.get(f"{time}_off_pct", **labels, across="median")
                tail = result.summary.get(f"{time}_off_pct", **labels, across="p90")
                line["n"] = median["n"] if median else 0
                line[f"{short}, median %"] = interval(median, 1)
                line[f"{short}, p90 %"] = f"{tail['value']:.0f}" if tail else ""
            yield line
