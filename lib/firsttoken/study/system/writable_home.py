"""A home that cannot be written, as in containers and on shared machines: where programs keep their things instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_USUAL = {  # the folder that each program takes without the variable
    "JUPYTER_RUNTIME_DIR": ("~/.local/share/jupyter/runtime", "~/Library/Jupyter/runtime"),
    "IPYTHONDIR": ("~/.ipython", "~/.ipython"),
    "MPLCONFIGDIR": ("~/.config/matplotlib", "~/.matplotlib"),
    "HF_HOME": ("~/.cache/huggingface", "~/.cache/huggingface"),
}


def kept_elsewhere(folder: Path) -> dict[str, str]:
    """Environment variables that put below ``folder`` what Jupyter, IPython, matplotlib and the Hub can't keep at home.

    Without its runtime folder no kernel starts; without the others each process makes its caches anew. A variable that
    is set already stays.
    """
    return {
        name: str(folder / name.lower().split("_")[0].removesuffix("configdir"))
        for name, usual in _USUAL.items()
        if name not in os.environ and not _writable(Path(os.path.expanduser(usual[sys.platform == "darwin"])))
    }


def _writable(folder: Path) -> bool:
    """Whether ``folder`` takes files, or can be made."""
    # not Path.exists: it raises where a folder on the way may not be entered
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    return nearest.is_dir() and os.access(nearest, os.W_OK)
