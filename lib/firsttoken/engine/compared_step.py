"""One step through what will serve, held against the model's own forward pass before a service says that it is ready.

An engine takes the attention out of a model and lays its layers end to end. Whether a model is still itself then is not
believed of its name alone: a prompt of twenty tokens goes through the engine in two pieces and three tokens one by one,
so that what it reads lies in two blocks, and through the model's own modules at once. What was right is kept in the
cache by files, dtype, code and machine, and costs its tenths of a second once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from firsttoken.assets.checkpoint import ModelFiles
from firsttoken.assets.empty_model import set_parameter
from firsttoken.assets.weights import tensors_of
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.attention import Attend
from firsttoken.engine.decoder import Decoder
from firsttoken.engine.executor import Limits
from firsttoken.engine.kv import KVPool
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.step_plan import StepPlan
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError, ModelError, first_line
from firsttoken.study.extensions import CPU
from firsttoken.study.machine import cpu_flags
from firsttoken.study.system.processor import cpu_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CUTS = (11, 17, 18, 19, 20)
"""Tokens behind which the pieces of the prompt end; the logits there are compared."""
TOLERANCES = {torch.float32: 0.002, torch.float16: 0.03, torch.bfloat16: 0.15}
"""The most that half of the compared rows may be away, as a share of the row's own spread. Rounding gives 2e-6 in
float32 and up to 0.06 in bfloat16, another model's layers about 1 (41 tiny random families of 8 layers)."""
NOTES = paths.CACHE / "compared-steps"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def prompt_of(limits: Limits) -> list[int]:
    """Return the token ids of the prompt, as many as fit."""
    return [(number * 7919 + 17) % limits.vocabulary for number in range(min(CUTS[-1], limits.context))]


