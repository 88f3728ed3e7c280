"""What starts that borrow say: first tokens by link and round trip, whose they are, and what the neighbour lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from firsttoken.progressive.coldstart.summary import Measures, ratio, values
from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap
from firsttoken.together.borrowed.trial import BORROWED, PRUNED, WHOLE

TTFT, LAST = "ttft_request_s", "last_token_s"
ALONE = "alone"


def borrowed_start_summary(rows: Rows, parameters: Mapping[str, Any]) -> Measures:
    """By link: TTFT of the three ways, and by round trip that of borrowing over that of waiting, the same for the last
    token and for all layers being here, and the bytes that were lent; over all of them whose tokens came out; the
    neighbour's own rate alone, beside a start that waits and beside one that borrows."""
    starts = [row | {LAST: row["times_s"][-1]} for row in rows if row["what"] == "start"]
    summary: Measures = {}
    for rate in parameters["borrowed"]["gbit_per_s"]:
        here = [row for row in starts if row["gbit_per_s"] == rate]
        for variant in (WHOLE, PRUNED):
            summary[f"{variant}_ttft_s_{link(rate)}"] = bootstrap(values(here, variant, TTFT), "median").summary("s")
        summary[f"{PRUNED}_over_whole_{link(rate)}"] = ratio(here, PRUNED, WHOLE, TTFT).summary("x")
        summary[f"{WHOLE}_loaded_s_{link(rate)}"] = bootstrap(values(here, WHOLE, "loaded_s"), "median").summary("s")
        for rtt in parameters["borrowed"]["rtt_ms"]:
            near = [row for row in here if row["variant"] != BORROWED or row["rtt_ms"] == rtt]
            summary |= _borrowed(near, f"{link(rate)}_{trip(rtt)}")
    return summary | _whose(starts) | _neighbour([row for row in rows if row["what"] == "neighbour"])


def link(gbit_per_s: float) -> str:
    """What the name of a measure calls a link."""
    return f"{gbit_per_s:g}gbit".replace(".", "_")


def trip(rtt_ms: float) -> str:
    """What the name of a measure calls a round trip."""
    return f"{rtt_ms:g}ms".replace(".", "_")


def _borrowed(rows: Rows, end: str) -> Measures:
    waited = [row | {"local_s": row["loaded_s"]} if row["variant"] == WHOLE else row for row in rows]
    said = [row for row in rows if row["variant"] == BORROWED]
    return {
        f"borrowed_ttft_s_{end}": bootstrap(values(rows, BORROWED, TTFT), "median").summary("s"),
        f"borrowed_over_whole_{end}": ratio(rows, BORROWED, WHOLE, TTFT).summary("x"),
        f"last_over_whole_{end}": ratio(rows, BORROWED, WHOLE, LAST).summary("x"),
        f"local_over_whole_{end}": ratio(waited, BORROWED, WHOLE, "local_s").summary("x"),
        f"lent_mb_{end}": bootstrap([row["lent_bytes"] / 1e6 for row in said], "median").summary("MB"),
        f"lent_tokens_{end}": bootstrap([_lent_tokens(row) for row in said], "median").summary("tokens"),
    }


def _lent_tokens(row: Mapping[str, Any]) -> int:
    """Tokens that were said before all layers were here."""
    return sum(at < row["local_s"] for at in row["times_s"])


def _whose(starts: Rows) -> Measures:
    """Of how many starts all tokens, and the first, are those of starts that wait for the whole model."""
    wanted = {tuple(row["tokens"]) for row in starts if row["variant"] == WHOLE}
    summary: Measures = {"whole_answers": {"value": len(wanted), "unit": "answers of starts that wait"}}
    for variant in (PRUNED, BORROWED):
        mine = [tuple(row["tokens"]) for row in starts if row["variant"] == variant]
        same = [100.0 * (tokens in wanted) for tokens in mine]
        first = [100.0 * (tokens[0] in {one[0] for one in wanted}) for tokens in mine]
        summary[f"{variant}_same_pct"] = {"value": float(np.mean(same)), "unit": "% of starts", "n": len(mine)}
        summary[f"{variant}_same_first_pct"] = {"value": float(np.mean(first)), "unit": "% of starts", "n": len(mine)}
    refused = [row["gone"] for row in starts if row["variant"] == BORROWED and "all layers" not in row["gone"]]
    return summary | {"loans_that_failed": {"value": len(refused), "unit": "starts"}}


def _neighbour(rows: Rows) -> Measures:
    """Tokens a second of the neighbour's own request, and the share of them that it lost."""
    if not rows:
        return {}
    rates = {
        name: {row["round"]: row["tokens"] / row["seconds"] for row in rows if row["beside"] == name}
        for name in (ALONE, WHOLE, BORROWED)
    }
    summary: Measures = {}
    for name, found in rates.items():
        summary[f"neighbour_{name}_tokens_per_s"] = bootstrap(list(found.values()), "median").summary("tokens/s")
        if name != ALONE:
            lost = [100 * (1 - found[at] / rates[ALONE][at]) for at in found]
            summary[f"neighbour_{name}_lost_pct"] = bootstrap(lost, "median").summary("%")
    return summary
