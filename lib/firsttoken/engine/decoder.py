"""A model taken apart: its ends, which are the model's own code, and the segments that its layers lie in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from firsttoken.engine.accelerator import JoinedLayers, accelerator
from firsttoken.engine.rotary_table import RotaryTable
from firsttoken.engine.step_plan import StepPlan
from firsttoken.study.errors import ModelError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Layers [lo, hi) of a model: what hidden states go through, wherever it lies.


class Segment(Protocol):
    """Consecutive ``layers`` of a model (0-based)."""

    layers: range

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through those of its layers that ``step`` runs -> the same shape."""

    def drop(self, request: int) -> None:
        """Forget the request of this number."""


def check_cover(segments: Sequence[Segment], layers: range) -> None:
    """Raise ModelError unless ``segments``, one behind the other, have each of ``layers`` once and in order."""
    reached = layers.start
    for segment in segments:
        within = range(max(segment.layers.start, layers.start), min(segment.layers.stop, layers.stop))
        if len(within) and within.start == reached:
            reached = within.stop
        elif len(within):
            break
    else:
        if reached == max(layers.start, layers.stop):
            return
    held = ", ".join(f"[{held_segment.layers.start}, {held_segment.layers.stop})" for held_segment in segments)
    raise ModelError(f"the segments {held} are not the model's layers [{layers.start}, {layers.stop}) in order")


_PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Models of which a step is embedding, rotary angles, layers, norm and head, and whose layers are told nothing else
where attention is the engine's. Their own code for it takes 0.25 ms more, of 4 with one request (transformers 5)."""


class LocalSegment:
    """``modules`` in this process, the first of them layer ``lo``: stock decoder layers, adapted ones, or fused."""

    def __init__(self, modules: Sequence[nn.Module], lo: int = 0) -> None:
        self.modules = list(modules)  # one may be put in the place of another that computes the same, at any time
        self._lo = lo
        self._accelerator = accelerator()
        self._joined: dict[tuple[int, int], tuple[list[nn.Module], int, JoinedLayers]] = {}  # where one call runs all

    @property
    def layers(self) -> range:
        """The numbers of the layers that this segment runs."""
        return range(self._lo, self._lo + len(self.modules))

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        args, keywords = step.arguments
        layers, angles = step.within(self.layers), keywords.get("position_embeddings")
        layer = layers.start
        while layer < layers.stop:
            end = layers.stop
            if step.hidden_cache is not None:
                step.hidden_cache.enter(layer, hidden, step.chunks)
                end = min((boundary for boundary in step.hidden_cache.layers if layer < boundary < end), default=end)
            part = slice(layer - self._lo, end - self._lo)
            modules = self.modules[part]
            if step.variants is not None:
                joined, variant_of = step.variants
                hidden = joined.part(part).run(hidden, step.paged, angles, variant_of)
                layer = end
                continue
            joined_modules, count, joined = self._joined.get((layer, end), (None, 0, None))
            if joined_modules != modules:
                count, joined = self._accelerator.join([modules])
                if count == len(modules):  # others will be replaced, and must go then
                    self._joined[layer, end] = modules, count, joined
            if joined is not None and joined.fits(hidden, step.paged, angles):
                hidden = joined.run(hidden, step.paged, angles)
                layer += count
            else:
                rotary = {"position_embeddings": angles[layer]} if isinstance(angles, dict) else {}
                hidden = modules[0](hidden, *args, **(keywords | rotary))
                layer += 1
        return hidden

    def drop(self, request: int) -> None:
        """Do nothing: the keys and values of the request are in the pool, and go with its blocks."""

    def fuse(self) -> Iterator[None]:
        """Put fewer and larger operations in the place of each layer, one at a time while requests run.

        The weights of a layer are there twice for that long, and where another segment has it until that is gone.
        """
        for i, layer in enumerate(self.modules):
            self.modules[i] = self._accelerator.fuse_layer(layer)
            yield


