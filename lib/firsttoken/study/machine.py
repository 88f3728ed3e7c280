"""What machine is this: the part of a result without which its numbers mean nothing.

Its name carries what changes results, the vector extensions and the cores, or the GPU; the description keeps the rest.
"""

import os
import platform
import re
import subprocess
from functools import cache
from typing import Any

from firsttoken.study.system.cgroup_limits import cores, memory_bytes
from firsttoken.study.system.compiled import KERNELS, accelerator_name, compiler
from firsttoken.study.system.processor import cpu_model, cpuinfo, virtualised

PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")
_EXTENSIONS = (("amx", "amx_bf16"), ("avx512bf16", "avx512_bf16"), ("avx512", "avx512f"), ("avx2", "avx2"))
_VECTORS = re.compile(r"s?sse|avx|fma|f16c|amx|asimd|neon|sve|sme(?!p)|bf16|i8mm|fphp")
_NOISE = re.compile(
    r"\((r|tm|c)\)|@.*|\b\d+-core\b|\bcpu\b|\bprocessor\b|\bwith radeon.*|\b\d+(st|nd|rd|th) gen\b", re.IGNORECASE
)


def describe() -> dict[str, Any]:
    """The machine as a result records it; what cannot be found out is None. It holds no host or user name."""
    gpu = gpu_description()
    return {
        "slug": machine_slug(),
        "cpu": cpu_model(),
        "vector": vector_extension(),
        "flags": sorted(cpu_flags()),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "virtualised": virtualised(),
        "gpu": gpu["name"] if gpu else None,
        "gpu_memory_bytes": gpu["memory_bytes"] if gpu else None,
        "gpu_driver": gpu["driver"] if gpu else None,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


@cache
def machine_slug() -> str:
    """A short name for folders: the GPU where there is one ("nvidia-h200"), else the CPU, the widest vectors that it
    computes with, and its cores ("amd-epyc-avx2-2c"); and what the environment puts in the place of the engine's own
    kernels ("amd-epyc-avx2-2c-none")."""
    if gpu := gpu_description():
        return slugify(gpu["name"])
    other = "" if accelerator_name() == KERNELS else f"-{accelerator_name()}"
    return f"{slugify(cpu_model())}-{vector_extension()}-{cores()}c{other}"


def identity() -> dict[str, Any]:
    """Return the values on which a kept measurement of this machine depends: with another value it is another machine
    or another torch."""
    import torch

    return {"slug": machine_slug(), "cpu": cpu_model(), "flags": sorted(cpu_flags()), "torch": torch.__version__}


def vector_extension() -> str:
    """The widest vectors that torch computes with: "amx", "avx512bf16", "avx512", "avx2", "neon", "neonbf16", else the
    architecture's name. ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` can lower it."""
    flags = cpu_flags()
    architecture = platform.machine().lower()
    if architecture in ("arm64", "aarch64"):
        return "neonbf16" if "bf16" in flags else "neon"
    limits = (os.environ.get("ATEN_CPU_CAPABILITY", ""), os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    extensions = _EXTENSIONS[-1:] if any("avx2" in limit.lower() for limit in limits) else _EXTENSIONS
    return next((name for name, flag in extensions if flag in flags), architecture or "unknown")


def kernels_multiply() -> bool:
    """Return whether the engine's steps are its own kernels', as far as can be told before torch: they are wanted and
    can be compiled, and oneDNN has no tiles to multiply with."""
    return accelerator_name() == KERNELS and compiler() is not None and "amx_bf16" not in cpu_flags()


@cache
def cpu_flags() -> frozenset[str]:
    """The vector instructions that the processor names, in the kernel's words; none where the system does not tell."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    return frozenset(filter(_VECTORS.match, match.group(1).split())) if match else frozenset()


def slugify(name: str) -> str:
    """A hardware name in lower case, with trade marks, clock rates and core counts left out."""
    return re.sub(r"[^a-z0-9]+", "-", _NOISE.sub(" ", name).lower()).strip("-") or "unknown"


def gpu_description() -> dict[str, Any] | None:
    """Name, memory in bytes and driver version of the first CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory_bytes": properties.total_memory, "driver": _gpu_driver()}


@cache
def _gpu_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)


def _version(package: str) -> str | None:
    from importlib import metadata  # 7 ms, which a service needs not

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
