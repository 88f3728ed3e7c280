"""One cold start, in a process of its own: ``python -m firsttoken.progressive.coldstart.trial SPEC``.

Prints one line of JSON. All times are ``time.monotonic``, which parent and child share, so that the interpreter's own
start counts. Nothing but the standard library is imported before the first mark.
"""

from __future__ import annotations

import time

INTERPRETER_UP = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from firsttoken.link import Link, LinkConfig  # noqa: E402
from firsttoken.progressive.checkpoint.manifest import read_manifest  # noqa: E402
from firsttoken.progressive.coldstart.variants import Variant, find_variant  # noqa: E402
from firsttoken.progressive.loading.blobs import open_reader, part_blobs  # noqa: E402
from firsttoken.progressive.loading.reader import BlobReader  # noqa: E402
from firsttoken.study.footprint import cpu_seconds, peak, reset_peak  # noqa: E402


@dataclass(frozen=True)
class TrialSpec:
    """What the parent asks for. ``staged`` is a staged checkpoint, ``stock`` the same model as one file.

    ``gbit_per_s`` shapes our own reads with a token bucket (0: not at all; a limit in the kernel is the parent's).
    ``stages`` are loaded instead of the variant's own, where given; ``recover`` loads the later ones after the first
    token. With an empty ``prompt`` (random weights have no
    tokenizer) it is ``prompt_tokens`` arbitrary ids.
    """

    variant: str
    staged: str
    stock: str
    prompt: str
    prompt_tokens: int = 0
    gbit_per_s: float = 0.0
    threads: int = 0
    readers: int = 8
    device: str = "cpu"
    spawned_s: float = 0.0
    stages: tuple[int, ...] = ()
    recover: bool = False


