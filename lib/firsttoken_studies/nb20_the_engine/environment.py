"""The environment of CPS (Table 1) beside this machine's, and which of its parts cannot have been together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firsttoken.study.machine import describe
from firsttoken.study.profile import Profile
from firsttoken.study.summary import Summary
from firsttoken.study.system import NOT_HERE
from firsttoken.study.system.processor import link_of_gpu
from firsttoken_studies.record.results import Outcome, Rows

TABLE_1 = {  # as printed
    "CPU": "Intel Core i5-10210U, 1.60 GHz",
    "GPU": "NVIDIA RTX A6000, 48 GB",
    "system memory": "512 GB",
    "interconnect": "PCIe 4.0 x16",
    "engine": "vLLM 0.2.4, CUDA 12.1",
    "model": "Qwen2.5-0.5B",
    "temperature": "1.0",
    "dataset": "ShareGPT, 200 samples",
}


@dataclass(frozen=True)
class Limit:
    """The most that a part ``allows``, and the amount that Table 1 puts beside it; both cannot go together where
    ``asked`` is more."""

    part: str
    other: str
    allows: float
    asked: float
    unit: str
    source: str

    @property
    def broken(self) -> bool:
        return self.asked > self.allows


LIMITS = (
    Limit("CPU", "system memory", 64, 512, "GB", "Intel's product page of the i5-10210U: at most 64 GB"),
    Limit("CPU", "interconnect", 3, 4, "PCIe generation", "Intel's product page of the i5-10210U: PCI Express 3.0"),
    Limit("CPU", "interconnect", 16, 16, "PCIe lanes", "Intel's product page of the i5-10210U: up to 16 lanes"),
    Limit("engine", "model", 0.2, 0.3, "vLLM minor version", "vLLM issue 3463: Qwen2 needs 0.3.0 or later"),
    Limit("GPU", "interconnect", 4, 4, "PCIe generation", "NVIDIA's data sheet of the RTX A6000: PCI Express 4.0 x16"),
)


def environment(profile: Profile) -> Outcome:
    """Rows {what: part | limit, ...}: Table 1 beside this machine, and its limits one by one."""
    measured = _here(profile)
    rows: Rows = [
        {"what": "part", "component": name, "paper": paper, "here": measured[name]} for name, paper in TABLE_1.items()
    ]
    rows += [{"what": "limit", **vars(limit), "broken": limit.broken} for limit in LIMITS]
    return Outcome(rows, provenance={"source": "this machine"})


def environment_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Count the pairs of parts that cannot have been together."""
    summary = Summary()
    broken = [row["broken"] for row in rows if row["what"] == "limit"]
    summary.add("impossible_pairs", {"value": sum(broken), "n": len(broken)})
    return summary


def _here(profile: Profile) -> dict[str, str]:
    """Return this machine's part for each component of Table 1."""
    machine = describe()
    memory = machine["memory_bytes"]
    return {
        "CPU": f"{machine['cpu']}, {machine['cores']} cores",
        "GPU": machine["gpu"] or "none",
        "system memory": f"{memory / 1e9:.0f} GB" if memory else NOT_HERE,
        "interconnect": link_of_gpu() or "none to a GPU",
        "engine": f"firsttoken {importlib.metadata.version('firsttoken')}, torch {machine['packages']['torch']}",
        "model": profile.model,
        "temperature": "0 (greedy), for equal tokens under every policy",
        "dataset": "ShareGPT, 200 conversations a seed (replayed)",
    }
