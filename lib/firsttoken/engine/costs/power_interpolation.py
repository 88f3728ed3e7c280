"""Times that were measured at some sizes, as powers of the size between two of them: arrays, beside the plain lines of
``interpolation.py``, which are read where nothing is installed."""

from __future__ import annotations

import numpy as np


def power_between(sizes: np.ndarray, curve: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The values at ``sizes`` of ``curve`` (sizes, ascending, and values above 0): a power of the size between two of
    them, in proportion beyond the last, as the first below it."""
    at, values = curve
    found = np.exp(np.interp(np.log(sizes), np.log(at), np.log(values)))
    return np.asarray(found * np.maximum(1.0, sizes / at[-1]))
