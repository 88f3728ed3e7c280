"""What a trial does once torch is there: libraries, prompt, weights and the first token, by variant.

Loaders are imported where they are used: a worker has only its own in memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from firsttoken.assets.text_tokenizer import read_text_tokenizer  # noqa: F401 imported with the libraries, before the clock of a request
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest
from firsttoken.progressiveserve.loading.reader import BlobReader
from firsttoken.study.dtypes import DTYPES, named
from firsttoken.study.timing import timed
from firsttoken_studies.probes.footprint import cpu_seconds
from firsttoken_studies.progressiveserve.coldstart.spec import PhaseClock, TrialSpec, prompt_ids
from firsttoken_studies.progressiveserve.coldstart.variants import StartVariant

if TYPE_CHECKING:
    from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder
    from firsttoken_cpu.before_torch.stage_weights import UnpackedFiles


More = Callable[[float], dict[str, Any]]


def import_libraries(spec: TrialSpec, variant: StartVariant) -> None:
    """Everything a worker of this kind has in memory before it knows which request will come."""
    import tokenizers  # noqa: F401

    if not variant.lean:
        import transformers

        config = json.loads(Path(spec.stock, "config.json").read_text(encoding="utf-8"))
        getattr(transformers, config["architectures"][0])
    if variant.peer:
        from firsttoken_studies.progressiveserve.coldstart.rival_loaders import import_peer

        import_peer(variant.peer)
    else:
        from firsttoken.progressiveserve.loading import loader  # noqa: F401

        if "planes" in read_manifest(Path(spec.staged)).formats:
            from firsttoken_extras.bitplanes.native_words import merger

            merger()
    if variant.peer == "from_pretrained":
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def tokenize(spec: TrialSpec, variant: StartVariant) -> Any:
    """The prompt's ids [1, tokens]; by the Auto class for the stock way, by the tokenizer's own file otherwise."""
    if variant.peer == "from_pretrained" and spec.prompt:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(spec.stock, local_files_only=True)
        return tokenizer(spec.prompt, return_tensors="pt")["input_ids"].to(spec.device)
    return torch.tensor([prompt_ids(spec)]).to(spec.device)


def begin_building(spec: TrialSpec, variant: StartVariant, manifest: Manifest, reader: BlobReader) -> WeightBuilder:
    """Weights of what ``reader`` brings, from now on: what is done meanwhile needs the processor less than they do."""
    from firsttoken.progressiveserve.checkpoint.names import torch_dtype
    from firsttoken.progressiveserve.loading.weight_builder import WeightBuilder

    dtype = _dtype(spec) or torch_dtype(manifest.dtype)
    return WeightBuilder(manifest, variant.stages, reader, torch.device(spec.device), dtype)


def start_peer(spec: TrialSpec, variant: StartVariant, prompt: Any, marks: PhaseClock) -> tuple[int, More]:
    """Somebody else's loader, then the prefill: the first token, and what to measure after it."""
    from firsttoken_studies.progressiveserve.coldstart.rival_loaders import load_with

    model = load_with(variant.peer, Path(spec.stock), _dtype(spec), spec.device)
    marks.phase("load")
    token = _prefill(model, prompt)
    marks.phase("prefill")
    return token, lambda reading: {"load_s": marks.phases["load"], "prefill_warm_s": _warm(model, prompt)}


