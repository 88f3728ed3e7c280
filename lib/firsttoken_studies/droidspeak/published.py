"""What DroidSpeak prints: layers of Figures 8 and 10, the requests of Figure 13, sizes of E- and KV-caches (4.1)."""

from __future__ import annotations

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import ReuseRequest, Schedule

# layers of 32, as printed: whether they count from 0 or from 1 is not said
PAPER_DEPTH = 32
FIGURE_8_LAYER = 23  # where the quality of inputs differs most
FIGURE_10_CRITICAL, FIGURE_10_GROUP = (16, 17, 18, 20, 25, 26, 27), (16, 27)
FIGURE_11_LAYERS = 11  # of the group within 5 %

FIGURE_13 = (ReuseRequest("A", 0, 10, Group(3, 10)), ReuseRequest("B", 2, 10, Group(0, 3)))
PUBLISHED_UNITS = {Schedule.SEND_ALL: 47, Schedule.SEND_REUSED: 30, Schedule.PIPELINED: 17}

# hidden size, KV heads, head dimension: as the authors' config.json has them; and the ratio that DroidSpeak gives (4.1)
SHAPES: dict[str, tuple[int, int, int, str]] = {
    "Llama-2-7B": (4096, 32, 128, ""),
    "Phi-3.5-mini": (3072, 32, 96, ""),
    "SmolLM2-135M (here)": (576, 3, 64, ""),
    "Mistral-7B": (4096, 8, 128, "2"),
    "Llama-3-8B": (4096, 8, 128, "2"),
    "Qwen2.5-0.5B": (896, 2, 64, ""),
    "TinyLlama-1.1B": (2048, 4, 64, ""),
    "Llama-3.1-70B": (8192, 8, 128, "4"),
}


def edge_over_kv(hidden: int, kv_heads: int, head_dim: int) -> float:
    """Bytes of an E-cache over those of one layer's KV cache: hidden / (2 * kv_heads * head_dim)."""
    return hidden / (2 * kv_heads * head_dim)


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, bytes_per_element: int = 2) -> int:
    """Bytes of the KV cache of one sequence: keys and values of every layer."""
    return 2 * layers * kv_heads * head_dim * tokens * bytes_per_element
