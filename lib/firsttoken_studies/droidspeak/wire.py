"""What timed requests are made of: random tokens, and a sender's cache on disk that a receiver fetches over links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.needs import CONTEXT, Need
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.kv_transfer import Buffers
from firsttoken.droidspeak.pipeline.live_loading import FirstToken, first_token, sent_pieces
from firsttoken.droidspeak.pipeline.schedule import Schedule, SendingOrder, e_cache_first
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken_studies.droidspeak.pairs import PairedModel

SUFFIX = 4  # tokens behind the prefix, as "\nAnswer:" has


@dataclass(frozen=True)
class LoadingConfig:
    """Links of ``gbit_per_s`` (0: as fast as the file comes), a prefix of ``tokens`` tokens, ``rounds`` of all of it.

    The group that is timed and its rivals come from the profile of the first run. ``rivals`` is how many other groups
    within the loss bound the choice is held against.
    """

    gbit_per_s: tuple[float, ...]
    tokens: int
    rounds: int
    rivals: int

    def needs(self) -> list[Need]:
        """Require a receiver whose context holds the prefix and what follows it."""
        return [Need("loading.tokens", self.tokens + SUFFIX, CONTEXT)]


def random_request(model: PreTrainedModel, tokens: int, draw: torch.Generator) -> tuple[Prefix, Tensor]:
    """A prefix of ``tokens`` random tokens and a suffix [1, 4]: a timing does not depend on which they are."""
    ids = torch.randint(model.config.vocab_size, (1, tokens + SUFFIX), generator=draw).to(model.device)
    return Prefix(ids[:, :tokens]), ids[:, tokens:]


class WiredPair:
    """A sender's cache of one prefix, stored on disk, and a receiver that fetches it over links."""

    def __init__(
        self, sender: PairedModel, receiver: PairedModel, tokens: int, groups: Sequence[Group], folder: Path
    ) -> None:
        self.model = receiver.model
        self.prefix, self.suffix = random_request(self.model, tokens, torch.Generator().manual_seed(0))
        sent = full_prefill(sender.model, self.prefix, {group.lo for group in groups if group.needs_e_cache})
        room = 2 * sum(kv.nbytes for kv in sent.kv) + 2 * sum(edge.nbytes for edge in sent.e_cache.values())
        store, context = KVStore(folder, memory_bytes=0, disk_bytes=room), self.prefix.ids[0].tolist()
        store.store(context, sender.identity, sent)
        self.pieces = store.locate(context, sender.identity)[0].spans
        self._buffers: dict[tuple[Group, Schedule], Buffers] = {}

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.pieces["layer.0"].nbytes // self.prefix.tokens

    @property
    def e_cache_token_bytes(self) -> int:
        """Bytes of one token's hidden state; a group that starts at layer 0 needs none, so none may be stored."""
        return self.model.config.hidden_size * self.model.dtype.itemsize

    def ask(
        self,
        group: Group,
        link: LinkConfig,
        schedule: Schedule = Schedule.PIPELINED,
        order: SendingOrder = e_cache_first,
    ) -> FirstToken:
        """One request over a fresh link; buffers are kept from request to request, as a server would."""
        key = (group, schedule)
        if key not in self._buffers:
            depth = self.model.config.num_hidden_layers
            self._buffers[key] = Buffers(sent_pieces(self.pieces, group, depth, schedule), self.prefix.ids.device)
        options = {"buffers": self._buffers[key], "order": order}
        return first_token(self.model, self.prefix, self.pieces, group, Link(link), self.suffix, schedule, **options)
