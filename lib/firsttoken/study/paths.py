"""Every folder, named once.

The package is installed in editable mode from a clone, so the repository is found from this file;
``FIRSTTOKEN_ROOT`` and ``FIRSTTOKEN_CACHE`` override it (a read-only checkout, a larger disk).
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(os.environ.get("FIRSTTOKEN_ROOT") or Path(__file__).resolve().parents[3])
CACHE = Path(os.environ.get("FIRSTTOKEN_CACHE") or ROOT / ".cache")  # assets and converted models; git-ignored
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "executed"  # copies that papermill wrote, by profile; git-ignored
ENV = ROOT / "env"
PROFILES = ENV / "profiles"
DATA = ROOT / "data"
CLAIMS = DATA / "claims.yaml"
RESULTS = DATA / "results"
ADAPTERS = DATA / "adapters"
FIGURES = ROOT / "figures"
