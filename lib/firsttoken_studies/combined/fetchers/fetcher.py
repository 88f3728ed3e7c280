"""A process that fetches some of the layers of a staged checkpoint over a link of its own, and serves them:

    python -m firsttoken_studies.combined.fetchers.fetcher FOLDER 12:30 --gbit-per-s 0.25

It says "ready" when its libraries are imported, and begins to fetch when it is sent a line; then it says the address
at which it listens. A step that comes before its layers waits for them. When its standard input ends, as it does when
whoever started it has ended, it says {bytes, loaded_s} as JSON and ends: what came over its link, and when its layers
were there on ``time.monotonic`` (null: not yet).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.petals.blocks import parse_blocks
from firsttoken.petals.server import ServerConfig, serving
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.system.ending import tell_and_end
from firsttoken_extras.layer_borrowing.ends import neighbours_name
from firsttoken_studies.combined.fetchers.stack import FetchedStack


async def serve(folder: Path, blocks: str, gbit_per_s: float, readers: int) -> dict[str, Any]:
    """Fetch ``blocks`` (a:b) and serve them until standard input ends; returns what it then says. Raises as
    ``FetchedStack`` and ``serving``."""
    manifest, link = read_manifest(folder), Link(LinkConfig(gbit_per_s))
    (stage,) = manifest.stages
    config = ServerConfig(folder, parse_blocks(blocks, len(stage.parts) - 1), torch.float32)
    stack_of = partial(FetchedStack, manifest=manifest, link=link, readers=readers)
    name = neighbours_name(folder, manifest)
    async with serving(config, name, stack_of, told=lambda record, _: print(record.address, flush=True)) as running:
        load = running.sessions.batcher.stack.load
        await asyncio.to_thread(sys.stdin.read)
        load.close()
    return {"bytes": link.bytes_moved, "loaded_s": load.arrived_s or None}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m firsttoken_studies.combined.fetchers.fetcher", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks")
    parser.add_argument("--gbit-per-s", type=float, default=0.0)
    parser.add_argument("--readers", type=int, default=8)
    asked = parser.parse_args()
    import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    import grpc  # noqa: F401

    print("ready", flush=True)
    if sys.stdin.readline():
        tell_and_end(asyncio.run(serve(asked.folder, asked.blocks, asked.gbit_per_s, asked.readers)))


if __name__ == "__main__":
    main()