def chunks_of(prompt: Sequence[int], block_tokens: int) -> Iterator[ScheduledChunk]:
    """Yield the pieces of ``prompt`` as chunks of a request that is alone in a pool."""
    request = Request(0, prompt, Sampling(1), 0.0)
    request.blocks = list(range(-(-len(prompt) // block_tokens)))
    stops = sorted({min(cut, len(prompt)) for cut in CUTS})
    for start, end in zip([0, *stops], stops, strict=False):
        yield ScheduledChunk(request, start, end, start)


@torch.inference_mode()
def engine_rows(decoder: Decoder, pool: KVPool, attend: type[Attend], prompt: Sequence[int]) -> Tensor:
    """The logits [pieces, vocabulary] behind each piece, through ``decoder`` over a pool of its own that is as ``pool``
    but for its size."""
    small = KVPool(pool.shape, pool.shape.blocks(len(prompt)), pool.device, elsewhere=pool.rows.is_meta)
    steps = [StepPlan.of([chunk], small, attend) for chunk in chunks_of(prompt, pool.shape.block_tokens)]
    return torch.cat([decoder.logits(step)[:1] for step in steps])


class Reference(NamedTuple):
    """The ``rows`` of a model's own modules, and how far one more ``rounding`` of what enters its layers moves them:
    in half precision some mixtures of experts choose others then, and nothing can be told from a step."""

    rows: Tensor
    rounding: float = 0.0


@torch.inference_mode()
def reference_rows(model: nn.Module, prompt: Sequence[int]) -> Reference:
    """Return the rows of :func:`engine_rows` as ``model`` itself computes them, in one forward pass; in half precision
    in two."""
    embedding = model.get_input_embeddings()
    ids = torch.tensor([list(prompt)], device=embedding.weight.device)
    with _run_errors(type(model).__name__):
        rows = _compared_rows(model(input_ids=ids, use_cache=False).logits[0])
    if not _is_half(rows.dtype):
        return Reference(rows)
    handle = embedding.register_forward_hook(lambda module, args, out: _perturbed(out))
    try:
        return Reference(rows, _distance(_compared_rows(model(input_ids=ids, use_cache=False).logits[0]), rows))
    finally:
        handle.remove()


@torch.inference_mode()
def lean_rows(files: ModelFiles, dtype: torch.dtype, device: str, prompt: Sequence[int]) -> Reference:
    """Return the rows of :func:`engine_rows` by the modules of the model of ``files``, lean or stock, one layer of
    which is in memory at a time.

    Raises ModelError as :func:`tensors_of`.
    """
    model = build_model(files.folder, dtype)
    model.model.rotary_emb.to(device)

    def bring(wanted: Callable[[str], bool]) -> None:
        for name, tensor in tensors_of(files, wanted, device):
            set_parameter(model, name, tensor)

    bring(lambda name: not _LAYER.match(name))
    model.tie_weights()
    ids = torch.tensor([list(prompt)], device=device)
    hidden = model.model.embed_tokens(ids)
    turns = model.model.rotary_emb(hidden, torch.arange(len(prompt), device=device)[None])
    for number, layer in enumerate(model.model.layers):
        bring(lambda name, prefix=f"model.layers.{number}.": name.startswith(prefix))
        hidden = layer(hidden, attention_mask=None, position_embeddings=turns, past_key_values=None)
        layer.to("meta")
    return Reference(_compared_rows(model.lm_head(model.model.norm(hidden))[0]))


class _ReachedError(Exception):
    """The end of a span, with the ``states`` there."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


@torch.inference_mode()
def span_rows(model: PreTrainedModel, hidden: Tensor) -> Reference:
    """Return what the layers of ``model``, whose ends need not be there, add to ``hidden`` [tokens, hidden] in its own
    forward pass, and by how much they move what is rounded once more."""

    def leave(module: nn.Module, args: Any, out: Tensor) -> None:
        raise _ReachedError(out)

    def through(states: Tensor) -> Tensor:
        layers = model.model.layers
        with ExitStack() as hooked:
            for handle in (
                layers[0].register_forward_pre_hook(
                    lambda module, args, keywords: ((states[None], *args[1:]), keywords), with_kwargs=True
                ),
                layers[-1].register_forward_hook(leave),
            ):
                hooked.callback(handle.remove)
            with _run_errors(type(model).__name__):
                try:
                    model.model(inputs_embeds=states[None], use_cache=False)
                except _ReachedError as reached:
                    return reached.states[0] - states
        raise ModelError(f"{type(model).__name__} does not run its layers; use a model of another family")

    return Reference(
        rows := through(hidden), _distance(through(_perturbed(hidden)), rows) if _is_half(hidden.dtype) else 0.0
    )


def check_rows(name: str, run: Callable[[], Tensor], reference: Reference, dtype: torch.dtype) -> None:
    """Raise ModelError unless half of the rows that ``run`` computes of ``name`` in ``dtype`` are within
    :data:`TOLERANCES` of its ``reference``, or within twice its rounding. Where these are no finite numbers there is
    nothing to compare with."""
    if not torch.isfinite(reference.rows).all():
        return
    with _run_errors(name):
        away = _distance(run(), reference.rows)
    if not away <= (most := max(TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]), 2 * reference.rounding)):
        raise ModelError(
            f"{name} is another model here than by its own modules: a step differs by {away:.2g} of the spread of its "
            f"numbers, at most {most:g} in {str(dtype).removeprefix('torch.')}; use a model of another family"
        )


@contextmanager
def _run_errors(name: str) -> Iterator[None]:
    """Inside the block modules run that may ask anything of the engine, or of a configuration that is not theirs."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, FirstTokenError):
        raise
    except Exception as error:  # of many kinds
        raise ModelError(f"{name} cannot be run here: {first_line(error)}; use a model of another family") from error


class Comparison:
    """A note of whether this code on this machine has compared what ``parts`` name."""

    def __init__(self, files: Iterable[Path], *parts: Any) -> None:
        """``files`` are those of the model: each counts with its size, its beginning and its end. Raises OSError."""
        subject = [parts, cpu_model(), sorted(cpu_flags()), os.environ.get("FIRSTTOKEN_ACCELERATOR", "")]
        digest = hashlib.sha256(json.dumps(subject, default=str, sort_keys=True).encode())
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_PART))
                opened.seek(-min(_PART, file.stat().st_size), os.SEEK_END)
                digest.update(opened.read(_PART))
        self._note = NOTES / f"{_code_digest()}-{digest.hexdigest()[:24]}"

    @property
    def due(self) -> bool:
        """Return whether the comparison is still to be made: nobody has noted that it was right."""
        return self._note not in _PASSED and not self._note.is_file()

    def mark_passed(self) -> None:
        """Note that the comparison was right."""
        _PASSED.add(self._note)
        with suppress(OSError):  # in a cache that cannot be written it is compared at each start
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.touch()


_PASSED: set[Path] = set()  # notes of this process
_PART = 1 << 16


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _perturbed(states: Tensor) -> Tensor:
    """``states`` [..., width], of which each third number is one rounding larger, and each third one smaller."""
    steps = torch.arange(states.shape[-1], device=states.device) % 3 - 1
    return (states.float() * (1 + torch.finfo(states.dtype).eps * steps)).to(states.dtype)


def _distance(rows: Tensor, reference: Tensor) -> float:
    """Return how far the median of ``rows`` is from ``reference``, as a share of the spread of its numbers."""
    rows, reference = rows.float().cpu(), reference.float().cpu()
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((rows - reference).norm(dim=-1) / spread.clamp_min(1e-20)).nan_to_num(torch.inf).median())


def _compared_rows(logits: Tensor) -> Tensor:
    """The rows of ``logits`` [tokens, vocabulary] behind each piece."""
    return logits[[min(cut, len(logits)) - 1 for cut in sorted({min(cut, len(logits)) for cut in CUTS})]]


@cache
def _code_digest() -> str:
    """A digest of the sources that compute, and the versions of what they stand on."""
    library = Path(__file__).parent.parent
    rooms = library / "assets", library / "engine", library.with_name(CPU)
    sources = [file for room in rooms for file in room.rglob("*.*")]
    digest = hashlib.sha256(f"{torch.__version__} {version('transformers')}".encode())
    for file in sorted(file for file in sources if file.suffix in (".py", ".cpp", ".h")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
