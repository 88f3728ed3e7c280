"""Whether a device that a user names is here."""

from __future__ import annotations

from firsttoken.study.errors import StageError


def check_device(name: str) -> None:
    """Raises StageError for a ``name`` that torch does not know, or that this machine does not have; imports torch."""
    import torch

    try:
        torch.empty(1, device=torch.device(name)).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # as torch was built
        told = " ".join(str(error).split())[:120]
        raise StageError(f"no device {name!r} can be used here ({told}); say cpu, or cuda where a GPU is") from error
