"""The one function that the service asks for a model to serve."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken.cps.policies import make_policy
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import MANIFEST
from firsttoken.progressiveserve.staged_serving.request_limits import STALL_FREE, GrowthConfig
from firsttoken.progressiveserve.staged_serving.stage_loader import Growth
from firsttoken.progressiveserve.staged_serving.staged_server import GrowingServer
from firsttoken.progressiveserve.staged_serving.unstaged_model import PlainGrowth
from firsttoken.service.prefixes import open_prefixes
from firsttoken.service.service_config import ServiceConfig
from firsttoken.study.dtypes import AUTO
from firsttoken.study.errors import FirstTokenError, StageError
from firsttoken.study.extensions import extension

if TYPE_CHECKING:
    from firsttoken.service.static_server import ReadyServer


def is_staged(folder: Path) -> bool:
    """Whether ``folder`` is what `firsttoken stage` writes, and not a plain Hugging Face folder.

    The default model's folder has a manifest of its own kind beside its weights; a stage's weights lie in folders.
    """
    return (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors"))


def serve_model(
    config: ServiceConfig, broken: Callable[[FirstTokenError], None], context: int = sys.maxsize
) -> GrowingServer | ReadyServer:
    """The model of ``config``, whose context has ``context`` tokens. It takes requests from now on, and begins to load
    when it is started.

    Raises ProfileError for a scheduler, policy, pool or budget that the engine does not have, and as a SwarmServer;
    what the folder lacks, a server that grows reports itself, and to ``broken`` what leaves no hope.
    """
    engine = replace(
        STALL_FREE,
        scheduler=config.scheduler,
        share_prefixes=config.share_prefixes,
        requests=config.max_running,
        token_budget=STALL_FREE.token_budget if config.token_budget is None else config.token_budget,
    )
    longest = config.max_len(context)
    limits = GrowthConfig(
        threads=config.threads,
        max_sessions=config.max_running + config.max_waiting,
        max_prompt_tokens=min(config.max_prompt_tokens or longest, longest),
        max_new_tokens=min(config.max_new_tokens or longest, longest),
        max_model_len=longest,
        kv_blocks=config.kv_blocks,
        engine=engine,
        preemption=make_policy(config.preemption),
    )
    if config.swarm:
        from firsttoken.service.over_swarm import SwarmServer

        return SwarmServer(config, limits)
    if config.worker:
        return _by_a_worker(config, limits)
    links, growth = [Link(LinkConfig(config.gbit_per_s))], Growth if is_staged(config.folder) else PlainGrowth
    store, prefixes = config.prefix_store, None
    if store is not None:
        prefixes = partial(open_prefixes, config.folder, store, config.device)
    options = {"device": config.device, "dtype": AUTO, "growth": growth, "broken": broken, "prefixes": prefixes}
    return GrowingServer(config.folder, links, limits, **options)


def _by_a_worker(config: ServiceConfig, limits: GrowthConfig) -> ReadyServer:
    """Raises StageError where a worker, or what it needs, is not installed, and for a staged folder."""
    if is_staged(config.folder):
        raise StageError(f"serve: {config.folder} comes in stages, and a worker hosts whole models; leave --worker out")
    try:
        server = extension("SERVERS", "worker")
    except KeyError as error:
        raise StageError("serve --worker needs firsttoken_extras: install firsttoken with all its packages") from error
    except ImportError as error:
        raise StageError('serve --worker needs pyzmq and msgpack: pip install "firsttoken[worker]"') from error
    return server(config, limits)
