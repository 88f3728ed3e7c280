"""Accelerators, which may compute in the place of stock torch: the one protocol that the engine, stages and swarms ask.

A package beside the library registers its accelerator by name (``study.extensions``). Where none is installed, or the
environment asks for torch alone, this class computes, with transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from firsttoken.assets.empty_model import build_on_meta
from firsttoken.study.extensions import extension, registered
from firsttoken.study.system.compiled import NONE, accelerator_name

if TYPE_CHECKING:
    import numpy as np

    from firsttoken.engine.attention import Attend
    from firsttoken.engine.kv import KVPool

LoraPair = tuple[Tensor, Tensor]
"""What LoRA adds to one linear layer: A [rank, in] and B [out, rank] in fp32, B already scaled."""


class Fused(nn.Module):
    """A decoder layer in fewer and larger operations, over weights of its own."""

    def with_adapter(self, slices: Mapping[str, LoraPair]) -> Fused | None:
        """Return a layer over the same weights with LoRA's ``slices`` by module, "self_attn.q_proj" and so on; None
        where they are not added up."""
        return None


class JoinedLayers(Protocol):
    """Decoder layers that one call runs, of one model or of variants of it that differ in adapters alone."""

    def fits(self, hidden: Tensor, paged: Attend, rotary: Any) -> bool:
        """Return whether the call takes ``hidden`` [1, tokens, hidden] in the step whose attention is ``paged``;
        ``rotary`` are the cosines and sines of its positions."""

    def run(
        self, hidden: Tensor, paged: Attend, rotary: tuple[Tensor, Tensor], variant_of: Tensor | None = None
    ) -> Tensor:
        """Run ``hidden`` through the layers -> the same shape; ``variant_of``, int64 [tokens], says to which variant a
        token belongs."""

    def part(self, layers: slice) -> JoinedLayers:
        """Return some of the layers."""


class Accelerator:
    """Stock torch. A package overrides what its processor does better; what it leaves alone stays as it is here."""

    def build_own(self, folder: Path, dtype: torch.dtype) -> nn.Module | None:
        """The model of ``folder/config.json`` by modules other than transformers', with every parameter on the meta
        device, in ``dtype``; None where there are none. Such a model has ``attention_interfaces`` of its own."""
        return None

    def fuse(self, model: nn.Module) -> nn.Module:
        """Replace what runs faster by other modules, in place; return ``model``, which can then only be run."""
        return model

    def fuses(self, layer: nn.Module) -> bool:
        """Return whether :meth:`fuse_layer` makes another layer of this one, and leaves that as it was."""
        return False

    def fuse_layer(self, layer: nn.Module, panels: Mapping[str, np.ndarray] | None = None) -> nn.Module:
        """The ``layer`` in fewer operations; itself where there is no such thing. ``panels`` are the weights of its
        products by name, where somebody has packed them."""
        return layer

    def pack(self, linear: nn.Module) -> nn.Module | None:
        """A ``linear`` layer with its weight in the layout that is multiplied fastest; None where nothing packs it."""
        return None

    def norm_before(self, head: nn.Module, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the function that computes ``norm`` of the rows that ``head`` multiplies."""
        return norm

    def join(self, variants: Sequence[Sequence[nn.Module]]) -> tuple[int, JoinedLayers | None]:
        """Return the number of layers of all ``variants``, from the first on, that one call runs, and what calls them;
        0 and None where there are none."""
        return 0, None

    def attention(self, pool: KVPool) -> type[Attend] | None:
        """Return the fastest way to compute attention over ``pool``; None for torch's own."""
        return None

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The place of the largest of ``logits`` [rows, vocabulary] in each row, the first of equals, and itself."""
        best = logits.max(-1)  # as torch.argmax, and in a quarter of its time on a CPU
        return best.indices, best.values

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Return whether products in ``dtype`` are the accelerator's own."""
        return False

    def continuation(self, head: nn.Module, weights: Any) -> tuple[nn.Module, type[Attend] | None]:
        """The ``head`` and the attention of an engine that goes on with what a model of ``weights`` has begun before
        torch was there: who began with its numbers ends with them."""
        return head, None


@cache
def accelerator() -> Accelerator:
    """Return the accelerator that computes in this process. Raises ProfileError for a word in the environment that
    names none."""
    if accelerator_name() == NONE or "cpu" not in registered("ACCELERATOR"):
        return Accelerator()
    return extension("ACCELERATOR", "cpu")()


def build_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of ``folder/config.json`` with every parameter on the meta device, in ``dtype``: by modules of the
    accelerator's own, or the stock one. Raises ModelError as :func:`build_on_meta`."""
    own_model = accelerator().build_own(folder, dtype)
    return build_on_meta(folder, dtype) if own_model is None else own_model


def fuse(model: nn.Module) -> nn.Module:
    """``model`` as the accelerator of this process fuses it."""
    return accelerator().fuse(model)
