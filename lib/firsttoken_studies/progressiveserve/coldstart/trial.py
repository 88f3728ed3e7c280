"""One cold start, in a process of its own: ``python -m firsttoken_studies.progressiveserve.coldstart.trial SPEC``.

Prints one line of JSON. All times are ``time.monotonic``, which parent and child share, so that the interpreter's own
start counts. Nothing but the standard library is imported before the first mark.
"""

from __future__ import annotations

import time

INTERPRETER_UP = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from contextlib import ExitStack, nullcontext  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from firsttoken.link.shaped import Link, LinkConfig  # noqa: E402
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest  # noqa: E402
from firsttoken.progressiveserve.loading.read_plan import open_reader, part_blobs  # noqa: E402
from firsttoken.progressiveserve.loading.reader import BlobReader  # noqa: E402
from firsttoken.study.system.direct_io import read_ahead  # noqa: E402
from firsttoken.study.system.importing import without_collector  # noqa: E402
from firsttoken_studies.probes.fast_exit import tell_and_end  # noqa: E402
from firsttoken_studies.probes.footprint import MemoryGrowth, cpu_seconds  # noqa: E402
from firsttoken_studies.progressiveserve.coldstart.spec import PhaseClock, TrialSpec, prompt_ids  # noqa: E402
from firsttoken_studies.progressiveserve.coldstart.variants import StartVariant, find_variant  # noqa: E402

if TYPE_CHECKING:
    from firsttoken_cpu.before_torch.numpy_model import NumpyModel


def main(spec: TrialSpec) -> dict[str, Any]:
    """Run the trial and return its row."""
    variant = find_variant(spec.variant)
    variant = replace(variant, stages=tuple(spec.stages) or variant.stages, lean=spec.lean or variant.lean)
    links = [Link(LinkConfig(spec.gbit_per_s)) for _ in range(variant.links)]
    if variant.name == "read":
        return _read_alone(spec, variant, links)
    marks = PhaseClock(spec.spawned_s)
    marks.last = INTERPRETER_UP
    marks.phases["interpreter"] = INTERPRETER_UP - spec.spawned_s
    if variant.torch_behind:
        row = _stages_before_torch(spec, variant, links, marks)
        if row is not None:
            return row
    manifest, reader, reading = None, None, time.monotonic()
    if variant.early and variant.peer:
        _read_ahead(spec)
    elif variant.early:
        manifest = read_manifest(Path(spec.staged))
        reader = _open(spec, variant, manifest, links)

    with without_collector() if variant.lean else nullcontext():
        import torch

        torch_s = time.monotonic() - INTERPRETER_UP
        from firsttoken_studies.progressiveserve.coldstart import trial_variants
        from firsttoken_studies.progressiveserve.device_memory import device_peak

        trial_variants.import_libraries(spec, variant)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    marks.phase("imports")
    arrived, used = marks.last, cpu_seconds()
    growth = MemoryGrowth()
    if not (variant.early or variant.peer) and spec.device == "cpu":
        # on CUDA the reader needs pinned memory, and so the load opens it
        reading = time.monotonic()
        manifest = read_manifest(Path(spec.staged))
        reader = _open(spec, variant, manifest, links)
    builder = trial_variants.begin_building(spec, variant, manifest, reader) if manifest and reader else None
    with ExitStack() as failing, torch.inference_mode():
        if builder:
            failing.callback(builder.close)
        prompt = trial_variants.tokenize(spec, variant)
        marks.phase("config and tokenizer")
        if variant.peer:
            first, more = trial_variants.start_peer(spec, variant, prompt, marks)
        else:
            first, more = trial_variants.start_ours(spec, variant, links, builder, prompt, marks)
        failing.pop_all()
    row = {"token_id": first} | _first_token(spec, marks, arrived, used)
    row |= more(reading) | _told(variant, torch_s)
    if "cpu_full_s" in row:
        row["cpu_full_s"] -= used
    row["growth_bytes"] = growth.bytes()
    return row | device_peak(spec.device)


def _read_ahead(spec: TrialSpec) -> None:
    """Bring the plain folder's weights into the page cache, in a thread a file."""
    for file in sorted(Path(spec.stock).glob("*.safetensors")):
        threading.Thread(target=read_ahead, args=(file,), daemon=True).start()


