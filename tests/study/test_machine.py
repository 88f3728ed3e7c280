from __future__ import annotations

import json

import pytest
import torch

from firsttoken.study import machine, paths
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.profile import load_profile
from firsttoken.study.timing import Stopwatch, timed, torch_threads
from firsttoken_studies.experiments import run_experiment
from firsttoken_studies.nb00_machine.study import MachineConfig, measure_ceilings
from firsttoken_studies.record.results import read_result

SMALL = {"machine.copy_mib": 1, "machine.disk_mib": 1, "machine.matmul_n": 16, "machine.repeats": 2}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("11th Gen Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "intel-core-i7-1185g7"),
        ("NVIDIA H200", "nvidia-h200"),
        ("", "unknown"),
    ],
)
def test_slugs(name: str, slug: str) -> None:
    assert machine.slugify(name) == slug


def test_the_description_is_complete_and_plain() -> None:
    described = machine.describe()
    assert described["slug"] == machine.machine_slug()
    assert described["cores"] >= 1 and described["memory_bytes"] > 0
    assert set(described["packages"]) == set(machine.PACKAGES)
    json.dumps(described, allow_nan=False)


def test_every_ceiling_has_its_rows_and_the_file_is_gone(root) -> None:
    rows = measure_ceilings(MachineConfig(1, 1, 16, 2), "cpu")
    kinds = ("memcpy", "matmul_fp32", "matmul_bf16", "disk_read_cold", "disk_read_warm")
    assert sorted((row["what"], row["repeat"]) for row in rows) == sorted((w, i) for w in kinds for i in (0, 1))
    assert all(row["value"] > 0 and row["unit"] in ("GB_per_s", "GFLOP_per_s") and row["how"] for row in rows)
    assert list(paths.CACHE.glob("disk-test-*")) == []


def test_the_file_is_gone_after_an_error_too(root, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("firsttoken_studies.nb00_machine.study.evict", full)
    with pytest.raises(FirstTokenError, match="disk test of 1 MiB: No space left"):
        measure_ceilings(MachineConfig(1, 1, 16, 1), "cpu")
    assert list(paths.CACHE.glob("disk-test-*")) == []


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(FirstTokenError, match=r"machine.repeats must be at least 1"):
        MachineConfig(1, 1, 1, 0)


def test_an_experiment_writes_its_result(root) -> None:
    result = run_experiment("machine", load_profile("quick", seed=5, **SMALL))
    assert read_result(result.path) == result
    assert result.parameters["machine"]["repeats"] == 2
    assert (result.seeds, result.summary.of("memcpy")["n"]) == ([5], 2)


def test_clocks() -> None:
    calls: list[int] = []
    seconds = timed(lambda: calls.append(1), repeats=3, warmup=2)
    assert (len(seconds), len(calls)) == (3, 5)
    assert min(seconds) >= 0
    with Stopwatch() as watch:
        inside = watch.seconds
    assert watch.seconds >= inside >= 0
    assert watch.seconds == watch.seconds, "a stopped watch stands still"
    with pytest.raises(ValueError, match="at least 1"):
        timed(lambda: None, repeats=0)


def test_threads_are_as_they_were_after_an_error_too() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
