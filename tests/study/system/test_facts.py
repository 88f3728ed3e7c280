"""Processor, allowance, bus: what is told is read right, and what is not told is None."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firsttoken.study import machine
from firsttoken.study.system.cgroup_limits import cores, memory_bytes
from firsttoken.study.system.kernel_files import sysctl
from firsttoken.study.system.processor import cpu_model, cpuinfo, link_of_gpu, virtualised

MAC = """case "$2" in
    machdep.cpu.brand_string) echo "Apple M2 Pro";;
    hw.memsize) echo 17179869184;;
    kern.hv_vmm_present) echo 0;;
    *) echo "sysctl: unknown oid '$2'" >&2; exit 1;;
esac"""


def tell_cpu(proc: Path, text: str) -> None:
    proc.mkdir()
    (proc / "cpuinfo").write_text(text)


def test_a_guest_a_host_and_a_processor_that_does_not_tell(proc: Path) -> None:
    tell_cpu(proc, "model name\t: AMD EPYC 7B13\nflags\t\t: fpu avx2 hypervisor sse\n")
    assert (cpu_model(), virtualised()) == ("AMD EPYC 7B13", True)
    (proc / "cpuinfo").write_text("model name\t: AMD EPYC 7B13\nflags\t\t: fpu avx2 no_hypervisor\n")
    assert virtualised() is False
    (proc / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n")
    assert virtualised() is None, "arm64 lists no flag for it"
    assert cpu_model()


LSCPU = """Architecture: aarch64
Vendor ID: ARM
  Model name:           Cortex-A55
    Model:              0
  Model name:           Cortex-A78
"""


@pytest.mark.parametrize(
    ("told", "slug"), [(LSCPU, "cortex-a78"), ("Model name: -\n", "armv8-rev-1"), (None, "armv8-rev-1")]
)
def test_a_processor_of_arm64_has_the_name_of_its_last_cores(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, slug: str
) -> None:
    """Its /proc/cpuinfo has no model name, or the instruction set's."""
    tell_cpu(proc, "model name\t: ARMv8 Processor rev 1\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n")
    if told is not None:
        (tmp_path / "lscpu").write_text(f"#!/bin/sh\nprintf '%s' '{told}'\n")
        (tmp_path / "lscpu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr(machine, "gpu_description", lambda: None)
    for cached in (machine.cpu_flags, machine.machine_slug):
        monkeypatch.setattr(machine, cached.__name__, cached.__wrapped__)
    assert machine.machine_slug() == f"{slug}-neon-{cores()}c"


def test_without_proc(proc: Path) -> None:
    assert cpuinfo() == "" and virtualised() is None and cpu_model()


def test_macos_is_asked_in_its_own_way(macos, without) -> None:
    macos(MAC)
    without("sysconf", "sched_getaffinity")
    assert (cpu_model(), virtualised(), memory_bytes()) == ("Apple M2 Pro", False, 16 << 30)
    assert sysctl("hw.nothing") == ""


def test_a_macos_that_tells_nothing(macos, without) -> None:
    macos("exit 1")
    without("sysconf", "sched_getaffinity")
    assert virtualised() is None and memory_bytes() is None and cpu_model() and cores() == os.cpu_count()


def test_sysctl_is_asked_on_macos_alone(macos, monkeypatch: pytest.MonkeyPatch) -> None:
    macos("echo 1")
    monkeypatch.setattr("sys.platform", "linux")
    assert sysctl("hw.memsize") == ""


@pytest.mark.parametrize("reason", [ValueError, OSError])
def test_a_memory_size_that_sysconf_does_not_know(reason, sys_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise reason(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert memory_bytes() is None


def test_a_containers_limits_cut_what_there_is(sys_folder: Path, without) -> None:
    group = sys_folder / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text("1048576\n")
    assert (cores(), memory_bytes()) == (1, 1 << 20)
    without("sysconf", "sched_getaffinity")
    assert (cores(), memory_bytes()) == (1, 1 << 20)
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert cores() == os.cpu_count() and memory_bytes() is None


def test_without_control_groups_all_is_usable(sys_folder: Path, without) -> None:
    assert memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    without("sched_getaffinity")
    assert cores() == os.cpu_count()


def test_the_link_of_a_gpu(sys_folder: Path) -> None:
    assert link_of_gpu() is None

    def device(name: str, **files: str) -> None:
        folder = sys_folder / "bus" / "pci" / "devices" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")

    device("0000:00:01.0", **{"class": "0x020000", "max_link_speed": "8.0 GT/s PCIe", "max_link_width": "8"})
    device("0000:00:02.0", **{"class": "0x030000"})
    assert link_of_gpu() is None, "a network card, and a display whose link is not told"
    device("0000:00:03.0", **{"class": "0x030200", "max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16"})
    assert link_of_gpu() == "PCIe 4.0 x16"