def _stages_before_torch(
    spec: TrialSpec, variant: StartVariant, links: list[Link], marks: PhaseClock
) -> dict[str, Any] | None:
    """The row of a trial of stages whose first token comes before torch, which then has the same weights; None, after a
    line on stderr, for stages that need torch. Raises ModelError for a folder that cannot be served."""
    from firsttoken.assets.text_tokenizer import read_text_tokenizer  # noqa: F401 its import belongs to this phase
    from firsttoken.study.errors import NotLean
    from firsttoken_cpu.before_torch.numpy_model import NumpyModel
    from firsttoken_cpu.before_torch.stage_weights import StageWeights

    marks.phase("imports")
    arrived, used, growth = marks.last, cpu_seconds(), MemoryGrowth()
    threads = spec.threads or None
    options = {"stages": variant.stages, "source": spec.weights, "verify": variant.verify, "readers": spec.readers}
    try:
        weights = StageWeights(Path(spec.staged), links, threads=threads, **options)
        model = _in_the_dtype(spec, NumpyModel(weights, threads=threads))
    except NotLean as reason:
        print(f"firsttoken: {Path(spec.staged).name} starts with torch: {reason}", file=sys.stderr)
        return None
    ids = prompt_ids(spec)
    marks.phase("config and tokenizer")
    row = {"token_id": model.next_token(ids), "torch_at_first_token": "torch" in sys.modules}
    marks.phase("prefill")
    row |= _first_token(spec, marks, arrived, used) | {"lean": "transformers" not in sys.modules}
    row["growth_bytes"] = growth.bytes()
    read = weights.read()
    with without_collector():
        import torch

        from firsttoken_studies.progressiveserve.coldstart import trial_variants

        torch_s = time.monotonic() - marks.last
    with torch.inference_mode():
        row |= trial_variants.torch_behind(spec, variant, links, weights.manifest, read, marks.last)
    return row | {"torch_s": torch_s}


def _in_the_dtype(spec: TrialSpec, model: NumpyModel) -> NumpyModel:
    """``model``. Raises NotLean where another dtype is asked for."""
    from firsttoken.study.errors import NotLean

    if spec.dtype not in ("stored", model.dtype):
        model.weights.close()
        raise NotLean(f"it computes in {model.dtype}, and {spec.dtype} is asked for")
    return model


def _first_token(spec: TrialSpec, marks: PhaseClock, arrived: float, used: float) -> dict[str, Any]:
    """The times of the first token, which has just come: by the request that ``arrived``, and by what the process had
    ``used`` of the processor by then."""
    phases = {f"phase_{name.replace(' ', '_')}_s": seconds for name, seconds in marks.phases.items()}
    begun = {"ttft_process_s": marks.last - spec.spawned_s, "ttft_request_s": marks.last - arrived}
    return begun | {"cpu_s": cpu_seconds() - used} | phases


def _told(variant: StartVariant, torch_s: float) -> dict[str, Any]:
    """Return for a lean start when torch was there, and whether transformers was never imported."""
    return {"torch_s": torch_s, "lean": "transformers" not in sys.modules} if variant.lean else {}


def _open(spec: TrialSpec, variant: StartVariant, manifest: Manifest, links: list[Link]) -> BlobReader:
    options = {"threads": spec.readers, "verify": variant.verify}
    return open_reader(spec.weights, manifest, variant.stages, links, **options)


def _read_alone(spec: TrialSpec, variant: StartVariant, links: list[Link]) -> dict[str, Any]:
    """Read every part and use none: the rate that the link gives, measured the way the trials use it."""
    blobs = part_blobs(spec.weights, read_manifest(Path(spec.staged)), variant.stages)
    reader = BlobReader(blobs, links, threads=spec.readers, verify=False)
    begin = time.monotonic()
    reader.start()
    for index in range(len(blobs)):
        reader.wait(index)
    took = time.monotonic() - begin
    reader.close()
    return {"load_s": took, "bytes": sum(blob.bytes for blob in blobs)}


if __name__ == "__main__":
    trial_spec = TrialSpec(**json.loads(sys.argv[1]))
    tell_and_end({"variant": trial_spec.variant, "gbit_per_s": trial_spec.gbit_per_s} | main(trial_spec))
