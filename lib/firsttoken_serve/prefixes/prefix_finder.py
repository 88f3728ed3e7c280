"""Stored prefixes for the prompts of a service: what its own model has computed, or another of a profiled pair."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from firsttoken.droidspeak.identity import ModelIdentity, difference
from firsttoken.droidspeak.layer_group import NOTHING, Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.link.shaped import Link
from firsttoken.study.errors import FirstTokenError
from firsttoken_serve.prefixes.pair_profile import read_profiles


class PrefixFinder:
    """The longest prefix in the store ``folder`` for each of ``receivers``, by name ("" for the model itself).

    What its own model computed goes before an equally long one of another. What other processes put into the
    folder, or take out of it, shows at the next call. Raises CacheError for a store that cannot be had.
    """

    def __init__(self, folder: Path, receivers: Mapping[str, ModelIdentity], device: str) -> None:
        self._folder, self._receivers, self._device = folder, dict(receivers), device
        self._store = KVStore(folder, memory_bytes=0, disk_bytes=sys.maxsize)
        self._senders: dict[str, list[tuple[ModelIdentity, Group]]] = {}
        self._look()

    def __call__(self, prompt: Sequence[int], variant: str = "") -> StoredPrefix | None:
        """The prefix for ``prompt``, of which at least one token is left to compute; None where nothing is stored."""
        if self._store.refresh():
            self._look()
        context, most, match = prompt[:-1], 0, None
        for sender, group in self._senders[variant] if context else ():
            tokens = self._store.match(context, sender, group.lo if group.needs_e_cache else None)
            if tokens > most:
                most, match = tokens, (sender, group)
        if match is None:
            return None
        receiver, (sender, group) = self._receivers[variant], match
        labels = {"sender": sender, "receiver": receiver, "group": group, "device": self._device}
        try:
            return StoredPrefix(self._store, prompt, link=Link(), **labels)  # a thread reads it: no step waits
        except FirstTokenError:  # it went since
            return None

    def _look(self) -> None:
        """Learn who has stored anything, and what was profiled."""
        models, profiles = self._store.models, read_profiles(self._folder)
        for name, receiver in self._receivers.items():
            senders: Iterator[tuple[ModelIdentity, Group]] = (
                (sender, profiles[pair].group)
                for sender in models
                if (pair := (sender.anybody.key, receiver.anybody.key)) in profiles
                and not difference(sender, receiver)
                and len(profiles[pair].group) < profiles[pair].layers == receiver.layers
            )
            self._senders[name] = [(receiver, NOTHING), (receiver.anybody, NOTHING), *senders]
