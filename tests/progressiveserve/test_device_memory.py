"""Memory of a GPU, its counters replaced: there are columns of their own on CUDA, and none on a CPU."""

from __future__ import annotations

import pytest
import torch

from firsttoken_studies.progressiveserve.device_memory import device_now, device_peak

COUNTERS = {"memory_allocated": 3, "max_memory_allocated": 7, "max_memory_reserved": 9}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's counters as they are on a GPU, asked for the device that computes."""
    for name, count in COUNTERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count if device == "cuda" else None)
    stats = {"allocated_bytes.peak": 64, "host_alloc_time.total": 250_000, "num_host_alloc": 1}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)


def test_a_gpu_has_columns_of_its_own(gpu):
    assert device_now("cuda") == {"device_bytes": 3}
    counted = {"device_peak_bytes": 7, "device_reserved_bytes": 9, "pinned_bytes": 64, "pinning_s": 0.25}
    assert device_peak("cuda") == counted


def test_nothing_pinned_is_no_column(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
    assert set(device_peak("cuda")) == {"device_peak_bytes", "device_reserved_bytes"}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_has_none(gpu, device):
    assert device_now(device) == device_peak(device) == {}
