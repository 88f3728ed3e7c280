"""bf16 where the processor is fast at it, float32 elsewhere; asked of torch, confirmed by a product, kept."""

from __future__ import annotations

import json

import pytest
import torch

from firsttoken.study import dtypes, machine, paths
from firsttoken.study.dtypes import ProductRates
from firsttoken.study.profile import load_profile
from firsttoken.study.system.compiled import ACCELERATOR

FAST, SLOW = ProductRates(True, 100.0, 250.0), ProductRates(False, 100.0, 1.0)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for cached in (dtypes.cpu_rates, dtypes._warn_if_slow):
        cached.cache_clear()
    yield
    for cached in (dtypes.cpu_rates, dtypes._warn_if_slow):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("rates", "dtype"),
    [(FAST, BF16), (SLOW, FP32), (ProductRates(True, 100.0, 80.0), FP32), (ProductRates(False, 100.0, 250.0), FP32)],
    ids=["fast", "without instructions", "with instructions, but slower", "fast without instructions"],
)
def test_auto_is_bf16_where_torch_has_it_and_the_product_is_as_fast(root, monkeypatch, rates, dtype) -> None:
    monkeypatch.setattr(dtypes, "_measure", lambda: rates)
    profile = load_profile("quick", dtype="auto")
    assert profile.torch_dtype() == dtypes.computing("cpu") == dtype
    assert profile.parameters()["dtype"] == profile.dtype_name == dtypes.name_of(dtype)
    assert dtypes.why("cpu").startswith(profile.dtype_name)
    assert profile.stored_dtype() == BF16, "checkpoints are the same on every machine"


def test_what_is_asked_for_is_done_and_a_slow_one_named_with_the_factor(root, monkeypatch, capsys) -> None:
    monkeypatch.setattr(dtypes, "_measure", lambda: SLOW)
    assert load_profile("quick", dtype="float32").torch_dtype() == FP32
    assert capsys.readouterr().err == ""
    profile = load_profile("quick", dtype="bfloat16")
    assert (profile.torch_dtype(), profile.stored_dtype(), profile.torch_dtype()) == (BF16, BF16, BF16)
    (line,) = capsys.readouterr().err.splitlines()
    assert "100 times slower than float32" in line and "dtype: auto" in line


@pytest.mark.parametrize(
    ("name", "stored", "fast", "slow"),
    [
        ("auto", BF16, BF16, FP32),
        ("auto", FP32, FP32, FP32),
        ("stored", BF16, BF16, BF16),
        ("float32", BF16, FP32, FP32),
    ],
)
def test_a_checkpoint_is_widened_only_where_halves_are_slow(root, monkeypatch, name, stored, fast, slow) -> None:
    for rates, dtype in ((FAST, fast), (SLOW, slow)):
        dtypes.cpu_rates.cache_clear()
        (paths.CACHE / "cpu-rates.json").unlink(missing_ok=True)
        monkeypatch.setattr(dtypes, "_measure", lambda rates=rates: rates)
        assert dtypes.serving(name, stored, "cpu") == dtype


def test_training_is_cast_to_bf16_only_where_that_is_fast_or_the_weights_are_halves(root, monkeypatch) -> None:
    def computed(weights: torch.dtype) -> torch.dtype:
        layer = torch.nn.Linear(4, 4, dtype=weights)
        with dtypes.autocast(layer):
            return layer(torch.ones(1, 4)).dtype

    monkeypatch.setattr(dtypes, "_measure", lambda: SLOW)
    assert (computed(FP32), computed(BF16)) == (FP32, BF16)
    dtypes.cpu_rates.cache_clear()
    (paths.CACHE / "cpu-rates.json").unlink()
    monkeypatch.setattr(dtypes, "_measure", lambda: FAST)
    assert computed(FP32) == BF16


def test_the_product_is_measured_once_a_machine_and_another_ones_file_is_not_believed(root, monkeypatch) -> None:
    measured = []
    monkeypatch.setattr(dtypes, "_measure", lambda: measured.append(1) or FAST)

    def rates() -> ProductRates:
        dtypes.cpu_rates.cache_clear()
        return dtypes.cpu_rates()

    assert [rates(), rates()] == [FAST, FAST] and len(measured) == 1
    file = paths.CACHE / "cpu-rates.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    kept["machine"]["flags"] = ["avx512_bf16"]
    file.write_text(json.dumps(kept), encoding="utf-8")
    assert rates() == FAST and len(measured) == 2, "a cache that was copied here from another machine"
    for damaged in ("{", "[]", "{}", json.dumps(kept | {"float32": "fast", "machine": machine.identity()})):
        file.write_text(damaged, encoding="utf-8")
        before = len(measured)
        assert rates() == FAST and len(measured) == before + 1


def test_a_cache_that_cannot_be_written_is_done_without(root, monkeypatch) -> None:
    paths.CACHE.parent.mkdir(exist_ok=True)
    paths.CACHE.write_text("a file where a folder should be", encoding="utf-8")
    monkeypatch.setattr(dtypes, "_measure", lambda: SLOW)
    assert dtypes.cpu_rates() == SLOW


def test_the_measured_rates_are_rates(root) -> None:
    threads = torch.get_num_threads()
    rates = dtypes._measure()
    assert rates.float32 > 0 and rates.bfloat16 > 0 and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("architecture", "flags", "limit", "name"),
    [
        ("x86_64", "fpu avx avx2 fma", "", "avx2"),
        ("x86_64", "avx avx2 avx512f", "", "avx512"),
        ("x86_64", "avx avx2 avx512f avx512_bf16", "", "avx512bf16"),
        ("x86_64", "avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "", "amx"),
        ("x86_64", "avx avx2 avx512f avx512_bf16 amx_bf16", "avx2", "avx2"),
        ("x86_64", "sse sse2", "", "x86_64"),
        ("aarch64", "fp asimd", "", "neon"),
        ("aarch64", "fp asimd bf16", "", "neonbf16"),
        ("arm64", "", "", "neon"),
    ],
)
def test_a_machine_is_named_by_the_vectors_it_computes_with(monkeypatch, architecture, flags, limit, name) -> None:
    told = f"flags\t\t: {flags}\n" if architecture == "x86_64" else f"Features\t: {flags}\n"
    monkeypatch.setattr(machine, "cpuinfo", lambda: told if flags else "")
    monkeypatch.setattr(machine.platform, "machine", lambda: architecture)
    monkeypatch.setattr(machine, "gpu_description", lambda: None)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    for variable in ("ONEDNN_MAX_CPU_ISA", ACCELERATOR):
        monkeypatch.delenv(variable, raising=False)
    for cached in (machine.cpu_flags, machine.machine_slug):
        cached.cache_clear()
    try:
        assert machine.vector_extension() == name
        assert machine.machine_slug().endswith(f"-{name}-{machine.cores()}c")
        machine.machine_slug.cache_clear()
        monkeypatch.setenv(ACCELERATOR, "none")
        assert machine.machine_slug().endswith(f"-{name}-{machine.cores()}c-none")
    finally:
        for cached in (machine.cpu_flags, machine.machine_slug):
            cached.cache_clear()
