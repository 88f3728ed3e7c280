"""The processor, and the bus between it and a GPU, as far as the system tells about them."""

import platform
import re

from firsttoken.study.system import kernel_files

# The processors of arm64 by name: Linux tells as numbers which company made a core and which of its cores it is.
#
# The numbers are those of the register MIDR_EL1; Linux lists them in ``arch/arm64/include/asm/cputype.h``, and
# ``lscpu`` names them.

_FIELD = re.compile(r"^(processor|CPU implementer|CPU part)\s*:\s*(0x[0-9a-f]+|\d+)\s*$", re.IGNORECASE | re.MULTILINE)
_NAMES = {  # by implementer and part, from the smallest cores to the largest
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD04): "Cortex-A35",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD0E): "Cortex-A76AE",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD4B): "Cortex-A78C",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD89): "Cortex-A720AE",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD4C): "Cortex-X1C",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD82): "Cortex-X4",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD4A): "Neoverse-E1",
    (0x41, 0xD0C): "Neoverse-N1",  # Graviton 2, Ampere Altra
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x41, 0xD40): "Neoverse-V1",  # Graviton 3
    (0x41, 0xD4F): "Neoverse-V2",  # Graviton 4, Grace, Axion
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x42, 0x516): "Broadcom ThunderX2",
    (0x43, 0x0A1): "Cavium ThunderX",
    (0x43, 0x0AF): "Cavium ThunderX2",
    (0x46, 0x001): "Fujitsu A64FX",
    (0x48, 0xD01): "HiSilicon TSV110",  # Kunpeng 920
    (0x48, 0xD02): "HiSilicon HIP09",
    (0x4E, 0x003): "NVIDIA Denver 2",
    (0x4E, 0x004): "NVIDIA Carmel",
    (0x4E, 0x010): "NVIDIA Olympus",
    (0x51, 0x803): "Qualcomm Kryo 3XX Silver",
    (0x51, 0x805): "Qualcomm Kryo 4XX Silver",
    (0x51, 0x802): "Qualcomm Kryo 3XX Gold",
    (0x51, 0x804): "Qualcomm Kryo 4XX Gold",
    (0x51, 0xC00): "Qualcomm Falkor",
    (0x51, 0x001): "Qualcomm Oryon",
    (0x61, 0x000): "Apple virtual",  # what Apple's hypervisor tells its guests of every chip
    (0x61, 0x022): "Apple M1 Icestorm",
    (0x61, 0x023): "Apple M1 Firestorm",
    (0x61, 0x024): "Apple M1 Pro Icestorm",
    (0x61, 0x025): "Apple M1 Pro Firestorm",
    (0x61, 0x028): "Apple M1 Max Icestorm",
    (0x61, 0x029): "Apple M1 Max Firestorm",
    (0x61, 0x032): "Apple M2 Blizzard",
    (0x61, 0x033): "Apple M2 Avalanche",
    (0x61, 0x034): "Apple M2 Pro Blizzard",
    (0x61, 0x035): "Apple M2 Pro Avalanche",
    (0x61, 0x038): "Apple M2 Max Blizzard",
    (0x61, 0x039): "Apple M2 Max Avalanche",
    (0x6D, 0xD49): "Microsoft Cobalt 100",
    (0x70, 0x303): "Phytium FTC310",
    (0x70, 0x660): "Phytium FTC660",
    (0x70, 0x661): "Phytium FTC661",
    (0x70, 0x662): "Phytium FTC662",
    (0x70, 0x663): "Phytium FTC663",
    (0x70, 0x664): "Phytium FTC664",
    (0x70, 0x862): "Phytium FTC862",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1A",
    (0xC0, 0xAC5): "Ampere-1B",
}
_SIZES = {core: size for size, core in enumerate(_NAMES)}

_DISPLAY = "0x03"  # PCI class of display controllers, data-centre GPUs included
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s of a lane -> PCI Express


def largest_core(cpuinfo: str) -> str:
    """The name of the core in ``cpuinfo``, which is the text of /proc/cpuinfo, and "" where it names no implementer.

    Of processors that have cores of several kinds it is the largest kind: that to which the kernel gives the highest
    capacity, or the last one in the table where the kernel gives none. A core that is not in the table is later than
    it and is named by its numbers.
    """
    number, implementer, cores = 0, 0, set[tuple[int, tuple[int, int]]]()
    for field, value in _FIELD.findall(cpuinfo):
        if field == "processor":
            number = int(value, 0)
        elif field == "CPU implementer":
            implementer = int(value, 0)
        else:
            cores.add((_capacity(number), (implementer, int(value, 0))))
    if not cores:
        return ""
    _, core = max(cores, key=lambda core_entry: (core_entry[0], _SIZES.get(core_entry[1], len(_SIZES)), core_entry[1]))
    return _NAMES.get(core) or f"Arm {core[0]:#04x}-{core[1]:#05x}"


def _capacity(number: int) -> int:
    """Return the capacity of a core by the kernel's estimate, 1024 for the best one; 0 where it does not say."""
    text = kernel_files.read(kernel_files.SYS / "devices" / "system" / "cpu" / f"cpu{number}" / "cpu_capacity")
    return int(text) if text.isdecimal() else 0


def cpu_model() -> str:
    """The processor's marketing name; on arm64 under Linux, which has none, that of its largest core; its architecture
    where the system tells neither."""
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    # for programs of 32 bits, and in some vendors' kernels, the name is the instruction set's: "ARMv8 Processor rev 1"
    name = largest_core(cpuinfo()) or (
        match.group(1).strip() if match else kernel_files.sysctl("machdep.cpu.brand_string")
    )
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
