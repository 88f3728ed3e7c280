"""The service with its model in a worker process, which may die without it."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import torch

from firsttoken.assets.checkpoint import stored_dtype, weight_files
from firsttoken.assets.held import seen
from firsttoken.engine.engine import Engine
from firsttoken.engine.model_server import StaticServer
from firsttoken.engine.request_limits import BLOCK_TOKENS, RequestLimits
from firsttoken.service.served_model import receivers, use_prefixes
from firsttoken.service.service_config import ServiceConfig
from firsttoken.service.variants import adapter_files
from firsttoken.study import dtypes
from firsttoken.study.dtypes import check_device
from firsttoken_extras.worker.remote_executor import RemoteExecutor, RemoteVariant
from firsttoken_extras.worker.worker_config import WorkerConfig


class WorkerServer(StaticServer):
    """Serves the plain folder of ``config`` and its variants. Raises WorkerError for a worker that does not start,
    ModelError, and StageError for an adapter that cannot be read or does not fit."""

    def __init__(self, config: ServiceConfig, limits: RequestLimits) -> None:
        check_device(config.device)
        stored = getattr(torch, stored_dtype(config.folder))
        files, adapters = weight_files(config.folder), adapter_files(dict(config.variants))
        weights = sum(file.stat().st_size for file in files)
        dtype = dtypes.name_of(dtypes.serving(dtypes.AUTO, stored, config.device))
        self._executor = RemoteExecutor(
            WorkerConfig(
                str(config.folder),
                limits.blocks,
                block_tokens=BLOCK_TOKENS,
                host_blocks=limits.host_blocks,
                dtype=dtype,
                device=config.device,
                threads=torch.get_num_threads(),
                weights=seen(files + adapters),
                variants=tuple((name, str(folder)) for name, folder in config.variants),
            )
        )
        self._told: list[dict[str, Any]] = []
        if limits.preemption is not None and (told := limits.preemption.prepare(self._executor, dtype)):
            print(f"firsttoken: {told}", file=sys.stderr, flush=True)
            self._note(told)
        engine = Engine(self._executor, limits.engine, policy=limits.preemption)
        versions = {name: RemoteVariant(name) for name, _ in config.variants}
        super().__init__(engine, limits, self._executor.close, weights, versions)
        if config.prefix_store is not None:
            threading.Thread(target=self._use_prefixes, args=(config, getattr(torch, dtype)), daemon=True).start()

    def status(self) -> dict[str, Any]:
        """One stage that is there, how many workers were lost, and how many requests began with a stored prefix."""
        more = {"workers_lost": self._executor.lost, "restored": self._restored, "events": list(self._told)}
        return super().status() | more

    def _note(self, what: str) -> None:
        self._told.append({"stage": 1, "what": what})

    def _use_prefixes(self, config: ServiceConfig, dtype: torch.dtype) -> None:
        """Begin requests with what the very model has computed: no layer of a worker's is computed again alone."""
        who = partial(receivers, config.folder, dtype, config.prefix_owner, dict(config.variants))
        self._note(use_prefixes(self, config.prefix_store, who, "cpu", others=False))
