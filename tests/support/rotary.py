"""Every rotary kind that is accepted, as a config.json tells of it, with transformers 5's keys and with the older ones.

Heads of a model that takes them are 16 numbers wide, and it was trained with ``TRAINED`` tokens.
"""

from __future__ import annotations

from typing import Any

TRAINED = 64
MOST = 512
_SHORT, _LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.4], [3.0, 6.0, 9.0, 12.0, 18.0, 24.0, 32.0, 40.0]

SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": TRAINED},
    "longrope": {"short_factor": _SHORT, "long_factor": _LONG, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "proportional": {"factor": 2.0},
}

ROTARY: dict[str, dict[str, Any]] = {}  # by a name: what is said of positions
for _kind, _scaled in SCALED.items():
    ROTARY[_kind] = {"rope_parameters": {"rope_type": _kind, "rope_theta": 1e4} | _scaled}
    ROTARY[f"{_kind}, old keys"] = {"rope_theta": 1e4, "rope_scaling": {"type": _kind} | _scaled}
ROTARY["longrope, the length beside it"] = {
    "original_max_position_embeddings": TRAINED,
    "rope_scaling": {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG, "factor": 8.0},
}
CONTEXT = {name: TRAINED if name.startswith("longrope") else MOST for name in ROTARY}
