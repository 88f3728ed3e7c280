"""A process that fetches some of the layers of a staged checkpoint over a link of its own, and serves them:

    python -m firsttoken_studies.nb56_a_start_that_borrows.fetcher FOLDER 12:30 --gbit-per-s 0.25

It says "ready" when its libraries are imported, and begins to fetch when it is sent a line; then it says the address
at which it listens. A step that comes before its layers waits for them. When its standard input ends, as it does when
whoever started it has ended, it says {bytes, loaded_s} as JSON and ends: what came over its link, and when its layers
were there on ``time.monotonic`` (null: not yet).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firsttoken.engine.accelerator import build_model
from firsttoken.engine.attention import use_paged_attention
from firsttoken.engine.request import ScheduledChunk
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.checkpoint_blocks import parse_blocks
from firsttoken.petals.server import ServerConfig, serving
from firsttoken.progressiveserve.checkpoint.manifest import Manifest, read_manifest
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.views import make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken_extras.layer_borrowing.embeddings import neighbours_name
from firsttoken_studies.nb56_a_start_that_borrows.division import only
from firsttoken_studies.probes.fast_exit import tell_and_end

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Blocks that a link is still bringing.


class FetchedBackend(BlockBackend):
    """``blocks`` of the staged checkpoint in ``folder``, whose bytes, and no others, ``link`` begins to bring when this
    is made.

    A step waits until all blocks are there. They are not fused: that would be later than the first token.

    Raises as ``StageLoad`` and ``BlockBackend``; a step raises what ended the load.
    """

    def __init__(
        self,
        folder: Path,
        blocks: range,
        dtype: torch.dtype,
        kv_tokens: int,
        *,
        manifest: Manifest,
        link: Link,
        readers: int,
    ) -> None:
        self._manifest, self._link, self._readers = manifest, link, readers
        super().__init__(folder, blocks, dtype, kv_tokens)

    def run(self, layers: range, chunks: Sequence[ScheduledChunk], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Run the layers as ``BlockBackend.run`` does, once all blocks are there."""
        self.load.wait()
        return super().run(layers, chunks, hidden)

    def measured_throughput(self) -> float:
        """Return 0 for unknown, as nothing has been computed; clients know this server's address and compare it with
        none."""
        return 0.0

    def _span(self, blocks: range) -> PreTrainedModel:
        meta_model = MetaModel(self._folder, self._manifest, dtype=self.dtype, build=build_model)
        nothing = make_view(0, [PassLayer() for _ in meta_model.layers], {})
        wanted, readers = only(self._manifest, blocks), self._readers
        self.load = StageLoad(
            self._folder, wanted, [1], [self._link], meta_model, nothing, threads=readers, verify=False
        )
        model, layers = meta_model.model, self.load.view.layers[blocks.start : blocks.stop]
        for number, layer in enumerate(layers):
            layer.self_attn.layer_idx = number
        model.model.layers = layers
        use_paged_attention(model)
        return model


async def serve(folder: Path, blocks: str, gbit_per_s: float, readers: int) -> dict[str, Any]:
    """Fetch ``blocks`` (a:b) and serve them until standard input ends; returns what it then says. Raises as
    ``FetchedBackend`` and ``serving``."""
    manifest, link = read_manifest(folder), Link(LinkConfig(gbit_per_s))
    (stage,) = manifest.stages
    config = ServerConfig(folder, parse_blocks(blocks, len(stage.parts) - 1), torch.float32)
    make_backend = partial(FetchedBackend, manifest=manifest, link=link, readers=readers)
    name = neighbours_name(folder, manifest)
    async with serving(
        config, name, make_backend, on_served=lambda record, _: print(record.address, flush=True)
    ) as running:
        load = running.sessions.batcher.backend.load
        await asyncio.to_thread(sys.stdin.read)
        load.close()
    return {"bytes": link.bytes_moved, "loaded_s": load.arrived_s or None}


def main() -> None:
    """Run a fetcher as a command."""
    parser = argparse.ArgumentParser(
        prog="python -m firsttoken_studies.nb56_a_start_that_borrows.fetcher", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks")
    parser.add_argument("--gbit-per-s", type=float, default=0.0)
    parser.add_argument("--readers", type=int, default=8)
    options = parser.parse_args()
    import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    import grpc  # noqa: F401

    print("ready", flush=True)
    if sys.stdin.readline():
        tell_and_end(asyncio.run(serve(options.folder, options.blocks, options.gbit_per_s, options.readers)))


if __name__ == "__main__":
    main()
