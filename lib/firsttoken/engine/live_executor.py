"""The executor that runs a model: an unmodified Hugging Face decoder over the paged pool, PEFT adapters included."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from firsttoken.assets.model_config import FULL, SLIDING
from firsttoken.assets.positions import context_of
from firsttoken.assets.servable import attention_kinds, has_windows
from firsttoken.engine.accelerator import accelerator
from firsttoken.engine.attention import NAME, Attend, is_stock, use_paged_attention
from firsttoken.engine.compared_step import Comparison, check_rows, engine_rows, prompt_of, reference_rows
from firsttoken.engine.decoder import Decoder, LocalSegment, Segment
from firsttoken.engine.executor import Limits
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.kv import KVPool, KVShape
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import LayerRecompute, Phase, Request, ScheduledChunk
from firsttoken.engine.sampling import next_tokens, read_prompts
from firsttoken.engine.sdpa_attention import PaddedAttend, fastest_attend
from firsttoken.engine.step_plan import StepPlan, fuse_recompute
from firsttoken.engine.swap import make_path
from firsttoken.engine.swap.block_copier import CopyTimes, Movement, SwapPath
from firsttoken.engine.swap.host_pool import HostPool, Span
from firsttoken.study.errors import CacheError, ModelError, RequestError


class LiveExecutor:
    """Runs ``model`` where it lies, with ``blocks`` KV blocks there and ``host_blocks`` in host memory (0: never swap).

    The model's attention is switched to the paged one, and back by ``close``; ``attend`` names the way it is computed,
    by default the fastest for this model here. ``segments`` run in the place of its layers, and ``hidden_cache`` keeps
    hidden states; this is the ``version`` that requests begin with until another is set. ``device`` is where the
    weights will be (where they are, unless given), and ``touched`` and ``elsewhere`` as of ``KVPool``.

    Raises ModelError for a model that is another in the engine than by its own modules, a model other than Gemma-3
    whose layers do not all see the whole context, whose attention cannot be replaced, whose rotary positions are of an
    unknown kind, that PEFT learned a prompt for, or that runs in an engine already, for an ``attend`` without the
    windows that it needs, and for other layers in ``segments``; RequestError for a pool or block size below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: int,
        *,
        block_tokens: int = 16,
        host_blocks: int = 0,
        swap: str = "coalesced",
        write_through: bool = False,
        attend: type[Attend] | None = None,
        segments: Sequence[Segment] | None = None,
        hidden_cache: HiddenStateCache | None = None,
        device: torch.device | None = None,
        touched: bool = True,
        elsewhere: bool = False,
    ) -> None:
        config = model.config
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        kinds = attention_kinds(config)
        if unknown_kinds := kinds - {FULL, *([SLIDING] if has_windows(config) else [])}:
            raise ModelError(
                f"{config.model_type} has layers of {min(unknown_kinds)}; the engine runs {FULL} only, and Gemma-3's "
                "windows"
            )
        self._stock = self._base.config._attn_implementation
        if self._stock == NAME:
            raise ModelError(f"the {config.model_type} model runs in an engine already; close that one first")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ModelError("the engine runs adapters, and this model has a prompt that PEFT learned; take it off")
        self.version = ModelVersion(Decoder(self._base, segments), hidden_cache)
        parameter = next(model.parameters())
        self._adapted = _adapted(model)
        self.model = model
        self.limits = Limits(context_of(config), config.vocab_size)
        self.block_tokens = block_tokens
        shape = KVShape.of(config, parameter.dtype, block_tokens)
        self.pool = KVPool(shape, blocks, device or parameter.device, touched=touched, elsewhere=elsewhere)
        self.host_pool: HostPool | None = None
        self.path: SwapPath | None = None
        if host_blocks:
            self.host_pool = HostPool(self.pool.shape, host_blocks, pinned=self.pool.device.type == "cuda")
            self.path = make_path(swap, self.pool, self.host_pool)
        self.write_through = write_through and self.path is not None
        windowed = SLIDING in kinds
        self._attend = attend or (PaddedAttend if windowed else fastest_attend(self.pool))
        if windowed and not self._attend.has_windows:
            raise ModelError(f"{self._attend.__name__} has no windows, which {config.model_type} needs; leave it out")
        if segments is None and self._adapted is None and is_stock(model):
            self._compare()
        else:
            self._page()

    def _page(self) -> None:
        use_paged_attention(self._base)
        if self._base.config._attn_implementation != NAME:  # transformers only warns; each token would see all others
            self.close()
            name = self._base.config.model_type
            raise ModelError(f"{name} has an attention that cannot read KV blocks; use a Llama-like model")

    def _compare(self) -> None:
        """Switch the attention, and hold a step to what transformers' own modules compute, unless it was before or the
        weights are still to come."""
        config, dtype = self._base.config, self.pool.shape.dtype
        if any(weight.is_meta for weight in self.model.parameters()):
            self._page()
            return
        files = sorted(Path(config.name_or_path).glob("*.safetensors")) if config.name_or_path else []
        settings = {
            key: value
            for key, value in config.to_dict().items()
            if key not in ("_name_or_path", "transformers_version")
        }
        comparison = Comparison(files, settings, str(dtype), self.pool.device.type, self._attend.__name__)
        prompt = prompt_of(self.limits)
        reference = reference_rows(self.model, prompt) if comparison.due else None
        self._page()
        if reference is not None:
            try:
                check_rows(f"the {config.model_type} model", partial(self.rows_of, prompt), reference, dtype)
            except ModelError:
                self.close()
                raise
            comparison.mark_passed()

    @contextmanager
    def stock_attention(self) -> Iterator[None]:
        """Inside the block, in which no step runs, the model's own modules have their own attention."""
        self._base.set_attn_implementation(self._stock)
        try:
            yield
        finally:
            self._base.set_attn_implementation(NAME)

    def rows_of(self, prompt: Sequence[int], version: ModelVersion | None = None) -> torch.Tensor:
        """The logits of ``version``, or of its own, as :func:`engine_rows`."""
        return engine_rows((version or self.version).decoder, self.pool, self._attend, prompt)

    @property
    def blocks(self) -> int:
        return self.pool.blocks

    @property
    def salt(self) -> str:
        """Return the names of the adapters that are on."""
        on = self._adapted is not None and not self._adapted.disable_adapters
        return ",".join(self._adapted.active_adapters) if on else ""

    def now(self) -> float:
        """Return the machine's monotonic clock, in seconds."""
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        time.sleep(max(0.0, moment_s - self.now()))

    @torch.inference_mode()
    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """One forward pass for each version, over the new tokens of all its ``chunks``, laid end to end.

        The variants of a base have one pass where the kernels can run them together. What is redone
        in some layers, from hidden states that it brings, joins it there; other redone chunks, and those of prompts
        that follow arriving layers, go through their layers in a pass of their own. The other layers' keys and values
        stay what they are.

        Raises RequestError as ``Decoder.run``, and ModelError once closed.
        """
        if self._base.config._attn_implementation != NAME:
            raise ModelError("the engine was closed, or the model's attention was changed; make a new engine")
        versions: dict[ModelVersion, dict[range | None, list[ScheduledChunk]]] = defaultdict(lambda: defaultdict(list))
        for chunk in chunks:
            versions[chunk.request.version or self.version][self._recomputed_layers(chunk.redo)].append(chunk)
        tokens: dict[int, int] = defaultdict(int)  # what is recomputed gives no token
        tokens |= self._run_variants(versions)
        for version, parts in versions.items():
            if full_chunks := parts.pop(None, []):
                # Only a group that begins above the embedding brings hidden states that can be laid beside the step's
                # own, and a step takes one such group.
                redone = ((layers, group[0].redo) for layers, group in parts.items())
                joins = next((layers for layers, redo in redone if layers.start and redo.leave is None), None)
                step = self.plan(version, full_chunks)
                if joins:
                    fuse_recompute(step, parts.pop(joins), partial(self.plan, version))
                tokens |= self._next_tokens(version, step)
            for layers, group_chunks in parts.items():
                step = self.plan(version, group_chunks)
                step.redo(layers)
                if any(chunk.redo.says for chunk in group_chunks):
                    tokens |= self._next_tokens(version, step)
                else:
                    version.decoder.run(step)
                    step.leave()
        for chunk in chunks if self.write_through else ():
            self._write_through(chunk)
        return [tokens[chunk.request.number] for chunk in chunks]

    def _write_through(self, chunk: ScheduledChunk) -> None:
        """Copy the blocks that ``chunk`` has filled to host memory, as long as there is room for all that its request
        may need. What it wrote anew, or in some layers only, is no longer what the copy holds."""
        request, size = chunk.request, self.block_tokens
        request.saved = min(request.saved, chunk.start // size)
        if self._reserve(request) and chunk.redo is None:
            self._save(request, chunk.end // size)

    def _reserve(self, request: Request) -> bool:
        """Take rows of the host pool for what the request has cached, or, with ``write_through``, ever may have; return
        whether it has them."""
        if request.host is None and self.host_pool:
            tokens = request.most_cached if self.write_through else request.cached - request.head
            request.host = self.host_pool.allocate(self.pool.shape.blocks(tokens))
        return request.host is not None

    def _save(self, request: Request, count: int) -> CopyTimes:
        """Copy those of the first ``count`` blocks that are not in host memory yet, and are wanted there."""
        first = max(request.saved, self._first_block(request))
        if count <= first:
            return CopyTimes(0.0, 0.0, 0, 0)
        request.saved = count
        return self.path.out(request.blocks[first:count], self._part(request, first, count))

    def _first_block(self, request: Request) -> int:
        """The number of the request's block that the first of its host rows is a copy of."""
        return 0 if self.write_through else request.head // self.block_tokens

    def _part(self, request: Request, first: int, end: int) -> Span:
        """The host rows of its blocks [first, end)."""
        return Span(request.host.start + first - self._first_block(request), end - first)

    def _recomputed_layers(self, redo: LayerRecompute | None) -> range | None:
        """The layers of ``redo``; None for all of them from the tokens on, which any other chunk goes through too."""
        complete = redo is None or (redo.hidden is None and len(redo.layers) == self.pool.shape.layers)
        return None if complete else redo.layers

    def _run_variants(self, versions: dict[ModelVersion, dict[range | None, list[ScheduledChunk]]]) -> dict[int, int]:
        """The next token by request of the chunks of several variants of a base that one pass runs; they are taken out
        of ``versions``. The others are left: those whose layers are not all fused, and a prefill that is too long for
        the kernels' attention."""
        families: dict[ModelVersion, list[ModelVersion]] = defaultdict(list)
        for version, parts in versions.items():
            base = version.base or version
            if None in parts and version.hidden_cache is base.hidden_cache:
                families[base].append(version)
        tokens: dict[int, int] = {}
        for base, members in families.items():
            segments = [member.decoder.segments for member in members]
            if len(members) == 1 or any(
                len(variant_segments) > 1 or type(variant_segments[0]) is not LocalSegment
                for variant_segments in segments
            ):
                continue
            count, joined = accelerator().join([variant_segments[0].modules for variant_segments in segments])
            step = self.plan(base, [chunk for member in members for chunk in versions[member][None]])
            if count < len(segments[0][0].modules) or step.paged.read_by_kernels(step.ids.shape[1]) is None:
                continue
            number = {member: i for i, member in enumerate(members)}
            variant_of = [
                number[chunk.request.version or self.version] for chunk in step.chunks for _ in range(chunk.tokens)
            ]
            step.variants = joined, torch.tensor(variant_of)
            for member in members:
                del versions[member][None]
            tokens |= self._next_tokens(base, step)
        return tokens

    def _next_tokens(self, version: ModelVersion, step: StepPlan) -> dict[int, int]:
        """Return the next token, by request, of each chunk of ``step``; it means nothing where that does not
        complete."""
        chunks, logits = step.chunks, version.decoder.logits(step)
        read_prompts(logits[len(chunks) :], chunks)  # first: behind a draft that does not stay nothing is said
        tokens = next_tokens(logits[: len(chunks)], chunks)
        return {chunk.request.number: token for chunk, token in zip(chunks, tokens, strict=True)}

    def plan(self, version: ModelVersion, chunks: Sequence[ScheduledChunk]) -> StepPlan:
        """``chunks`` as a step over this pool, through all layers of ``version``."""
        return StepPlan.of(chunks, self.pool, version.attend or self._attend, version.hidden_cache)

    @torch.inference_mode()
    def fill(self, request: Request, layer: int, kv: torch.Tensor) -> None:
        """Write keys and values [2, 1, kv_heads, tokens, head_dim] of its first tokens into its blocks at ``layer``.

        Raises CacheError for those of another shape or dtype.
        """
        shape = self.pool.shape
        tokens = kv.shape[3] if kv.dim() == 5 else -1
        wanted = [2, 1, shape.kv_heads, tokens, shape.head_dim]
        if list(kv.shape) != wanted or kv.dtype != shape.dtype or tokens > len(request.blocks) * shape.block_tokens:
            raise CacheError(
                f"keys and values {list(kv.shape)} of {kv.dtype} for layer {layer} do not fit: the pool holds "
                f"{shape.kv_heads} heads of {shape.head_dim} in {shape.dtype}"
            )
        positions = torch.arange(tokens)
        blocks = torch.tensor(request.blocks)[positions // shape.block_tokens].to(self.pool.device)
        offsets = (positions % shape.block_tokens).to(self.pool.device)
        self.pool.rows[blocks, layer, :, offsets] = kv[:, 0].permute(2, 0, 1, 3).to(self.pool.device)

    def computed(self, request: Request, tokens: int) -> torch.Tensor:
        """A copy of the keys and values [layers, 2, 1, kv_heads, tokens, head_dim] of its first ``tokens`` tokens.

        Raises RequestError for tokens that the pool does not have of it, or that it computes again in some layers.
        """
        first_position = request.cached if request.phase is Phase.RUNNING and request.redo is None else 0
        if not 0 < tokens <= first_position:
            raise RequestError(
                f"request {request.number} has {first_position} of {tokens} tokens in the pool; ask when its prompt "
                "has been computed, and before it ends"
            )
        rows = self.pool.rows[request.blocks[: self.pool.shape.blocks(tokens)]]
        blocks, layers, _, block_tokens, heads, width = rows.shape
        laid = rows.permute(1, 2, 4, 0, 3, 5).reshape(layers, 2, 1, heads, blocks * block_tokens, width)
        return laid[..., :tokens, :].contiguous()

    def hidden_states_of(self, hidden: torch.Tensor, tokens: int) -> torch.Tensor:
        """The first ``tokens`` of ``hidden`` [1, tokens or more, hidden] on this device.

        Raises CacheError for those of another width, dtype or length.
        """
        width, dtype = self._base.config.hidden_size, self.pool.shape.dtype
        fits = hidden.dim() == 3 and hidden.shape[0] == 1 and hidden.shape[1] >= tokens and hidden.shape[2] == width
        if not fits or hidden.dtype != dtype:
            raise CacheError(
                f"hidden states {list(hidden.shape)} of {hidden.dtype} do not fit: "
                f"{tokens} tokens of {width} numbers in {dtype} are wanted"
            )
        return hidden[:, :tokens].to(self.pool.device)

    def forget(self, request: Request) -> None:
        """Drop the hidden states that are kept of the request."""
        (request.version or self.version).forget(request)

    def swap_out(self, request: Request) -> CopyTimes | None:
        """Copy what the request has cached to the host pool; None when that is full, or there is none."""
        if not self._reserve(request):
            return None
        times = self._save(request, self.pool.shape.blocks(request.cached))
        request.saved = request.cached // self.block_tokens  # the last block goes on
        return times

    def swap_in(self, request: Request) -> Movement:
        """Begin to copy the request's keys and values back to its blocks."""
        first, end = request.head // self.block_tokens, self.pool.shape.blocks(request.cached)
        return self.path.into(self._part(request, first, end), request.blocks[first:end])

    def drop(self, host: Span) -> None:
        """Give the span back to the host pool."""
        self.host_pool.release(host)

    def close(self) -> None:
        """Give the model its own attention back, and end the swap path's threads."""
        if self.path is not None:
            self.path.close()
        self._base.set_attn_implementation(self._stock)


def _adapted(model: nn.Module) -> nn.Module | None:
    """A module that carries an adapter of PEFT, which nobody can have made without having imported it."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft and next((module for module in model.modules() if isinstance(module, peft.BaseTunerLayer)), None)
