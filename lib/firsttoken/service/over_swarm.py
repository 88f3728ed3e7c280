"""The service over a swarm: ends and engine are here, the model's blocks on whoever serves them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firsttoken.engine.model_server import StaticServer
from firsttoken.engine.request import KVSource
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.petals.access import Access, check_installed
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.keys import public_hex, server_key
from firsttoken.petals.remote_model import UNAUDITED, UNSHARED, RemoteModel
from firsttoken.petals.routing import unserved
from firsttoken.petals.swarm_status import swarm_status
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.trust.arbitration import TOLERANCE
from firsttoken.petals.trust.auditor import Audits
from firsttoken.service.service_config import ServiceConfig
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError, SwarmError

_TOLD = 50  # servers that were replaced lately


class SwarmServer(StaticServer):
    """Serves the model of ``config`` by its swarm. ``prefixes``, if set, opens stored ones once it has started, and
    says what came of it.

    Raises SwarmError when nobody answers at the addresses given, or a block is served by nobody; ModelError for a
    folder without the model's ends.
    """

    def __init__(self, config: ServiceConfig, limits: RequestLimits) -> None:
        check_installed()
        audits, dtype = None, dtypes.resolve(dtypes.AUTO, "cpu")
        if config.swarm_audit_rate is not None:
            if config.prefix_store is not None:
                raise SwarmError(f"stored {UNSHARED}; leave one of them out")
            accuser = public_hex(server_key(None))
            shares = config.swarm_audit_undecided, config.swarm_audit_unwitnessed
            audits = Audits(config.swarm_audit_rate, config.swarm[0], accuser, TOLERANCE, *shares)
            dtype = torch.float32  # which alone is vouched for
        self._model = RemoteModel(
            config.folder,
            config.swarm,
            dtype=dtype,
            timeouts=Timeouts(step_s=config.swarm_step_s),
            access=Access.read(config.swarm_token_file, config.swarm_tls_ca, None, None),
            audits=audits,
            tokens=limits.blocks * 16,
            config=limits.engine,
        )
        try:
            wait_for(self._model.swarm.check(self._model.chain.layers))
        except FirstTokenError:
            self._model.close()
            raise
        self._audits = UNAUDITED if audits is None else f"a share of {audits.rate:g} of the answers is audited"
        if audits is None:
            print(UNAUDITED, file=sys.stderr, flush=True)
        self._model.executor.version.stage = 1
        weights = sum(weight.nbytes for weight in self._model.model.parameters() if not weight.is_meta)
        super().__init__(self._model.engine, limits, self._model.close, weights)
        self.prefixes: Callable[[], str] | None = None
        self._told: list[str] = []

    def start(self) -> None:
        """Begin to open the stored prefixes, where there are any."""
        if self.prefixes is not None:
            threading.Thread(target=self._open_prefixes, name="prefixes", daemon=True).start()

    def take_prefixes(self, find: Callable[[Sequence[int], str], KVSource | None]) -> None:
        """Let servers be sent what ``find`` has of prompts: the blocks are theirs, and nothing of it is needed here."""
        self._model.segment.stored = find

    def _open_prefixes(self) -> None:
        self._told.append(self.prefixes())

    def swarm_status(self) -> dict[str, Any]:
        """The swarm as this service knows it."""
        return swarm_status(self._model.chain, time.time())

    def status(self) -> dict[str, Any]:
        """One stage, which is there while all blocks are served; the ``servers`` of the chain, in order, and as
        ``events`` who was replaced. While a block is unserved no prompt is answered: the stage is 0, the state
        "degraded", and the error names the blocks, until somebody serves them. ``shared_tokens`` of prompts were not
        computed, as all servers of the chain had them."""
        model, missing = self._model, self._model.chain.unserved()
        servers = [
            {"blocks": [session.layers.start, session.layers.stop], "address": record.address, "key": record.server[:8]}
            for session, record in list(model.chain.sessions)
        ]
        events = [*self._told, *(f"replaced {key[:8]}: {why}" for key, why in model.chain.faults[-_TOLD:])]
        return super().status() | {
            "stage": 0 if missing else 1,
            "state": "degraded" if missing else "complete",
            "error": unserved(missing) if missing else None,
            "events": [{"stage": 1, "what": what} for what in events],
            "restored": model.chain.restored,
            "servers": servers,
            "known": len(model.swarm.servers()),
            "audits": self._audits,
            "shared_tokens": model.chain.shared_tokens,
        }
