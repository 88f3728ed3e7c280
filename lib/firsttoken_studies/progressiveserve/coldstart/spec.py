"""What a trial is asked, and the clock that its phases are told by.

A trial imports this before torch, to read early: the standard library and what needs no more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from firsttoken.progressiveserve.loading.read_plan import Folder


@dataclass(frozen=True)
class TrialSpec:
    """The settings that the parent gives a trial. ``staged`` is a staged checkpoint, ``stock`` the same model as one
    file.

    ``gbit_per_s`` shapes our own reads with a token bucket (0: not at all; a limit in the kernel is the parent's).
    ``server`` is the address of a data server that has the staged weights; config and tokenizer are here even then.
    ``stages`` are loaded instead of the variant's own, where given; ``recover`` loads the later ones after the first
    token, and ``digest`` tells the sha256 of all weights in the end. An empty ``prompt`` (random weights have no
    tokenizer) stands for ``prompt_tokens`` arbitrary ids. ``lean`` makes any start of ours compute in lean layers.
    ``dtype`` is that of the computation ("stored": the checkpoint's own); to convert the weights is part of loading
    them.
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
    digest: bool = False
    lean: bool = False

    @property
    def weights(self) -> Folder:
        """The folder the staged weights are read from; connections to a data server are those of one load."""
        if not self.server:
            return Path(self.staged)
        from firsttoken.progressiveserve.loading.http_reader import Remote, RemotePath

        return RemotePath(Remote(self.server))


def prompt_ids(spec: TrialSpec) -> list[int]:
    """The prompt's ids; with an empty prompt as many arbitrary ones as ``spec`` says."""
    from firsttoken.assets.text_tokenizer import read_text_tokenizer

    if not spec.prompt:
        return list(range(1, spec.prompt_tokens + 1))
    return read_text_tokenizer(Path(spec.stock)).tokenizer.encode(spec.prompt).ids


@dataclass
class PhaseClock:
    """Phases in seconds, one after another, and what the process had used by then."""

    last: float
    phases: dict[str, float] = field(default_factory=dict)

    def phase(self, name: str) -> None:
        """The time since the last mark was ``name``."""
        now = time.monotonic()
        self.phases[name] = now - self.last
        self.last = now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move ``seconds`` of the phase ``source`` to the phase ``target``."""
        self.phases[source] -= seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds
