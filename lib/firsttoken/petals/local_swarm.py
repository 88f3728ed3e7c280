"""A swarm to look at: a tiny random model, and servers of its blocks in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.server import RunningServer, ServerConfig, serving

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def varied_model(**changes: Any) -> PreTrainedModel:
    """Return a model of six layers in float32 whose tokens vary: with the usual weights it would repeat one for ever.
    ``changes`` are of its configuration."""
    from transformers import AutoModelForCausalLM

    from firsttoken.assets.shapes import shape_config

    config = shape_config("tiny-6")
    config.update({"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None})
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


class LocalSwarm:
    """Six layers with random weights in float32, and the servers of this process that hold some of them.

    Its ``model`` is in this process, ``folder`` the same one on disk; both go with the block.
    """

    def __enter__(self) -> Self:
        from firsttoken.assets.quiet import quiet_transformers

        self.model = varied_model()
        self._made = ExitStack()
        self.folder = Path(self._made.enter_context(tempfile.TemporaryDirectory(prefix="swarm-")))
        with quiet_transformers():
            self.model.save_pretrained(self.folder)
        self.sha256 = model_sha256(self.folder)
        self._exits: dict[str, AsyncExitStack] = {}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for address in list(self._exits):
            self.end(address)
        self._made.close()

    def serve(
        self, *spans: range, peers: Sequence[str] = (), make_backend: Any = BlockBackend, **options: Any
    ) -> list[RunningServer]:
        """One server of each of ``spans``, told of those before it; ``options`` are those of ServerConfig."""
        ups: list[RunningServer] = []
        for span in spans:
            addresses = (*peers, *(server.record.address for server in ups[:1]))
            config = ServerConfig(self.folder, span, torch.float32, peers=addresses, **options)
            until = AsyncExitStack()
            ups.append(wait_for(until.enter_async_context(serving(config, self.sha256, make_backend))))
            self._exits[ups[-1].record.address] = until
        return ups

    def end(self, address: str) -> None:
        wait_for(self._exits.pop(address).aclose())
