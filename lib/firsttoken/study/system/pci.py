"""The bus between processor and GPU, as Linux tells it."""

from __future__ import annotations

from firsttoken.study.system import kernel_files

_DISPLAY = "0x03"  # PCI class of display controllers, data-centre GPUs included
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s of a lane -> PCI Express


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
