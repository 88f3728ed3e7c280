"""One cold start, in a process of its own: ``python -m firsttoken.progressive.coldstart.trial SPEC``.

Prints one line of JSON. All times are ``time.monotonic``, which parent and child share, so that the interpreter's own
start counts. Nothing but the standard library is imported before the first mark.
"""

from __future__ import annotations

import time

INTERPRETER_UP = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from firsttoken.link import Link, LinkConfig  # noqa: E402
from firsttoken.progressive.checkpoint.manifest import read_manifest  # noqa: E402
from firsttoken.progressive.coldstart.variants import Variant, find_variant  # noqa: E402
from firsttoken.progressive.loading.blobs import Folder, open_reader, part_blobs  # noqa: E402
from firsttoken.progressive.loading.reader import BlobReader  # noqa: E402
from firsttoken.study.system.footprint import Growth, cpu_seconds  # noqa: E402


@dataclass(frozen=True)
class TrialSpec:
    """What the parent asks for. ``staged`` is a staged checkpoint, ``stock`` the same model as one file.

    ``gbit_per_s`` shapes our own reads with a token bucket (0: not at all; a limit in the kernel is the parent's).
    ``server`` is the address of a data server that has the staged weights; config and tokenizer are here even then.
    ``stages`` are loaded instead of the variant's own, where given; ``recover`` loads the later ones after the first
    token. With an empty ``prompt`` (random weights have no tokenizer) it is ``prompt_tokens`` arbitrary ids. ``dtype``
    is what computes ("stored": the checkpoint's own); to convert the weights is part of loading them.
    """

    variant: str
    staged: str
    stock: str
    prompt: str
    prompt_tokens: int = 0
    gbit_per_s: float = 0.0
    server: str = ""
    threads: int = 0
    readers: int = 8
    device: str = "cpu"
    dtype: str = "stored"
    spawned_s: float = 0.0
    stages: tuple[int, ...] = ()
    recover: bool = False

    @property
    def weights(self) -> Folder:
        """Where the staged weights are read; connections to a data server are those of one load."""
        if not self.server:
            return Path(self.staged)
        from firsttoken.progressive.loading.remote import Remote, RemotePath

        return RemotePath(Remote(self.server))


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

    from firsttoken.progressive.coldstart import starts
    from firsttoken.progressive.device_memory import device_peak

    starts.import_libraries(spec, variant)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    marks.phase("imports")
    arrived, used = marks.last, cpu_seconds()
    growth = Growth()
    if not (variant.early or variant.peer) and spec.device == "cpu":
        # on CUDA the reader needs pinned memory, and so the load opens it
        reading = time.monotonic()
        reader = _open(spec, variant, links)
    prompt = starts.tokenize(spec, variant)
    marks.phase("config and tokenizer")
    start = starts.start_peer if variant.peer else starts.start_ours
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
    row["growth_bytes"] = growth.bytes()
    return row | device_peak(spec.device)


def _open(spec: TrialSpec, variant: Variant, links: list[Link]) -> BlobReader:
    options = {"threads": spec.readers, "verify": variant.verify}
    return open_reader(spec.weights, read_manifest(Path(spec.staged)), variant.stages, links, **options)


def _read_alone(spec: TrialSpec, variant: Variant, links: list[Link]) -> dict[str, Any]:
    """Every part read and none used: what the link gives, measured the way the trials use it."""
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
    asked = TrialSpec(**json.loads(sys.argv[1]))
    print(json.dumps({"variant": asked.variant, "gbit_per_s": asked.gbit_per_s} | main(asked)))
