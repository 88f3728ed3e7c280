"""How policies and swap paths are called and look in every figure of CPS."""

from __future__ import annotations

from firsttoken_studies.record.plot import LOOKS

POLICIES: dict[str, tuple[str, str, str]] = {  # label, colour, marker
    "swap": ("Swap", *LOOKS["swap"]),
    "recompute": ("Recompute", *LOOKS["recompute"]),
    "cross_point": ("CPS", *LOOKS["cross-point"]),
    "bandwidth_only": ("bandwidth only (2.3)", *LOOKS["bandwidth only"]),
    "online": ("CPS, online", *LOOKS["online"]),
    "oracle": ("Oracle (cheapest each time)", *LOOKS["oracle"]),  # no floor: a queue's tail is not made of recoveries
    "inverse": ("control: rule inverted", *LOOKS["other"]._replace(marker="P")),
    "coin": ("control: toss of a coin", *LOOKS["other"]._replace(marker="X")),
    "swap_overtaking": ("control: Swap, out-of-order resume", *LOOKS["other"]._replace(marker="h")),
}
PATH_LOOKS: dict[str, tuple[str, str, str]] = {
    "per_block": ("a copy per block, layer, K and V", *LOOKS["swap"]),
    "coalesced": ("one coalesced copy", *LOOKS["coalesced"]),
    "overlapped": ("coalesced, beside compute", *LOOKS["overlapped"]),
}
LINES = {"per_block": "swap", "coalesced": "coalesced", "overlapped": "overlapped"}  # what ``LOOKS`` calls them