def start_ours(
    spec: TrialSpec,
    variant: StartVariant,
    links: list[Link],
    builder: WeightBuilder | None,
    prompt: Any,
    marks: PhaseClock,
) -> tuple[int, More]:
    """Our loader, the prefill behind it or in its stream: the first token, and what to measure after it."""
    from firsttoken.assets.empty_model import build_on_meta
    from firsttoken.engine.accelerator import build_model
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel

    folder = Path(spec.staged)
    manifest = builder.manifest if builder else read_manifest(folder)  # which takes some 50 ms
    meta_model = MetaModel(folder, manifest, spec.device, _dtype(spec), build_model if variant.lean else build_on_meta)
    marks.phase("build")
    options = {"threads": spec.readers, "verify": variant.verify, "builder": builder}
    load = StageLoad(spec.weights, manifest, variant.stages, links, meta_model, meta_model.empty_view(), **options)
    marks.phase("adapter")
    load.view.activate(meta_model.model)
    if variant.streamed:
        with load.streaming():
            token = _prefill(meta_model.model, prompt)
        marks.phase("prefill")
        marks.move("prefill", "load", load.stalled_s)
    else:
        load.wait()
        marks.phase("load")
        token = _prefill(meta_model.model, prompt)
        marks.phase("prefill")

    def more(reading: float) -> dict[str, Any]:
        view = load.wait()
        row: dict[str, Any] = {"load_s": load.arrived_s - reading, "place_s": load.placing_s}
        row["bytes"] = sum(link.bytes_moved for link in links)
        return row | _after(spec, manifest, links, meta_model, view, variant, prompt, time.monotonic())

    return token, more


def torch_behind(
    spec: TrialSpec, variant: StartVariant, links: list[Link], manifest: Manifest, read: UnpackedFiles, begun: float
) -> dict[str, Any]:
    """Load the weights in torch behind a first token of ``begun`` that came without it: build the same weights from
    what has been ``read``, and return the measures of :func:`start_ours`."""
    from firsttoken.engine.accelerator import build_model
    from firsttoken.progressiveserve.loading.loader import StageLoad
    from firsttoken.progressiveserve.loading.meta_model import MetaModel

    folder = Path(spec.staged)
    meta_model = MetaModel(folder, manifest, spec.device, _dtype(spec), build_model)
    builder = read.builder(manifest, variant.stages, meta_model.device, meta_model.dtype)
    load = StageLoad(folder, manifest, variant.stages, links, meta_model, meta_model.empty_view(), builder=builder)
    view, prompt = load.wait(), tokenize(spec, variant)
    row = {"place_s": load.placing_s, "bytes": sum(link.bytes_moved for link in links)}
    return row | _after(spec, manifest, links, meta_model, view, variant, prompt, begun)


def _after(
    spec: TrialSpec,
    manifest: Manifest,
    links: list[Link],
    meta_model: Any,
    view: Any,
    variant: StartVariant,
    prompt: Any,
    begun: float,
) -> dict[str, Any]:
    """Run what follows the first stage, as :class:`TrialSpec` asks for it, and return its measures: the later stages
    one after another, with nothing else to do, the first of them timed since ``begun``, then the whole model's token,
    and the digest."""
    from firsttoken.progressiveserve.loading.loader import StageLoad

    row: dict[str, Any] = {}
    options = {"threads": spec.readers, "verify": variant.verify}
    for stage in range(max(variant.stages) + 1, len(manifest.stages) + 1) if spec.recover else ():
        view = StageLoad(spec.weights, manifest, [stage], links, meta_model, view, **options).wait()
        now = time.monotonic()
        row[f"stage{stage}_s"], begun = now - begun, now
    view.activate(meta_model.model)
    if spec.recover:
        row["cpu_full_s"], row["full_bytes"] = cpu_seconds(), sum(link.bytes_moved for link in links)
        row["full_token_id"] = _prefill(meta_model.model, prompt)
    if spec.digest:
        row["weights_sha256"] = _digest(meta_model.model)
    return row | {"prefill_warm_s": _warm(meta_model.model, prompt)}


def _dtype(spec: TrialSpec) -> torch.dtype | None:
    return named(spec.dtype) if spec.dtype in DTYPES else None


def _digest(model: Any) -> str:
    """The sha256 of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for _, weights in sorted(model.named_parameters()):
        digest.update(weights.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _prefill(model: Any, prompt: Any) -> int:
    return int(model(prompt, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def _warm(model: Any, prompt: Any) -> float:
    """Seconds of a second prefill, every weight in place and every kernel chosen."""
    return timed(lambda: _prefill(model, prompt), repeats=1, warmup=0, device=prompt.device)[0]