class Decoder:
    """``model`` with ``segments`` in the place of its layers (by default one segment of them).

    Embedding, positions, norm and head run in a copy of the model that shares every weight with it, so whatever the
    architecture does there is done. Raises ModelError for a model whose layers are not found, or segments that do not
    cover them.
    """

    def __init__(self, model: PreTrainedModel, segments: Sequence[Segment] | None = None) -> None:
        decoder, depth = model.get_decoder(), model.config.num_hidden_layers
        children = decoder.named_children()
        lists = [name for name, child in children if isinstance(child, nn.ModuleList) and len(child) == depth]
        if len(lists) != 1:
            raise ModelError(f"{type(decoder).__name__} has no list of {depth} layers to run; use a Llama-like model")
        self.segments = tuple(segments or [LocalSegment(getattr(decoder, lists[0]))])
        most = max(segment.layers.stop for segment in self.segments)
        check_cover(self.segments, range(max(depth, most)))
        if most > depth:
            raise ModelError(f"the segments have {most} layers, and the model has {depth}; give it as many")
        path = next(name for name, module in model.named_modules() if module is decoder)
        layers = _SegmentedLayers(self.segments, decoder, getattr(model.config, "layer_types", None) or ())
        self._decoder = _with_submodule(decoder, [lists[0]], nn.ModuleList([layers]))
        self._model = _with_submodule(model, path.split("."), self._decoder) if path else self._decoder
        # what is run for its layers alone passes no norm, whose weight may be still on its way
        norm = "norm" in self._decoder._modules
        self._unnormed = _with_submodule(self._decoder, ["norm"], nn.Identity()) if norm else self._decoder
        self._width = model.config.hidden_size
        self._rotary: RotaryTable | None = None
        self._norm: Callable[[Tensor], Tensor] | None = None  # bound with the head
        kind = type(self._model)  # a checkpoint may bring other code by a name of ``_PLAIN``
        if kind.__name__ in _PLAIN and kind.__module__.startswith("transformers.models."):
            self._norm = accelerator().norm_before(self._model.lm_head, self._decoder.norm)

    @property
    def depth(self) -> int:
        return self.segments[-1].layers.stop

    def logits(self, step: StepPlan) -> Tensor:
        """Run ``step`` and what is joined to it; return logits [rows, vocabulary] of the rows named as ``last``.

        Raises RequestError where what is joined does not fit, as ``run`` does.
        """
        if step.fused_recompute is not None:
            both = step.fused_recompute.both
            self._check(both.layers, step.fused_recompute.redone, both.ids.shape[1] - step.ids.shape[1])
            nowhere = both.through(range(0))
            self._decoder(**_inputs(nowhere))  # for what the model's code tells its layers of these tokens
            both.arguments = nowhere.arguments
        elif self._norm is not None:
            return self._plain_logits(step)
        return self._model(**_inputs(step), logits_to_keep=step.last).logits[0]

    def _plain_logits(self, step: StepPlan) -> Tensor:
        """Return the logits of ``step`` by the parts of a model in ``_PLAIN``; only the rows that are wanted go through
        the norm."""
        decoder = self._decoder
        hidden = decoder.embed_tokens(step.ids)
        angles = self._angles(hidden, step)
        keywords = {"attention_mask": None, "past_key_values": None, "use_cache": False}
        hidden = decoder.layers[0](
            hidden, step=step, position_embeddings=angles, position_ids=step.positions, **keywords
        )
        return self._model.lm_head(self._norm(hidden[0].index_select(0, step.last)))

    def _angles(self, hidden: Tensor, step: StepPlan) -> tuple[Tensor, Tensor] | None:
        """The cosines and sines of the positions; None where layers are in other processes, which have their own."""
        if step.paged.pool.rows.is_meta:
            return None
        if self._rotary is None:
            self._rotary = RotaryTable(self._decoder.rotary_emb, hidden.dtype, hidden.device)
        return self._rotary.lookup(hidden, step.positions, max(chunk.end for chunk in step.chunks))

    def run(self, step: StepPlan) -> None:
        """Run ``step`` for the keys and values of its layers, and what is ``leaving`` them.

        Raises RequestError for layers that the model does not have, and for hidden states that do not fit the step, or
        are missing where it begins behind the first layer.
        """
        self._check(step.layers, step.hidden, step.ids.shape[1])
        self._unnormed(**_inputs(step))

    def _check(self, layers: range, hidden: Tensor | None, tokens: int) -> None:
        depth, wanted = self.depth, (1, tokens, self._width)
        if not 0 <= layers.start <= layers.stop <= depth or layers.step != 1:
            raise RequestError(f"layers [{layers.start}, {layers.stop}) are not among the model's [0, {depth})")
        if hidden is None and layers.start:
            raise RequestError(f"a step from layer {layers.start} needs the hidden states that enter it; give them")
        if hidden is not None and tuple(hidden.shape) != wanted:
            raise RequestError(f"hidden states of {list(hidden.shape)} do not fit: the step has {list(wanted)}")

    def pack_head(self) -> None:
        """Keep the head's weight in the layout that it is multiplied in, beside the model's own, which may be the
        embedding too; does nothing where nothing packs it. Called while steps run, it is there for the next."""
        with torch.no_grad():
            head = accelerator().pack(self._model.get_output_embeddings())
        if head is not None:
            self.set_head(head)

    def set_head(self, head: nn.Module) -> None:
        """Compute logits with ``head``, which has the weight of the model's own."""
        embeddings = self._model.get_output_embeddings()
        for name, child in self._model.named_children():
            if child is embeddings:
                self._model._modules[name] = head
        if self._norm is not None:
            self._norm = accelerator().norm_before(head, self._decoder.norm)

    def share_head(self, other: Decoder) -> None:
        """Compute logits with the head of ``other``, which has the same weight and may be packed."""
        self.set_head(other._model.get_output_embeddings())

    def drop(self, request: int) -> None:
        """Forget the request of this number."""
        for segment in self.segments:
            segment.drop(request)


