"""What ``firsttoken swarm`` does."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from firsttoken.assets.model_config import read_config
from firsttoken.assets.servable import check_servable
from firsttoken.assets.text_tokenizer import read_text_tokenizer
from firsttoken.assets.weight_files import file_states, unchanged
from firsttoken.petals.access import Access, check_installed
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.checkpoint_blocks import model_sha256, parse_blocks, write_8_bits
from firsttoken.petals.placement import Rebalancing, interval_to_join
from firsttoken.petals.records import Record
from firsttoken.petals.server import ServerConfig, serving
from firsttoken.petals.session import ServerLimits
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study import dtypes
from firsttoken.study.extensions import extension
from firsttoken_serve.chat.chat_template import chat_ends
from firsttoken_serve.swarm.swarm_variants import with_variants

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def run(options: argparse.Namespace) -> None:
    """Do the action that was chosen. Raises SwarmError, ModelError, StageError and RequestError."""
    check_installed()
    {"serve": _serve, "int8": _int8, "generate": _generate, "list": _list}[options.action](options)


def _serve(options: argparse.Namespace) -> None:
    make_backend = with_variants(options.variant, options.model)
    access = Access.read(options.token_file, options.tls_ca, options.tls_cert, options.tls_key)
    if options.threads:
        torch.set_num_threads(options.threads)
    files = check_servable(options.model, in_8_bits=True).files
    before = file_states(files)
    model = model_sha256(options.model)

    def load(*arguments: Any, **more: Any) -> BlockBackend:
        with unchanged(files, before):  # the sha256 says what is loaded
            return make_backend(*arguments, **more)

    config = config_of(options, access, chosen_blocks(options, access, model), options.host)
    asyncio.run(_serve_until_signal(config, model, load))


def config_of(options: argparse.Namespace, access: Access, blocks: range, host: str) -> ServerConfig:
    """A server of ``blocks`` on ``host``, as the options of ``swarm serve`` say. Raises as these are refused."""
    limits = ServerLimits(kv_tokens=options.kv_tokens, expiry_s=options.expiry_s, rebalance_s=options.rebalance_s)
    return ServerConfig(
        options.model,
        blocks,
        dtypes.resolve(options.dtype, "cpu"),
        host,
        options.port,
        options.address,
        options.registry,
        options.key,
        access,
        limits,
        options.train,
        _rule(options.rebalance_by) if options.blocks == "auto" else None,
    )


def _rule(name: str) -> Rebalancing:
    """The rule by which a server moves: the paper's, or one that is registered."""
    return Rebalancing() if name == "paper" else extension("REBALANCING", name)()


def chosen_blocks(options: argparse.Namespace, access: Access, model: str) -> range:
    """The blocks that are named, or those that the swarm needs most."""
    depth = read_config(options.model).num_hidden_layers
    if options.blocks != "auto":
        return parse_blocks(options.blocks, depth)
    count = options.count or depth
    if not options.registry:
        return interval_to_join([], depth, count)

    async def needed() -> range:
        swarm = Swarm(model, options.registry, 1, access, Timeouts())
        await swarm.refresh()
        servers = [record.reachable(0.0, record.counted()) for record in swarm.servers()]
        await swarm.close()
        return interval_to_join(servers, depth, count)

    return asyncio.run(needed())


def line_of(config: ServerConfig, record: Record, port: int) -> str:
    """Return the line that tells a user of a server of this process, which listens on ``port``."""
    listening = f", on port {port} here" if config.address else ""
    variants = "".join(f" with {_short(adapter)}" for adapter in record.adapters)
    return (
        f"blocks [{record.span.start}, {record.span.stop}) of {config.folder.resolve().name}{variants} are served at "
        f"{record.address} by process {os.getpid()}{listening}; Ctrl-C ends it"
    )


def _short(adapter: str) -> str:
    name, _, sha256 = adapter.partition("@")
    return f"{name} ({sha256[:12]})"


async def _serve_until_signal(config: ServerConfig, model: str, make_backend: Callable[..., BlockBackend]) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    def say(record: Record, port: int) -> None:
        print(line_of(config, record, port), flush=True)

    async with serving(config, model, make_backend, on_served=say) as running:
        finished = asyncio.create_task(ended.wait())
        await asyncio.wait([finished, running.failed], return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        if running.failed.done():
            running.failed.result()


def _int8(options: argparse.Namespace) -> None:
    written = write_8_bits(options.model, options.out)
    print(f"{options.out}: {written / 1e6:,.1f} MB, blocks in 8 bits; servers and clients take it as their --model")


def _generate(options: argparse.Namespace) -> None:
    from firsttoken.petals.remote_model import UNAUDITED, RemoteModel
    from firsttoken.petals.trust.auditor import Audits

    folder = Path(options.model)
    tokenizer, files = read_text_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(options.prompt).ids])
    end_counts = chat_ends(folder, tokenizer, files)
    audits = None if options.audit_rate is None else Audits(options.audit_rate, options.registry[0])
    with RemoteModel(
        options.model,
        options.registry,
        dtype=dtypes.resolve(options.dtype, "cpu"),
        coding=options.coding,
        timeouts=Timeouts(step_s=options.step_s),
        access=Access.read(options.token_file, options.tls_ca, None, None),
        audits=audits,
    ) as model:
        with _printing(tokenizer, ids[0].tolist()) as on_token:
            model.generate(ids, options.max_tokens, eos_token_id=end_counts, on_token=on_token)
        for server, why in model.chain.faults:
            print(f"replaced {server[:8]}: {why}", file=sys.stderr)
        if model.chain.auditor is None:
            print(UNAUDITED, file=sys.stderr)
        else:
            end_counts = ", ".join(f"{count} {end}" for end, count in model.chain.auditor.ends.items())
            print(f"audits: {end_counts or 'none'}", file=sys.stderr)
            if why := model.chain.auditor.why:
                print(f"the last audit that showed nothing: {why}", file=sys.stderr)


@contextmanager
def _printing(tokenizer: Tokenizer, ids: list[int]) -> Iterator[Callable[[int, int], None]]:
    """Yield the function that prints the text of ``ids`` and of each token that comes, in whole characters; the rest is
    printed at the end."""
    output = ""

    def show(text: str) -> None:
        nonlocal output
        if text.startswith(output):  # else a run of bytes reads otherwise now: the next token may mend it
            print(text[len(output) :], end="", flush=True)
            output = text

    def on_token(row: int, token: int) -> None:
        ids.append(token)
        show(tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd"))

    try:
        yield on_token
    finally:
        if output:
            show(tokenizer.decode(ids, skip_special_tokens=True))
            print()


def _list(options: argparse.Namespace) -> None:
    access = Access.read(options.token_file, options.tls_ca, None, None)
    swarm = Swarm(model_sha256(options.model), options.registry, 1, access, Timeouts())

    async def look() -> None:
        await swarm.connect()
        servers = sorted(swarm.servers(), key=lambda record: record.blocks)
        for record in servers:
            rate = f"{record.throughput:,.0f} tokens/s through a block"
            more = "".join(f", {_short(adapter)}" for adapter in record.adapters)
            print(
                f"blocks [{record.blocks[0]}, {record.blocks[1]}) at {record.address}, key {record.server[:8]}: "
                f"{rate}{more}"
            )
        if not servers or swarm.contacts.faults or swarm.contacts.reported_by_others():
            print(f"{len(servers)} servers have blocks of the model; seen beside: {swarm.unseen()}", file=sys.stderr)
        await swarm.close()

    asyncio.run(look())
