"""The angular distance between the inputs of layer l and of layer l + n, by which layers that can wait are chosen.

d(l, n) = arccos(cos(x_l, x_{l+n})) / pi, at the last token (Gromov et al., "The Unreasonable Ineffectiveness of the
Deeper Layers"; ProgressiveServe, 3.3.2). A block that hardly turns the residual stream can be passed for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.study.errors import StageError
from firsttoken.study.progress import track


@dataclass(frozen=True)
class Distances:
    """Angular distances in 0..1, each [passages, depth + 1, depth + 1] indexed by residual-stream positions l < m.

    Position l is the input of layer l, position ``depth`` the output of the last layer before the final norm.
    """

    last_token: Tensor
    all_tokens: Tensor

    @property
    def depth(self) -> int:
        return self.last_token.shape[1] - 1

    def block(self, size: int, tokens: str = "last") -> Tensor:
        """Distances [passages, starts] over blocks of ``size`` layers, one column a start from 0 to depth - size."""
        source = self.last_token if tokens == "last" else self.all_tokens
        return source.diagonal(offset=size, dim1=1, dim2=2)


@torch.inference_mode()
def compute_layer_inputs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Residual stream [depth + 1, batch, tokens, hidden] of one forward pass over ``ids`` [batch, tokens].

    Taken by pre-hooks on the layers and on the final norm: ``output_hidden_states`` ends after that norm.
    """
    stream: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        stream.append(args[0] if args else kwargs["hidden_states"])

    hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in (*layers_of(model), model.get_decoder().norm)]
    try:
        model.get_decoder()(ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(stream)


def angular_distances(model: PreTrainedModel, windows: Tensor, batch: int = 8) -> Distances:
    """Distances between all pairs of residual-stream positions over ``windows`` [passages, tokens].

    One forward pass a batch serves every start and every block size: the cosines of all pairs are one matrix product.
    """
    last, mean = [], []
    for ids in track(windows.split(batch), desc="layer inputs", unit="batch"):
        stream = compute_layer_inputs(model, ids).float().permute(1, 2, 0, 3)  # [batch, tokens, depth + 1, hidden]
        unit = torch.nn.functional.normalize(stream, dim=-1)
        angle = torch.arccos((unit @ unit.transpose(-1, -2)).clamp(-1, 1)) / torch.pi
        last.append(angle[:, -1].cpu())
        mean.append(angle.mean(1).cpu())
    return Distances(torch.cat(last), torch.cat(mean))


def choose_block(distances: Distances, size: int, tokens: str = "last") -> list[int]:
    """The ``size`` consecutive layers, 0-based, whose removal turns the stream least on average.

    [11, 12, ..., 18] means: the input of layer 11 is passed on to layer 19. Layer 0 competes like any other; of equal
    starts the first wins. Raises StageError for a size of 0 or as deep as the model.
    """
    check_size(distances.depth, size)
    start = int(distances.block(size, tokens).mean(0).argmin())
    return list(range(start, start + size))


def check_size(depth: int, size: int) -> None:
    """Raise StageError unless a block of ``size`` layers leaves at least one of ``depth``."""
    if not 1 <= size < depth:
        raise StageError(f"a block of {size} layers does not fit a model of {depth}: choose 1 to {depth - 1}")


def resampled_starts(by_passage: Sequence[Sequence[float]], resamples: int, seed: int) -> list[int]:
    """The chosen start in each of ``resamples`` calibration sets drawn with replacement from the rows.

    ``by_passage`` [passages, starts] are the distances of one block size.
    """
    values = np.asarray(by_passage)
    draws = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    return [int(values[draw].mean(0).argmin()) for draw in draws]
