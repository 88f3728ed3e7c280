"""Which group to recompute now: from what the link brings, how busy the processor is, and the loss that is allowed.

DroidSpeak chooses by load only (App. B, ``slo_rule``) and leaves the bandwidth to future work (6); ``choose_group`` is
r*(B) = argmin of the expected TTFT within the bound. The expected TTFT is that of ``pipeline.live_loading``: E-cache
first, the group beside the transfer, then the pass behind the prefix, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.study.errors import RequestError


@dataclass(frozen=True)
class GroupLoss:
    """A group, and the quality that it loses against the receiver's own prefill, in the unit of the bound."""

    group: Group
    loss: float


@dataclass(frozen=True)
class Choice:
    """The group to recompute, its expected TTFT and its loss. All layers are a full prefill, with no transfer."""

    group: Group
    ttft_s: float
    loss: float


@dataclass(frozen=True)
class Conditions:
    """A request of ``tokens`` prefix tokens, over a link, beside other work.

    ``bytes_per_s`` may be 0 (no link) or inf; ``load`` is how many times longer a computation takes than alone.
    Raises RequestError for numbers out of range.
    """

    tokens: int
    bytes_per_s: float
    latency_s: float = 0.0
    load: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise RequestError(f"a prefix has 1 token or more, not {self.tokens}")
        if not self.bytes_per_s >= 0:
            raise RequestError(f"a link brings 0 bytes/s or more, not {self.bytes_per_s}")
        if not 0 <= self.latency_s < inf:
            raise RequestError(f"a link's latency is 0 s or more, not {self.latency_s}")
        if not 1 <= self.load < inf:
            raise RequestError(f"load is the slow-down by other work, 1 or more, not {self.load}")

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` take, without the latency."""
        if nbytes == 0:
            return 0.0
        return nbytes / self.bytes_per_s if self.bytes_per_s else inf


@dataclass(frozen=True)
class GroupCosts:
    """Costs of a prefix for a receiver of ``depth`` layers on an idle processor.

    A recomputed layer takes ``layer_s`` + ``layer_token_s`` seconds a token (measured at one length: all in
    ``layer_s``), the pass behind the prefix ``first_token_s``. ``kv_token_bytes`` are a token's keys and values in one
    layer, ``e_cache_token_bytes`` its hidden state.
    """

    depth: int
    layer_s: float
    layer_token_s: float
    first_token_s: float
    kv_token_bytes: int
    e_cache_token_bytes: int

    @property
    def full(self) -> Group:
        """Return the group of all layers."""
        return Group(0, self.depth)

    def compute_s(self, group: Group, now: Conditions) -> float:
        """Return the seconds to recompute ``group`` under these conditions."""
        return now.load * len(group) * (self.layer_s + self.layer_token_s * now.tokens)

    def ttft_s(self, group: Group, now: Conditions, schedule: Schedule = Schedule.PIPELINED) -> float:
        """Seconds to the first token when ``group`` is recomputed and the other layers' KV comes over the link.

        Raises RequestError for a group that does not fit.
        """
        group.check(self.depth)
        behind_s = now.load * self.first_token_s
        if schedule is Schedule.RECOMPUTE:
            return self.compute_s(self.full, now) + behind_s
        sent = schedule.layers(group, self.depth)
        edge_bytes = self.e_cache_token_bytes * now.tokens * schedule.sends_e_cache(group)
        kv_bytes = self.kv_token_bytes * now.tokens
        edge_s = now.latency_s + now.transfer_s(edge_bytes) if edge_bytes else 0.0
        last_s = now.latency_s + now.transfer_s(edge_bytes + kv_bytes * len(sent)) if edge_bytes or sent else 0.0
        if schedule is not Schedule.PIPELINED:
            return last_s + self.compute_s(group, now) + behind_s
        done = edge_s + self.compute_s(group, now)
        arriving = {
            layer: now.latency_s + now.transfer_s(edge_bytes + kv_bytes * count) for count, layer in enumerate(sent, 1)
        }
        for layer in range(self.depth):  # the pass behind the prefix waits for a layer when it comes to it
            done = max(done, arriving.get(layer, 0.0)) + behind_s / self.depth
        return done


class LinkEstimate:
    """Bytes/s of a link from the transfers seen so far, each counting half as much as the next.

    Bytes and seconds are averaged apart, so that the estimate is right for the time of the bytes seen: a mean of rates
    would be too high. A choice of full prefill moves nothing, so a link that has recovered is noticed only by whoever
    still sends. ``bytes_per_s`` is believed until the first transfer.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._believed = bytes_per_s
        self._bytes = self._seconds = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` took ``seconds`` without the latency. Raises RequestError unless both are above 0."""
        if nbytes <= 0 or not 0 < seconds < inf:
            raise RequestError(f"a transfer of {nbytes} bytes in {seconds} s cannot be; give more than 0")
        self._bytes = self._bytes / 2 + nbytes
        self._seconds = self._seconds / 2 + seconds

    @property
    def bytes_per_s(self) -> float:
        """Return the estimated rate of the link, for ``Conditions``."""
        return self._bytes / self._seconds if self._seconds else self._believed


def choose_group(candidates: Sequence[GroupLoss], costs: GroupCosts, now: Conditions, loss_bound: float) -> Choice:
    """The choice of least expected TTFT among those within ``loss_bound``; of equals, that of the smaller loss.

    A full prefill, which loses nothing and moves nothing, is always among them. Raises RequestError for no candidates,
    a loss that is no number, or a negative bound.
    """
    return min(_choices(candidates, costs, now, loss_bound), key=lambda c: (c.ttft_s, c.loss))


def slo_rule(
    queue_empty: bool,
    candidates: Sequence[GroupLoss],
    costs: GroupCosts,
    now: Conditions,
    *,
    slo_s: float,
    loss_bound: float,
) -> Choice:
    """DroidSpeak's own rule (App. B): under load the fewest recomputed layers, else the most that meet ``slo_s``.

    Either way within ``loss_bound``, with the full prefill among the candidates; of equals the smaller loss. Where the
    paper says nothing, because none meets the SLO, it is the one of least expected TTFT. Raises as ``choose_group``.
    """
    choices = _choices(candidates, costs, now, loss_bound)
    if not queue_empty:
        return min(choices, key=lambda c: (len(c.group), c.loss, c.ttft_s))
    in_time = [choice for choice in choices if choice.ttft_s <= slo_s]
    if not in_time:
        return min(choices, key=lambda c: (c.ttft_s, c.loss))
    return min(in_time, key=lambda c: (-len(c.group), c.loss, c.ttft_s))


def _choices(candidates: Sequence[GroupLoss], costs: GroupCosts, now: Conditions, loss_bound: float) -> list[Choice]:
    """Everything within the bound, with what is expected of it; the full prefill first."""
    if not candidates:
        raise RequestError("no groups to choose from; profile the pair first")
    if not loss_bound >= 0 or not all(isfinite(candidate.loss) for candidate in candidates):
        raise RequestError(f"losses must be numbers and the bound 0 or more, not {loss_bound}")
    within = [Choice(c.group, costs.ttft_s(c.group, now), c.loss) for c in candidates if c.loss <= loss_bound]
    return [Choice(costs.full, costs.ttft_s(costs.full, now, Schedule.RECOMPUTE), 0.0), *within]
