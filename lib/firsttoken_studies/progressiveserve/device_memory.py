"""What a process takes of a GPU, and of pinned memory for it; no columns where it computes on a CPU.

Torch's own allocators are asked: what a peer's package takes past them (``fastsafetensors``, ``runai``) is not in it,
nor is the CUDA context. A trial is a process of its own: its peaks count from its beginning.
"""

from __future__ import annotations

from typing import Any

import torch


def device_now(device: torch.device | str) -> dict[str, int]:
    """{device_bytes}: in tensors on the GPU now."""
    if torch.device(device).type != "cuda":
        return {}
    return {"device_bytes": torch.cuda.memory_allocated(device)}


def device_peak(device: torch.device | str) -> dict[str, Any]:
    """Return this process's peaks: the most bytes in tensors (``device_peak_bytes``) and the most torch held for them
    (``device_reserved_bytes``); the most pinned host memory (``pinned_bytes``, rounded up by torch to powers of two)
    and the seconds that pinning it took (``pinning_s``), which are part of whatever phase asked for it.
    """
    if torch.device(device).type != "cuda":
        return {}
    row: dict[str, Any] = {
        "device_peak_bytes": torch.cuda.max_memory_allocated(device),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
    pinned = torch.cuda.host_memory_stats()
    if "allocated_bytes.peak" in pinned:
        row |= {"pinned_bytes": pinned["allocated_bytes.peak"], "pinning_s": pinned["host_alloc_time.total"] / 1e6}
    return row
