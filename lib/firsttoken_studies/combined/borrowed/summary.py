"""What starts that borrow say: first tokens by link and round trip, whose they are, and what the neighbour lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from firsttoken.study.measures import Scalar, Summary
from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.combined.borrowed.trial import BORROWED, PRUNED, WHOLE
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values

TTFT, LAST = "ttft_request_s", "last_token_s"
ALONE = "alone"


def borrowed_start_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link: TTFT of the three ways, and by round trip that of borrowing over that of waiting, the same for the last
    token and for all layers being here, and the bytes that were lent; over all of them whose tokens came out; the
    neighbour's own rate alone, beside a start that waits and beside one that borrows."""
    starts = [row | {LAST: row["times_s"][-1]} for row in rows if row["what"] == "start"]
    summary = Summary()
    for rate in parameters["borrowed"]["gbit_per_s"]:
        here = [row for row in starts if row["gbit_per_s"] == rate]
        for way in (WHOLE, PRUNED):
            first = bootstrap(values(here, way, TTFT), "median").summary("s")
            summary.add("ttft_p50_s", first, variant=way, gbit_per_s=rate)
        over = ratio(here, PRUNED, WHOLE, TTFT).summary("x")
        summary.add("ttft_x", over, variant=PRUNED, than=WHOLE, gbit_per_s=rate)
        loaded = bootstrap(values(here, WHOLE, "loaded_s"), "median").summary("s")
        summary.add("loaded_s", loaded, variant=WHOLE, gbit_per_s=rate)
        for rtt in parameters["borrowed"]["rtt_ms"]:
            near = [row for row in here if row["variant"] != BORROWED or row["rtt_ms"] == rtt]
            _borrowed(summary, near, gbit_per_s=rate, rtt_ms=rtt)
    _whose(summary, starts)
    _neighbour(summary, [row for row in rows if row["what"] == "neighbour"])
    return summary


def _borrowed(summary: Summary, rows: Rows, **link: Scalar) -> None:
    waited = [row | {"local_s": row["loaded_s"]} if row["variant"] == WHOLE else row for row in rows]
    said = [row for row in rows if row["variant"] == BORROWED]
    place = {"variant": BORROWED, **link}
    summary.add("ttft_p50_s", bootstrap(values(rows, BORROWED, TTFT), "median").summary("s"), **place)
    summary.add("ttft_x", ratio(rows, BORROWED, WHOLE, TTFT).summary("x"), **place, than=WHOLE)
    summary.add("last_token_x", ratio(rows, BORROWED, WHOLE, LAST).summary("x"), **place, than=WHOLE)
    summary.add("loaded_x", ratio(waited, BORROWED, WHOLE, "local_s").summary("x"), **place, than=WHOLE)
    summary.add("lent_mb", bootstrap([row["lent_bytes"] / 1e6 for row in said], "median").summary("MB"), **place)
    summary.add("lent_tokens", bootstrap([_lent_tokens(row) for row in said], "median").summary("tokens"), **place)


def _lent_tokens(row: Mapping[str, Any]) -> int:
    """Tokens that were said before all layers were here."""
    return sum(at < row["local_s"] for at in row["times_s"])


def _whose(summary: Summary, starts: Rows) -> None:
    """Of how many starts all tokens, and the first, are those of starts that wait for the whole model."""
    wanted = {tuple(row["tokens"]) for row in starts if row["variant"] == WHOLE}
    summary.add("answers", {"value": len(wanted), "unit": "answers of starts that wait"}, variant=WHOLE)
    for variant in (PRUNED, BORROWED):
        mine = [tuple(row["tokens"]) for row in starts if row["variant"] == variant]
        same = [100.0 * (tokens in wanted) for tokens in mine]
        first = [100.0 * (tokens[0] in {one[0] for one in wanted}) for tokens in mine]
        for measure, found in (("same_tokens_pct", same), ("same_first_token_pct", first)):
            entry = {"value": float(np.mean(found)), "unit": "% of starts", "n": len(mine)}
            summary.add(measure, entry, variant=variant, than=WHOLE)
    refused = [row["gone"] for row in starts if row["variant"] == BORROWED and "all layers" not in row["gone"]]
    summary.add("loans_that_failed", {"value": len(refused), "unit": "starts"})


def _neighbour(summary: Summary, rows: Rows) -> None:
    """Tokens a second of the neighbour's own request, and the share of them that it lost."""
    rates = {
        name: {row["round"]: row["tokens"] / row["seconds"] for row in rows if row["beside"] == name}
        for name in (ALONE, WHOLE, BORROWED)
    }
    for name, found in rates.items() if rows else ():
        said = bootstrap(list(found.values()), "median").summary("tokens/s")
        summary.add("neighbour_tokens_per_s", said, case=name)
        if name != ALONE:
            lost = [100 * (1 - found[at] / rates[ALONE][at]) for at in found]
            summary.add("neighbour_lost_pct", bootstrap(lost, "median").summary("%"), case=name, than=ALONE)
