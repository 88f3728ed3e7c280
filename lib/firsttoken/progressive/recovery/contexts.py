"""An open generation: its tokens, its KV cache, and what it needs to survive a change of the model under it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

from firsttoken.progressive.loading.views import StageView
from firsttoken.progressive.passlayer import GapCache


class Context:
    """One sequence under one stage. ``ids`` [tokens] are those whose keys and values are in ``cache``.

    With ``keep`` the hidden states [1, tokens, hidden] that enter layer ``keep`` are kept as they pass, for
    :meth:`recompute_from`; they cost hidden x 2 bytes a token in 16 bits, a tenth of this model's KV.
    """

    def __init__(self, model: PreTrainedModel, view: StageView, keep: int | None = None) -> None:
        self.model, self.view, self.keep = model, view, keep
        self.cache: DynamicCache = GapCache()
        self.ids: list[int] = []
        self._kept: list[Tensor] = []

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Run ``ids`` [tokens] after what is there and return the logits [vocabulary] that follow the last one."""
        self.view.activate(self.model)
        # not model.device, which is "meta" while the embedding is: to look up meta ids in a weight that has arrived
        # meanwhile returns uninitialised memory without an error
        tokens = torch.tensor([ids], device=self.model.model.rotary_emb.inv_freq.device)
        hook = self._watch()
        try:
            logits = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        finally:
            if hook:
                hook.remove()
        self.ids.extend(ids)
        return logits[0, -1]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the hidden states that are kept."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept)

    def _watch(self) -> torch.utils.hooks.RemovableHandle | None:
        if self.keep is None:
            return None

        def remember(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._kept.append(args[0])

        return self.view.layers[self.keep].register_forward_pre_hook(remember)

    def prefill_again(self, view: StageView) -> None:
        """Forget every key and value and compute them with ``view``: one prefill of the whole context."""
        ids, self.ids = self.ids, []
        self.view, self.cache, self._kept = view, GapCache(), []
        self.feed(ids)

    @torch.inference_mode()
    def recompute_from(self, view: StageView, layer: int) -> None:
        """Compute keys and values of ``layer`` and all above it with ``view``, from the kept hidden states.

        Layers below keep theirs. ``layer`` must be the one whose input is kept.
        """
        hidden = torch.cat(self._kept, dim=1)
        self.view, self._kept = view, [hidden]
        view.activate(self.model)
        for i in range(layer, len(self.cache.layers)):
            self.cache.layers[i] = DynamicLayer()
        inner = self.model.model
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # past_key_values=None: with the half-filled cache the mask would come out (n, 2n)
        mask = create_causal_mask(
            config=self.model.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = inner.rotary_emb(hidden, positions)
        for module in view.layers[layer:]:
            hidden = module(
                hidden,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