@dataclass
class Marks:
    """Phases in seconds, one after another, and what the process had used by then."""

    last: float
    phases: dict[str, float] = field(default_factory=dict)

    def phase(self, name: str) -> None:
        """The time since the last mark was ``name``."""
        now = time.monotonic()
        self.phases[name] = now - self.last
        self.last = now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Of the phase ``source``, ``seconds`` were ``target``."""
        self.phases[source] -= seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds


def main(spec: TrialSpec) -> dict[str, Any]:
    """Run the trial and return its row."""
    variant = find_variant(spec.variant)
    if spec.stages:
        variant = replace(variant, stages=tuple(spec.stages))
    links = [Link(LinkConfig(spec.gbit_per_s)) for _ in range(variant.links)]
    if variant.name == "read":
        return _read_alone(spec, variant, links)
    marks = Marks(spec.spawned_s)
    marks.last = INTERPRETER_UP
    marks.phases["interpreter"] = INTERPRETER_UP - spec.spawned_s
    reader, reading = None, time.monotonic()
    if variant.early:
        reader = _open(spec, variant, links)

    import torch

    _import_libraries(spec, variant)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    marks.phase("imports")
    arrived, used = marks.last, cpu_seconds()
    before = reset_peak()
    if not (variant.early or variant.peer) and spec.device == "cpu":
        # on CUDA the reader needs pinned memory, and so the load opens it
        reading = time.monotonic()
        reader = _open(spec, variant, links)
    prompt = _tokenize(spec, variant)
    marks.phase("config and tokenizer")
    start = _start_peer if variant.peer else _start_ours
    with torch.inference_mode():
        first, more = start(spec, variant, links, reader, prompt, marks)
    token_s = marks.last
    row: dict[str, Any] = {
        "token_id": first,
        "ttft_process_s": token_s - spec.spawned_s,
        "ttft_request_s": token_s - arrived,
        "cpu_s": cpu_seconds() - used,
        **{f"phase_{name.replace(' ', '_')}_s": seconds for name, seconds in marks.phases.items()},
    }
    row |= more(reading)
    if "cpu_full_s" in row:
        row["cpu_full_s"] -= used
    row["growth_bytes"] = peak() - before
    return row


More = Callable[[float], dict[str, Any]]


def _import_libraries(spec: TrialSpec, variant: Variant) -> None:
    """Everything a worker of this kind has in memory before it knows which request will come."""
    import tokenizers  # noqa: F401
    import transformers

    config = json.loads(Path(spec.stock, "config.json").read_text(encoding="utf-8"))
    getattr(transformers, config["architectures"][0])
    if variant.peer:
        from firsttoken.progressive.loading.peers import import_peer

        import_peer(variant.peer)
    else:
        from firsttoken.progressive.loading import loader  # noqa: F401
    if variant.peer == "from_pretrained":
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def _tokenize(spec: TrialSpec, variant: Variant) -> Any:
    """The prompt's ids [1, tokens]; by the Auto class for the stock way, by the tokenizer's own file otherwise."""
    import torch

    if variant.peer == "from_pretrained" and spec.prompt:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(spec.stock, local_files_only=True)(spec.prompt, return_tensors="pt")[
            "input_ids"
        ].to(spec.device)
    if not spec.prompt:
        return torch.arange(1, spec.prompt_tokens + 1)[None].to(spec.device)
    from tokenizers import Tokenizer

    return torch.tensor([Tokenizer.from_file(f"{spec.stock}/tokenizer.json").encode(spec.prompt).ids]).to(spec.device)


def _start_peer(
    spec: TrialSpec, variant: Variant, links: list[Link], reader: BlobReader | None, prompt: Any, marks: Marks
) -> tuple[int, More]:
    from firsttoken.progressive.loading.peers import load_with

    model = load_with(variant.peer, Path(spec.stock), device=spec.device)
    marks.phase("load")
    token = _prefill(model, prompt)
    marks.phase("prefill")
    return token, lambda reading: {"load_s": marks.phases["load"], "prefill_warm_s": _warm(model, prompt)}


def _start_ours(
    spec: TrialSpec, variant: Variant, links: list[Link], reader: BlobReader | None, prompt: Any, marks: Marks
) -> tuple[int, More]:
    from firsttoken.progressive.loading.loader import Skeleton, StageLoad

    folder = Path(spec.staged)
    manifest = read_manifest(folder)
    skeleton = Skeleton(folder, manifest, spec.device)
    marks.phase("build")
    options = {"threads": spec.readers, "verify": variant.verify, "reader": reader}
    load = StageLoad(folder, manifest, variant.stages, links, skeleton, skeleton.empty_view(), **options)
    marks.phase("adapter")
    load.view.activate(skeleton.model)
    if variant.streamed:
        with load.streaming():
            token = _prefill(skeleton.model, prompt)
        marks.phase("prefill")
        marks.move("prefill", "load", load.stalled_s)
    else:
        load.wait()
        marks.phase("load")
        token = _prefill(skeleton.model, prompt)
        marks.phase("prefill")

    def more(reading: float) -> dict[str, Any]:
        view = load.wait()
        row: dict[str, Any] = {"load_s": load.arrived_s - reading, "place_s": load.placing_s}
        row["bytes"] = sum(link.bytes_moved for link in links)
        if spec.recover:
            row |= _recover(spec, manifest, links, skeleton, view, variant, prompt)
            view.activate(skeleton.model)
        return row | {"prefill_warm_s": _warm(skeleton.model, prompt)}

    return token, more


def _recover(
    spec: TrialSpec, manifest: Any, links: list[Link], skeleton: Any, view: Any, variant: Variant, prompt: Any
) -> dict[str, Any]:
    """Bring the later stages one after another, with nothing else to do; and what the whole model says then."""
    from firsttoken.progressive.loading.loader import StageLoad

    row: dict[str, Any] = {}
    options = {"threads": spec.readers, "verify": variant.verify}
    for stage in range(max(variant.stages) + 1, len(manifest.stages) + 1):
        begin = time.monotonic()
        view = StageLoad(Path(spec.staged), manifest, [stage], links, skeleton, view, **options).wait()
        row[f"stage{stage}_s"] = time.monotonic() - begin
    row["cpu_full_s"], row["full_bytes"] = cpu_seconds(), sum(link.bytes_moved for link in links)
    view.activate(skeleton.model)
    return row | {"full_token_id": _prefill(skeleton.model, prompt)}


def _open(spec: TrialSpec, variant: Variant, links: list[Link]) -> BlobReader:
    folder = Path(spec.staged)
    options = {"threads": spec.readers, "verify": variant.verify}
    return open_reader(folder, read_manifest(folder), variant.stages, links, **options)


def _read_alone(spec: TrialSpec, variant: Variant, links: list[Link]) -> dict[str, Any]:
    """Every part read and none used: what the link gives, measured the way the trials use it."""
    folder = Path(spec.staged)
    blobs = part_blobs(folder, read_manifest(folder), variant.stages)
    reader = BlobReader(blobs, links, threads=spec.readers, verify=False)
    begin = time.monotonic()
    reader.start()
    for index in range(len(blobs)):
        reader.wait(index)
    return {"load_s": time.monotonic() - begin, "bytes": sum(blob.bytes for blob in blobs)}


def _prefill(model: Any, prompt: Any) -> int:
    return int(model(prompt, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def _warm(model: Any, prompt: Any) -> float:
    """Seconds of a second prefill, every weight in place and every kernel chosen."""
    from firsttoken.study.clock import timed

    return timed(lambda: _prefill(model, prompt), repeats=1, warmup=0, device=prompt.device)[0]


if __name__ == "__main__":
    asked = TrialSpec(**json.loads(sys.argv[1]))
    print(json.dumps({"variant": asked.variant, "gbit_per_s": asked.gbit_per_s} | main(asked)))
