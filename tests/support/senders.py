"""Models whose caches of how prompts begin are stored, for whoever computes a group of layers of them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from swarms import DEPTH
from transformers import PreTrainedModel

from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.link.shaped import Link
from firsttoken_extras.layer_borrowing.prefix_offer import PrefixOffer

STORED = 16  # tokens of each prompt


class Senders:
    """``models`` by name, of six layers like ``receiver``: a store in ``folder`` keeps what each of them computed of
    the beginnings of ``prompts``, with hidden states at every edge of a layer."""

    edges = tuple(range(1, DEPTH))

    def __init__(
        self,
        receiver: PreTrainedModel,
        models: Mapping[str, PreTrainedModel],
        folder: Path,
        prompts: Iterable[list[int]],
    ) -> None:
        self.models = dict(models)
        self.receiver = identify(receiver, None, "receiver")
        self.identities = {name: identify(model, None, name) for name, model in models.items()}
        self._store = KVStore(folder, memory_bytes=1 << 26, disk_bytes=1 << 26, block_tokens=4)
        for prompt in prompts:
            prefix = Prefix.of([prompt[:STORED]])
            for name, model in models.items():
                computed = full_prefill(model, prefix, self.edges)
                self._store.store(prompt[:STORED], self.identities[name], computed)

    def source(self, prompt: list[int], group: Group, sender: str, link: Link | None = None) -> StoredPrefix:
        """What the sender of this name has computed of how ``prompt`` begins, outside of ``group``."""
        between = {"sender": self.identities[sender], "receiver": self.receiver}
        return StoredPrefix(self._store, prompt, **between, group=group, link=link)

    def offer(self, prompt: list[int], group: Group, sender: str, link: Link | None = None) -> PrefixOffer:
        """The same for a replica that lacks layers: the group may grow."""
        return PrefixOffer(group, self.edges, lambda group: self.source(prompt, group, sender, link))
