"""The processor, and the bus between it and a GPU, as far as the system tells about them."""

import os
import platform
import re
import subprocess

from firsttoken.study.system import kernel_files

_DISPLAY = "0x03"  # PCI class of display controllers, data-centre GPUs included
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s of a lane -> PCI Express


def arm_core() -> str:
    """The name of the cores on arm64 under Linux, where /proc/cpuinfo has numbers, as ``lscpu`` knows it; of several
    kinds that of the last, and "" where there is no such command or it knows none."""
    if "CPU implementer" not in cpuinfo():
        return ""
    try:
        command, environment = ["lscpu"], os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    names = re.findall(r"^\s*Model name:\s*(\S.*)$", done.stdout, re.MULTILINE)
    return next((name.strip() for name in reversed(names) if name.strip() != "-"), "")


def cpu_model() -> str:
    """The processor's marketing name; on arm64 under Linux, which has none, that of its cores; its architecture where
    the system tells neither."""
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    # for programs of 32 bits, and in some vendors' kernels, the name is the instruction set's: "ARMv8 Processor rev 1"
    name = arm_core() or (match.group(1).strip() if match else kernel_files.sysctl("machdep.cpu.brand_string"))
    return name or platform.processor() or platform.machine()


def virtualised() -> bool | None:
    """Return whether a hypervisor shows; None where the system does not tell."""
    if flags := re.search(r"^flags\s*:(.*)$", cpuinfo(), re.MULTILINE):
        return "hypervisor" in flags.group(1).split()
    return {"0": False, "1": True}.get(kernel_files.sysctl("kern.hv_vmm_present"))


def cpuinfo() -> str:
    """Return the text of Linux about its processors, "" elsewhere."""
    return kernel_files.read(kernel_files.PROC / "cpuinfo")


def link_of_gpu() -> str | None:
    """ "PCIe 4.0 x16" of the first display controller whose link the kernel knows; None where there is none."""
    for device in sorted((kernel_files.SYS / "bus" / "pci" / "devices").glob("*")):
        if not kernel_files.read(device / "class").startswith(_DISPLAY):
            continue
        speed = kernel_files.read(device / "max_link_speed").partition(" ")[0]
        width = kernel_files.read(device / "max_link_width")
        if speed in _GENERATIONS and width:
            return f"PCIe {_GENERATIONS[speed]}.0 x{width}"
    return None
