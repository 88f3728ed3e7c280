"""Models without memory for their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made inside the block have parameters of ``dtype`` on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
