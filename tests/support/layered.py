"""One sequence through stock decoder layers, some layers of some tokens at a time: keys and values of any mixture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.progressiveserve.passlayer import PassLayer


class Layered:
    """Keys, values and what entered each layer, of the first tokens; what is run again takes the place of what was."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.entered: dict[int, Tensor] = {}
        self._start = 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_) -> tuple[Tensor, Tensor]:
        """What a stock attention calls of its cache."""
        if layer in self.kv and self._start:
            keys, values = (
                torch.cat([old[..., : self._start, :], new], dim=-2)
                for old, new in zip(self.kv[layer], (keys, values), strict=True)
            )
        self.kv[layer] = keys, values
        return keys, values

    @torch.inference_mode()
    def run(self, model, tokens: Sequence[int], start: int, layers: range, hidden: Tensor | None = None) -> Tensor:
        """``tokens`` from ``start`` on through ``layers`` of ``model``; what leaves them [1, their number, hidden]."""
        body, self._start = model.model, start
        hidden = body.embed_tokens(torch.tensor([tokens[start:]])) if hidden is None else hidden
        places = torch.arange(start, len(tokens))[None]
        turned = body.rotary_emb(hidden, places)
        seen = torch.arange(len(tokens))[None] <= places[0][:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        for layer in layers:
            before = self.entered.get(layer, hidden[:, :0])[:, :start]
            self.entered[layer] = torch.cat([before, hidden], dim=1)
            module = body.layers[layer]
            if not isinstance(module, PassLayer):
                hidden = module(
                    hidden,
                    attention_mask=mask,
                    position_ids=places,
                    past_key_values=self,
                    position_embeddings=turned,
                )
        return hidden
