"""Every folder, named once.

The package is installed in editable mode from a clone, so the repository is found from this file, unless
``FIRSTTOKEN_ROOT`` names another. What is written goes there, too, unless ``FIRSTTOKEN_OUT`` names a folder for it (a
read-only checkout), and ``FIRSTTOKEN_CACHE`` one for what can be had again (a larger disk). Without the latter
the cache is the clone's own, whatever ``FIRSTTOKEN_OUT`` says, and lies under that only where the clone cannot be
written. Where the package alone is installed there is no clone: what serves a folder works, and the cache is the
user's.
"""

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """``path`` with "~" as the reader's home; that of a user who does not exist is a folder that does not."""
    return Path(os.path.expanduser(path))


def named(variable: str, otherwise: Path) -> Path:
    """The folder that an environment variable names, absolute; ``otherwise`` where it is not set or empty."""
    return expanded(os.environ.get(variable, "").strip() or otherwise).resolve()


def cache_of(root: Path, out: Path) -> Path:
    """The cache where no variable names one: the clone's, or ``out``'s where the clone's cannot be written."""
    default = root / ".cache"
    nearest = next(folder for folder in (default, *default.parents) if folder.exists())
    return default if os.access(nearest, os.W_OK) else out / ".cache"


ROOT = named("FIRSTTOKEN_ROOT", Path(__file__).resolve().parents[3])
IS_CLONE = (ROOT / "env" / "profiles").is_dir()
OUT = named("FIRSTTOKEN_OUT", ROOT)
_CACHE = cache_of(ROOT, OUT) if IS_CLONE else named("XDG_CACHE_HOME", Path("~/.cache")) / "firsttoken"
CACHE = named("FIRSTTOKEN_CACHE", _CACHE)  # assets and converted models; git-ignored
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = OUT / "executed"  # copies that papermill wrote, by profile; git-ignored
ENV = ROOT / "env"
PROFILES = ENV / "profiles"
DATA = ROOT / "data"
CLAIMS_PAGE = DATA / "CLAIMS.md"
CAPACITY_PAGE = DATA / "CAPACITY.md"
INDEX = DATA / "index.yaml"  # of the reports' figures, tables and algorithms
INDEX_PAGE = DATA / "INDEX.md"
MECHANISMS = DATA / "mechanisms.yaml"
TEMPLATES = DATA / "templates"  # of the pages that show results
STUDIES = ROOT / "lib" / "firsttoken_studies"  # a folder of it has what belongs to one notebook, claims among it
RECORD_LOG = DATA / "record.jsonl"  # a line for every run that was recorded
RECORDED = DATA / "results"  # committed with the code
RESULTS = OUT / "data" / "results"  # of this reader, the same folder unless FIRSTTOKEN_OUT is set
ADAPTERS = DATA / "adapters"
FIGURES = OUT / "figures"  # committed with the code
PUBLISHES = "FIRSTTOKEN_PUBLISHES"  # set in the processes of `firsttoken run --publish`


def own_figures() -> Path:
    """Return the folder of this run's figures: one that git ignores, so that a reader's run leaves the committed ones
    as they are, but where they are to be committed, or ``FIRSTTOKEN_OUT`` names a folder for them."""
    return FIGURES if os.environ.get(PUBLISHES) or OUT != ROOT else FIGURES / "own"
