"""Swarms of a tiny model: servers in this process, where nothing has to die."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_tokens import Plain

from firsttoken.swarm.background import wait_for
from firsttoken.swarm.blocks import model_sha256
from firsttoken.swarm.limits import ServerLimits
from firsttoken.swarm.server import Running, ServerConfig, serving

DEPTH = 6


@dataclass(frozen=True)
class Asked:
    """A prompt and what the local model says to it."""

    prompt: list[int]
    plain: Plain


class Here:
    """Servers in this process, beside its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, model_sha256(folder)
        self._stack = AsyncExitStack()

    def serve(self, *spans: tuple[int, int], peers: Sequence[str] = (), **options: Any) -> list[Running]:
        """One server a span, each told of those before it."""
        ups: list[Running] = []
        limits = ServerLimits(**{"expiry_s": 30.0} | options.pop("limits", {}))
        known = list(peers)
        model = options.pop("model", self.model)
        for start, stop in spans:
            config = ServerConfig(
                self.folder, range(start, stop), torch.float32, peers=tuple(known), limits=limits, **options
            )
            ups.append(wait_for(self._stack.enter_async_context(serving(config, model))))
            known = [*peers, ups[0].record.address]
        return ups

    def close(self) -> None:
        wait_for(self._stack.aclose())
