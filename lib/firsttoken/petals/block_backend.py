"""A span of blocks with its own pool of keys and values: the engine's segment, for whoever sends hidden states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.positions import context_of
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weight_files import file_states, unchanged
from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.attention import use_paged_attention
from firsttoken.engine.compared_step import Comparison, check_rows, chunks_of, prompt_of, span_rows
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.executor import Limits
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.request import ScheduledChunk
from firsttoken.engine.rotary_table import RotaryTable
from firsttoken.engine.sdpa_attention import fastest_attend
from firsttoken.engine.step_plan import StepPlan
from firsttoken.petals.checkpoint_blocks import load_span
from firsttoken.petals.kv_slots import KVSlots
from firsttoken.petals.messages import SequenceChunk, end_to_end
from firsttoken.study.errors import ModelError, SwarmError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TIMED = 5  # steps of one token that say how fast a span is


class BlockAdapters(Protocol):
    """Adapters on a model, by the ``names`` that servers and clients have for them (``records.adapter_name``)."""

    names: tuple[str, ...]

    def adapted(
        self, blocks: range, plain: Sequence[nn.Module], fused: Sequence[nn.Module]
    ) -> Mapping[str, Sequence[nn.Module]]:
        """The layers with each adapter of ``blocks`` of the model, which are ``plain`` and as they are ``fused``.
        Raises StageError for one that does not fit or has changed."""


class BlockBackend:
    """``blocks`` of the model in ``folder``, computed in ``dtype``, and keys and values of ``kv_tokens`` tokens; the
    same with each of the ``adapters``, over the same weights.

    Raises ModelError for a folder without these blocks, or layers that do not all see the whole context.
    """

    def __init__(
        self, folder: Path, blocks: range, dtype: torch.dtype, kv_tokens: int, *, adapters: BlockAdapters | None = None
    ) -> None:
        self.depth: int = read_config(folder).num_hidden_layers
        if not 0 <= blocks.start < blocks.stop <= self.depth:
            raise SwarmError(f"blocks [{blocks.start}, {blocks.stop}) are not among the model's [0, {self.depth})")
        self._folder, self.dtype, self._adapters = folder, dtype, adapters
        self._files = check_servable(folder, in_8_bits=True).files
        self._before = file_states(self._files)
        self._adapted: dict[str, LocalSegment] = {}
        self._comparison: Comparison | None = None
        model = self._span(blocks)
        if unknown_types := set(getattr(model.config, "layer_types", None) or []) - {"full_attention"}:
            raise ModelError(
                f"{model.config.model_type} has layers of {min(unknown_types)}; a swarm runs full_attention only"
            )
        self.blocks = blocks
        self.width: int = model.config.hidden_size
        self.context: int = context_of(model.config)
        shape = replace(KVShape.of(model.config, dtype), layers=len(blocks))
        self.pool = KVPool(shape, shape.blocks(kv_tokens), touched=False)
        tokens = min(self.context, self.pool.blocks * shape.block_tokens)
        self._rotary = RotaryTable(model.model.rotary_emb, dtype, self.pool.device, tokens)
        self._segment = LocalSegment(model.model.layers)
        self._attend = fastest_attend(self.pool)
        self._compare()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are here."""
        return () if self._adapters is None else self._adapters.names

    @torch.inference_mode()
    def run(
        self, layers: range, chunks: Sequence[ScheduledChunk], hidden: Sequence[Tensor], adapters: Sequence[str] = ()
    ) -> list[Tensor]:
        """``hidden`` [tokens, hidden] of each of ``chunks`` through ``layers`` of the model -> the same shapes; with
        the ``adapters`` that are named for each ("": none), in one pass where the kernels run them together."""
        names = list(dict.fromkeys(adapters)) or [""]
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].tokens)  # as a step lays them
        step = StepPlan.of(chunks, self.pool, self._attend)
        step.layers = range(layers.start - self.blocks.start, layers.stop - self.blocks.start)
        states = end_to_end([hidden[index] for index in order])[None]
        step.arguments = (
            (),
            {
                "attention_mask": None,
                "position_ids": step.positions,
                "past_key_values": None,
                "use_cache": False,
                "position_embeddings": self._rotary.lookup(states, step.positions, max(chunk.end for chunk in chunks)),
                "paged": step.paged,
            },
        )
        segments = [self._adapted[name] if name else self._segment for name in names]
        if len(names) > 1:
            count, joined = accelerator().join([segment.modules for segment in segments])
            if count < len(self.blocks) or step.paged.read_by_kernels(step.ids.shape[1]) is None:
                return self._apart(layers, chunks, hidden, adapters)
            whose = [names.index(adapters[index]) for index in order for _ in range(chunks[index].tokens)]
            step.variants = joined, torch.tensor(whose)
        parts = segments[0].run(states, step)[0].split([chunks[index].tokens for index in order])
        out: list[Tensor] = [states] * len(chunks)
        for index, part in zip(order, parts, strict=True):
            out[index] = part
        return out

    def _apart(
        self, layers: range, chunks: Sequence[ScheduledChunk], hidden: Sequence[Tensor], adapters: Sequence[str]
    ) -> list[Tensor]:
        """Return what ``run`` returns, computed by one pass for each adapter."""
        out = list(hidden)
        for name in dict.fromkeys(adapters):
            indices = [index for index, other in enumerate(adapters) if other == name]
            outputs = self.run(
                layers, [chunks[index] for index in indices], [hidden[index] for index in indices], [name]
            )
            for index, rows in zip(indices, outputs, strict=True):
                out[index] = rows
        return out

    def move(self, blocks: range) -> None:
        """Load as many other ``blocks`` in the place of those that are here, whose memory is given back first; nothing
        may use the pool meanwhile. Raises ModelError, and holds nothing then, for blocks that cannot be loaded."""
        self.blocks, self._segment, self._adapted = blocks, LocalSegment([]), {}
        self._segment = LocalSegment(self._span(blocks).model.layers)
        self._compare()

    def _span(self, blocks: range) -> PreTrainedModel:
        """The model with ``blocks`` as its only layers, as a step runs them."""
        with unchanged(self._files, self._before):  # also where it moves, as the swarm knows them by a sha256
            model = load_span(self._folder, blocks, self.dtype)
        files = [self._folder / CONFIG, *self._files]
        self._comparison = Comparison(files, "span", blocks.start, blocks.stop, str(self.dtype))
        if self._comparison.due:
            tokens = prompt_of(Limits(context_of(model.config), model.config.vocab_size))
            draw = torch.Generator().manual_seed(0)
            states = 0.25 * torch.randn(len(tokens), model.config.hidden_size, generator=draw)
            self._reference = tokens, states.to(self.dtype), span_rows(model, states.to(self.dtype))
        use_paged_attention(model, blocks.start)
        plain, fused = list(model.model.layers), [accelerator().fuse_layer(layer) for layer in model.model.layers]
        if self._adapters is not None:
            adapted = self._adapters.adapted(blocks, plain, fused)
            self._adapted = {name: LocalSegment(layers) for name, layers in adapted.items()}
        model.model.layers = nn.ModuleList(fused)
        return model

    def _compare(self) -> None:
        """Hold the layers that will serve to the model's own, unless they were before. Raises ModelError."""
        if self._comparison is not None and self._comparison.due:
            tokens, states, reference = self._reference
            tokens = tokens[: self.pool.blocks * self.pool.shape.block_tokens]

            def rows() -> Tensor:
                chunks = chunks_of(tokens, self.pool.shape.block_tokens)
                # by the run of this class: a subclass, as a reader of notebook 06 has one, may count what it is asked
                run = partial(BlockBackend.run, self, self.blocks)
                parts = [run([chunk], [states[chunk.start : chunk.end]])[0] for chunk in chunks]
                return torch.cat(parts) - states[: len(tokens)]

            name = f"[{self.blocks.start}, {self.blocks.stop}) of {self._folder.name}"
            check_rows(name, rows, reference._replace(rows=reference.rows[: len(tokens)]), self.dtype)
            self._comparison.mark_passed()

    def measured_throughput(self) -> float:
        """Tokens a second through one block, from steps of one token; nobody may use the pool meanwhile."""
        slots = KVSlots(1, self.pool.shape.block_tokens, 1, self.context)
        hidden, seconds = [torch.zeros(1, self.width, dtype=self.dtype)], []
        chunks = slots.place({}, [SequenceChunk(0, 0, 1)])
        for _ in range(_TIMED):
            begun = time.perf_counter()
            self.run(self.blocks, chunks, hidden)
            seconds.append(time.perf_counter() - begun)
        return len(self.blocks) / sorted(seconds)[_TIMED // 2]
