"""Several servers of a swarm by one command, each in a process of Ray: of this machine, or of a cluster's."""

from __future__ import annotations

import argparse
import asyncio
import queue
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import torch

from firsttoken.assets.lock import first_line
from firsttoken.petals.access import Access, check_installed
from firsttoken.petals.actions import chosen_blocks, config_of, line_of
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.server import Running, serving
from firsttoken.service.cluster import check_cluster, import_ray, join, start_node
from firsttoken.service.swarm_variants import with_variants
from firsttoken.study.errors import SwarmError
from firsttoken.study.system.cgroup_limits import cores

_POLL_S = 1.0  # between two looks whether a server has ended by itself
_LEAVE_S = 10.0  # that all have to tell the others that they go


def serve_all(options: argparse.Namespace) -> None:
    """``options.servers`` of what ``swarm serve`` serves, one after the other as each sees those before, until Ctrl-C.

    On a cluster each listens at its node's address. Raises SwarmError for options that are of one server and for one
    that does not start or ends, StageError as ``replicas``.
    """
    check_installed()
    if options.port or options.address or options.key or options.host != "127.0.0.1":
        raise SwarmError("--host, --port, --address and --key are of one server: leave them or --servers out")
    if options.cluster is not None:
        check_cluster(options.cluster)
    asked = argparse.Namespace(**{name: one for name, one in vars(options).items() if name != "command"})
    for name in ("model", "token_file", "tls_ca", "tls_cert", "tls_key"):
        path: Path | None = getattr(asked, name)
        setattr(asked, name, path and path.resolve())  # Ray's processes have other working directories
    asked.variant = [(name, folder.resolve()) for name, folder in options.variant]
    access, model = _access(asked), model_sha256(asked.model)
    told = queue.SimpleQueue[None]()
    ray, _ = import_ray(options.cluster is None)
    if options.cluster is None:
        start_node(ray, max(cores(), options.servers))
    else:
        join(ray, options.cluster)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: told.put(None))
        remote, gate, ends = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(RaySwarmServer), [], {}
        for _ in range(options.servers):
            asked.registry = [*options.registry, *gate[:1]]
            blocks = chosen_blocks(asked, access, model)
            one = remote.remote()
            address, line = ray.get(one.start.remote(asked, blocks, model, options.cluster is None))
            print(line, flush=True)
            gate.append(address)
            ends[one.ended.remote()] = one
        while not ray.wait(list(ends), timeout=0)[0]:
            with suppress(queue.Empty):
                told.get(timeout=_POLL_S)
                ray.get([one.end.remote() for one in ends.values()], timeout=_LEAVE_S)
                return
        ray.get(ray.wait(list(ends), timeout=0)[0])
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise SwarmError(f"a server of the swarm failed: {first_line(getattr(error, 'cause', error))}") from error
    finally:
        ray.shutdown()


class RaySwarmServer:
    """A server in the process of a Ray actor, whose event loop it shares."""

    def __init__(self) -> None:
        self._up = AsyncExitStack()
        self._running: Running | None = None

    async def start(self, options: argparse.Namespace, blocks: range, model: str, alone: bool) -> tuple[str, str]:
        """Serve ``blocks`` of ``model`` (its sha256); the address, and what the user is told. Raises as ``serving``,
        and SwarmError where this node's copy is of another model."""
        import ray

        if model_sha256(options.model) != model:
            raise SwarmError(f"{options.model} is another model on this node: copy the same folder to all nodes")
        torch.set_num_threads(options.threads or 1)
        config = config_of(options, _access(options), blocks, "127.0.0.1" if alone else ray.util.get_node_ip_address())
        make_backend = with_variants(options.variant, options.model)
        self._running = await self._up.enter_async_context(serving(config, model, make_backend))
        return self._running.record.address, line_of(config, self._running.record, self._running.port)

    async def ended(self) -> None:
        """Wait until it cannot go on, and raise why."""
        await asyncio.shield(self._running.failed)

    async def end(self) -> None:
        """Tell the others that it leaves."""
        await self._up.aclose()


def _access(options: argparse.Namespace) -> Access:
    return Access.read(options.token_file, options.tls_ca, options.tls_cert, options.tls_key)
