"""Which idea pays where: what each report's idea changes in its own situation, by arithmetic on machine and request.

Every formula is a lower bound that the library's own parts are held to: bytes over a link, operations over a rate, a
price for each copy, a round trip for each server. ``firsttoken site`` exports them to its page
(``site/tricks_page.py``), so they stand here alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BYTES_A_WEIGHT = 2  # 16 bits
BLOCK_TOKENS = 16  # of a KV block
COPIES_A_BLOCK = 2  # keys and values, for each layer


@dataclass(frozen=True)
class TrickSetting:
    """A machine and a request; the defaults are a 7B model on one GPU behind a link of 10 Gbit/s."""

    weights_gb: float = 13.5
    layers: int = 32
    kv_kib_per_token: float = 512.0  # keys and values of all layers
    hidden_kib_per_token: float = 8.0  # the hidden state that enters a layer
    prompt_tokens: int = 2048
    link_gbit_per_s: float = 10.0
    tflop_per_s: float = 100.0
    host_gb_per_s: float = 25.0  # between host and device memory
    us_per_copy: float = 2.0
    deferred_share: float = 0.25  # of the layers
    group_share: float = 0.35  # of the layers, computed again
    chunk_tokens: int = 512
    servers: int = 3
    round_trip_ms: float = 5.0


class Times(NamedTuple):
    """Seconds without an idea and with it."""

    without: float
    with_it: float


def load_s(weights_gb: float, link_gbit_per_s: float) -> float:
    """Seconds for the weights to come over the link."""
    return weights_gb * 8 / link_gbit_per_s


def prefill_s(weights_gb: float, tokens: float, tflop_per_s: float) -> float:
    """Seconds for the products of a prefill: two operations for each weight and token; attention is left out."""
    return 2 * (weights_gb * 1e9 / BYTES_A_WEIGHT) * tokens / (tflop_per_s * 1e12)


def swap_s(kv_kib_per_token: float, layers: float, tokens: float, host_gb_per_s: float, us_per_copy: float) -> float:
    """Seconds to copy a request's KV blocks out and in again, a copy for each block, layer, keys and values."""
    copies = COPIES_A_BLOCK * layers * tokens / BLOCK_TOKENS
    return 2 * (copies * us_per_copy / 1e6 + kv_kib_per_token * 1024 * tokens / (host_gb_per_s * 1e9))


def progressiveserve(s: TrickSetting) -> Times:
    """A start: the first token after all weights, or after those that are not deferred. A layer may be computed while
    the next ones come, so that the longer of loading and prefill is the bound."""
    whole_s = max(load_s(s.weights_gb, s.link_gbit_per_s), prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s))
    return Times(whole_s, whole_s * (1 - s.deferred_share))


def petals(s: TrickSetting) -> Times:
    """A start: the first token after all weights, or at once from servers that hold the layers. The bound of a start
    without them is ProgressiveServe's of all layers."""
    computed = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    hop = s.round_trip_ms / 1e3 + s.hidden_kib_per_token * 1024 * s.prompt_tokens * 8 / (s.link_gbit_per_s * 1e9)
    return Times(max(load_s(s.weights_gb, s.link_gbit_per_s), computed), computed + s.servers * hop)


def droidspeak(s: TrickSetting) -> Times:
    """A prefill: all layers computed, or a group of them beside the transfer of the others' keys and values."""
    computed = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    kib = s.kv_kib_per_token * (1 - s.group_share) + s.hidden_kib_per_token
    sent = kib * 1024 * s.prompt_tokens * 8 / (s.link_gbit_per_s * 1e9)
    return Times(computed, max(computed * s.group_share, sent))


def cps(s: TrickSetting) -> Times:
    """A preempted request comes back: its cache always copied, or computed again where that is faster."""
    copied = swap_s(s.kv_kib_per_token, s.layers, s.prompt_tokens, s.host_gb_per_s, s.us_per_copy)
    return Times(copied, min(copied, prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)))


def sarathi(s: TrickSetting) -> Times:
    """A running request beside a new prompt: it waits for the whole prompt, or for one chunk."""
    whole_s = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    return Times(whole_s, prefill_s(s.weights_gb, min(s.chunk_tokens, s.prompt_tokens), s.tflop_per_s))


IDEAS = {
    "ProgressiveServe": (progressiveserve, "first token of a start that defers layers"),
    "PETALS": (petals, "first token of a start whose layers other servers hold"),
    "DroidSpeak": (droidspeak, "prefill with another model's cache"),
    "CPS": (cps, "return of a preempted request"),
    "Sarathi-Serve": (sarathi, "wait of a running request for a new prompt"),
}
