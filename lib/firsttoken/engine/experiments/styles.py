"""How policies, swap paths and systems look: one colour and marker for each, in every figure of the engine."""

from __future__ import annotations

# Tol's high-contrast and bright schemes: none is a colour of paper, measured, floor or a stage.
POLICIES: dict[str, tuple[str, str, str]] = {  # label, colour, marker
    "swap": ("Swap", "#004488", "o"),
    "recompute": ("Recompute", "#BB5566", "s"),
    "cross_point": ("CrossPoint", "#DDAA33", "D"),
    "bandwidth_only": ("BandwidthOnly", "#AA3377", "v"),
    "online": ("OnlineCrossPoint", "#228833", "^"),
    "oracle": ("Oracle (cheapest each time)", "#999933", "*"),  # no floor: a queue's tail is not made of recoveries
    "inverse": ("control: rule inverted", "#BBBBBB", "P"),
    "coin": ("control: toss of a coin", "#BBBBBB", "X"),
    "swap_overtaking": ("control: Swap, whoever fits comes back", "#BBBBBB", "h"),
}
PATHS: dict[str, tuple[str, str, str]] = {
    "per_block": ("a copy per block, layer, K and V", "#004488", "o"),
    "coalesced": ("one coalesced copy", "#6699CC", "^"),
    "overlapped": ("coalesced, beside compute", "#997700", "v"),
}
SYSTEMS: dict[str, str] = {
    "generate": "generate, one padded batch",
    "generate_fused": "generate, fused model",
    "continuous_batching": "transformers' continuous batching",
    "vllm": "vLLM (CPU)",
    "engine_stock": "this engine, stock modules",
    "engine": "this engine",
}
