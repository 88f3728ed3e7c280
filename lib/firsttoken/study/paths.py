"""Every folder, named once.

The package is installed in editable mode from a clone, so the repository is found from this file, unless
``FIRSTTOKEN_ROOT`` names another. What is written goes there, too, unless ``FIRSTTOKEN_OUT`` names a folder for it (a
read-only checkout), and ``FIRSTTOKEN_CACHE`` one for what can be had again (a larger disk).
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(os.environ.get("FIRSTTOKEN_ROOT") or Path(__file__).resolve().parents[3])
OUT = Path(os.environ.get("FIRSTTOKEN_OUT") or ROOT).resolve()
CACHE = Path(os.environ.get("FIRSTTOKEN_CACHE") or OUT / ".cache").resolve()  # assets and converted models; git-ignored
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = OUT / "executed"  # copies that papermill wrote, by profile; git-ignored
ENV = ROOT / "env"
PROFILES = ENV / "profiles"
DATA = ROOT / "data"
CLAIMS = DATA / "claims.yaml"
CLAIMS_PAGE = DATA / "CLAIMS.md"
CAPACITY_PAGE = DATA / "CAPACITY.md"
TEMPLATES = DATA / "templates"  # of the pages that show results
RECORDED = DATA / "results"  # committed with the code
RESULTS = OUT / "data" / "results"  # of this reader, the same folder unless FIRSTTOKEN_OUT is set
ADAPTERS = DATA / "adapters"
FIGURES = OUT / "figures"


def expanded(path: str | Path) -> Path:
    """``path`` with "~" as the reader's home; that of a user who does not exist is a folder that does not."""
    return Path(os.path.expanduser(path))
