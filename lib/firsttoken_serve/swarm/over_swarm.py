"""The service over a swarm: ends and engine are here, the model's blocks on whoever serves them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from firsttoken.assets.servable import check_servable
from firsttoken.engine.model_server import StaticServer
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.petals.access import Access, check_installed
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.remote_model import UNAUDITED, RemoteModel
from firsttoken.petals.routing import unserved
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.trust.auditor import Audits
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study import dtypes
from firsttoken.study.dtypes import check_device
from firsttoken.study.errors import FirstTokenError, SwarmError
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_serve.swarm.swarm_variants import adapter_names, other_adapter
from firsttoken_serve.variants import Base

_MOST_EVENTS = 50  # servers that were replaced lately


class SwarmServer(StaticServer):
    """Serves the model of ``config``, which may be ``staged``, by its swarm.

    Raises SwarmError when nobody answers at the addresses given, or a block is served by nobody, or without the adapter
    of a variant; ModelError for a folder without the model's ends, StageError for a
    device that is not here, and for an adapter that cannot be read or is of another base.
    """

    def __init__(self, config: ServiceConfig, limits: RequestLimits, staged: bool) -> None:
        check_installed()
        check_device(config.device)
        audits, dtype = None, dtypes.resolve(dtypes.AUTO, config.device)
        if config.swarm_audit_rate is not None:
            audits = Audits(config.swarm_audit_rate, config.swarm[0])
            dtype = torch.float32  # which alone is vouched for
        variants: dict[str, str] = {}
        if config.variants:
            base = Base(config.folder, read_manifest(config.folder).source_sha256 or "") if staged else None
            variants = adapter_names(dict(config.variants), base or check_servable(config.folder, in_8_bits=True))
        self._model = RemoteModel(
            config.folder,
            config.swarm,
            dtype=dtype,
            device=config.device,
            timeouts=Timeouts(step_s=config.swarm_step_s),
            access=Access.read(config.swarm_token_file, config.swarm_tls_ca, None, None),
            audits=audits,
            tokens=limits.blocks * 16,
            config=limits.engine,
            variants=variants,
        )
        try:
            self._check(variants)
        except FirstTokenError:
            self._model.close()
            raise
        self._audits = UNAUDITED if audits is None else f"a share of {audits.rate:g} of the answers is audited"
        if variants and audits is not None:
            self._audits += ", and none of a variant"
        if audits is None:
            print(UNAUDITED, file=sys.stderr, flush=True)
        self._model.executor.version.stage = 1
        weights = sum(weight.nbytes for weight in self._model.model.parameters() if not weight.is_meta)
        super().__init__(self._model.engine, limits, self._model.close, weights, self._model.versions)

    def _check(self, variants: Mapping[str, str]) -> None:
        """Raises SwarmError for a block that nobody serves, and for one without the adapter of a variant."""
        swarm, layers = self._model.swarm, self._model.chain.layers
        wait_for(swarm.check(layers))
        for name, adapter in variants.items():
            try:
                wait_for(swarm.check(layers, adapter))
            except SwarmError as error:
                raise other_adapter(name, adapter, swarm.servers()) or error from None

    def status(self) -> dict[str, Any]:
        """One stage, which is there while all blocks are served; the ``servers`` of the chain, in order, and as
        ``events`` who was replaced. While a block is unserved no prompt is answered: the stage is 0, the state
        "degraded", and the error names the blocks, until somebody serves them."""
        model, missing = self._model, self._model.chain.unserved()
        servers = [
            {"blocks": [session.layers.start, session.layers.stop], "address": record.address, "key": record.server[:8]}
            for session, record in list(model.chain.sessions)
        ]
        events = [f"replaced {key[:8]}: {why}" for key, why in model.chain.faults[-_MOST_EVENTS:]]
        return super().status() | {
            "stage": 0 if missing else 1,
            "state": "degraded" if missing else "complete",
            "error": unserved(missing) if missing else None,
            "events": [{"stage": 1, "what": event} for event in events],
            "servers": servers,
            "known": len(model.swarm.servers()),
            "audits": self._audits,
        }
