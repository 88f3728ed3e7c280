"""The processor, as far as the system tells about it."""

from __future__ import annotations

import platform
import re

from firsttoken.study.system import kernel_files
from firsttoken.study.system.arm_cores import largest_core
from firsttoken.study.system.sysctl import sysctl


def cpu_model() -> str:
    """The processor's marketing name; on arm64 under Linux, which has none, that of its largest core; its architecture
    where the system tells neither."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    # for programs of 32 bits, and in some vendors' kernels, the name is the instruction set's: "ARMv8 Processor rev 1"
    name = largest_core(cpuinfo()) or (found.group(1).strip() if found else sysctl("machdep.cpu.brand_string"))
    return name or platform.processor() or platform.machine()


def virtualised() -> bool | None:
    """Whether a hypervisor shows; None where the system does not tell."""
    if flags := re.search(r"^flags\s*:(.*)$", cpuinfo(), re.MULTILINE):
        return "hypervisor" in flags.group(1).split()
    return {"0": False, "1": True}.get(sysctl("kern.hv_vmm_present"))


def cpuinfo() -> str:
    """What Linux writes about its processors, "" elsewhere."""
    return kernel_files.read(kernel_files.PROC / "cpuinfo")
