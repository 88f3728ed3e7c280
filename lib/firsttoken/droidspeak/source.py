"""The engine as DroidSpeak's sender, whose cache of a prompt another model takes, and as its receiver (4.2, 4.4).

In an engine that hosts several fine-tunes the sender's cache lies there after a prefill, and nothing is computed a
second time. The receiver takes it from a store's memory or disk, or over a link.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from firsttoken.droidspeak.entry import e_cache_name, layer_name
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.kv_transfer import Buffers, Transfer
from firsttoken.droidspeak.pipeline.live_loading import sent_pieces
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.prefix import LayerKV, PrefixCache
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request
from firsttoken.link.shaped import Link
from firsttoken.study.errors import CacheError, LinkError


def served_prefix(executor: LiveExecutor, request: Request, edges: Iterable[int] = ()) -> PrefixCache:
    """Return the cache of the prompt of ``request``, with the E-cache at ``edges``; the request goes on.

    Of a prefix that was itself taken from another model, the layers that were not computed again, and the E-cache at
    the lower edge of the group, are that model's. Raises RequestError where the prompt has not been computed, or no
    hidden states are kept at one of ``edges``.
    """
    tokens = request.prompt_tokens
    kv = executor.computed(request, tokens)
    boundary_cache = (request.version or executor.version).hidden_cache or HiddenStateCache(())
    e_cache = {edge: boundary_cache.of(request.number, edge)[:, :tokens].clone() for edge in edges}
    return PrefixCache(tuple(LayerKV(*layer) for layer in kv), e_cache)


class StoredPrefix:
    """The longest prefix of ``context`` that ``store`` has of ``sender``; ``group`` is computed again by ``receiver``.

    It is all there at once; with a ``link`` it comes over that, E-cache first. The last token of ``context`` is never
    taken, as somebody has to say the next one. Raises CacheError when the models do not fit or nothing is stored, and
    RequestError for a group that does not fit.
    """

    def __init__(
        self,
        store: KVStore,
        context: Sequence[int],
        *,
        sender: ModelIdentity,
        receiver: ModelIdentity,
        group: Group,
        link: Link | None = None,
        device: str = "cpu",
    ) -> None:
        check_compatible(sender, receiver)
        self._group, self._depth = group.check(sender.layers), sender.layers
        self._edge = group.lo if group.needs_e_cache else None
        self._store, self._context, self._sender = store, context[:-1], sender
        self._pending = [layer for layer in range(self._depth) if layer not in group]
        self.redo = group.layers
        self._transfer: Transfer | None = None
        self._running = ExitStack()
        if link is None:
            # The longest entry that has the E-cache may be another, shorter one: only tokens that both hold are taken.
            self.tokens = min(
                store.match(self._context, sender), store.match(self._context, sender, self._edge or None)
            )
            if not self.tokens:
                store.fetch(self._context, sender, 0)  # which says why there is none
            return
        self._file, self.tokens = store.locate(self._context, sender, self._edge)
        sent = sent_pieces(self._file.spans, group, self._depth, Schedule.PIPELINED)
        self._transfer = Transfer(sent, link, Buffers(sent, device))

    @property
    def complete(self) -> bool:
        """Return whether every reused layer was handed over."""
        return not self._pending

    def begin(self) -> None:
        """Start the transfer over the link, where there is one."""
        if self._transfer is not None:
            self._running.enter_context(self._transfer)

    def hidden_states(self) -> Tensor | None:
        """The E-cache [1, tokens or more, hidden] at the group's lower edge, or None yet. Raises as ``arrived``."""
        if self._transfer is None:
            return self._store.fetch_e_cache(self._context, self._sender, self._edge)
        return self._ready(e_cache_name(self._edge))

    def arrived(self) -> list[tuple[int, Tensor]]:
        """(layer, keys and values [2, 1, kv_heads, tokens or more, head_dim]) that have come since this was asked last.

        Raises LinkError when the link died, and CacheError when the file is torn or gone.
        """
        arrivals: list[tuple[int, Tensor]] = []
        while self._pending:
            if self._transfer is None:
                kv = torch.stack(self._store.fetch(self._context, self._sender, self._pending[0]))
            else:
                kv = self._ready(layer_name(self._pending[0]))
            if kv is None:
                break
            arrivals.append((self._pending.pop(0), kv))
        return arrivals

    def close(self) -> None:
        self._running.close()

    def _ready(self, name: str) -> Tensor | None:
        """Return the piece ``name`` if it has come over the link, or None yet. A file that is at fault is removed, and
        named on the terminal, the first time; the request is answered without it."""
        try:
            return self._transfer.ready(name)
        except LinkError as error:
            if isinstance(error.__cause__, CacheError) and self._store.discard(self._file.entry):
                print(f"firsttoken: {self._file.path}: {error}; the file was removed", file=sys.stderr, flush=True)
            raise