class _SegmentedLayers(nn.Module):
    """A stand-in for a model's layers, called as each of them would be.

    Where each of their ``kinds`` has rotary angles of its own (Gemma-3), every layer is given those of its kind.
    """

    def __init__(self, segments: Sequence[Segment], decoder: nn.Module, kinds: Sequence[str]) -> None:
        super().__init__()
        self.segments, self.kinds = segments, kinds
        rotary = getattr(decoder, "rotary_emb", None)
        self.rotary = rotary if kinds and hasattr(rotary, f"{kinds[0]}_inv_freq") else None

    def forward(self, hidden: Tensor, *args: Any, step: StepPlan, **keywords: Any) -> Tensor:
        if self.rotary is not None:
            angles = {kind: self.rotary(hidden, keywords["position_ids"], kind) for kind in set(self.kinds)}
            keywords["position_embeddings"] = {layer: angles[kind] for layer, kind in enumerate(self.kinds)}
        step.arguments = args, keywords | {"paged": step.paged}
        hidden = hidden if step.hidden is None else step.hidden
        if step.fused_recompute is None:
            step.leaving = self._run(hidden, step)
            return step.leaving
        redone = step.fused_recompute.both.layers
        hidden = self._run(hidden, step.through(range(redone.start)))
        hidden = step.fused_recompute.leave(self._run(step.fused_recompute.enter(hidden), step.fused_recompute.both))
        return self._run(hidden, step.through(range(redone.stop, step.layers.stop)))

    def _run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """Run all of the step's layers. Raises ModelError, before any, where a segment has lost some of them."""
        check_cover(self.segments, step.layers)
        for segment in self.segments:
            hidden = segment.run(hidden, step)
        return hidden


def _inputs(step: StepPlan) -> dict[str, Any]:
    return {"input_ids": step.ids, "position_ids": step.positions, "use_cache": False, "step": step}


def _with_submodule(module: nn.Module, path: Sequence[str], submodule: nn.Module) -> nn.Module:
    """A copy of ``module`` with ``submodule`` at the end of ``path``, all else shared."""
    shared = copy.copy(module)
    # A shallow copy shares the dictionary of children: without one of its own the caller's model would change, too.
    shared._modules = dict(module._modules)
    child = _with_submodule(module._modules[path[0]], path[1:], submodule) if path[1:] else submodule
    shared._modules[path[0]] = child
    return shared
