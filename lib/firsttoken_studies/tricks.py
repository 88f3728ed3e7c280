"""Which idea pays where: what each report's idea changes in its own situation, by arithmetic on machine and request.

Every formula is a lower bound that the library's own parts are held to: bytes over a link, operations over a rate, a
price for each copy, a round trip for each server. ``firsttoken site`` exports them to its page
(``site/tricks_page.py``), so they stand here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

BYTES_A_WEIGHT = 2  # 16 bits
BLOCK_TOKENS = 16  # of a KV block
COPIES_A_BLOCK = 2  # keys and values, for each layer


@dataclass(frozen=True)
class TrickSetting:
    """A machine and a request; the defaults are a 7B model on one GPU behind a link of 10 Gbit/s."""

    weights_gb: float = 13.5
    ends_gb: float = 0.52  # of the weights: embeddings and head
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
    """Seconds without an idea and with it, and ``rival``: with a second way that is not the idea's."""

    without: float
    with_it: float
    rival: float | None = None


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


def hops_s(s: TrickSetting, tokens: float) -> float:
    """Seconds for the hidden states of ``tokens`` to go through the chain: a round trip and the bytes, each server."""
    sent_s = s.hidden_kib_per_token * 1024 * tokens * 8 / (s.link_gbit_per_s * 1e9)
    return s.servers * (s.round_trip_ms / 1e3 + sent_s)


def petals(s: TrickSetting) -> Times:
    """A start: the first token after all weights, or after embeddings and head, from servers that hold the layers. The
    bound of a start without them is ProgressiveServe's of all layers."""
    computed = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    ends_s = load_s(s.ends_gb, s.link_gbit_per_s)
    return Times(max(load_s(s.weights_gb, s.link_gbit_per_s), computed), ends_s + computed + hops_s(s, s.prompt_tokens))


def droidspeak(s: TrickSetting) -> Times:
    """A prefill: all layers computed, or a group of them beside the transfer of the others' keys and values."""
    computed = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    kib = s.kv_kib_per_token * (1 - s.group_share) + s.hidden_kib_per_token
    sent = kib * 1024 * s.prompt_tokens * 8 / (s.link_gbit_per_s * 1e9)
    return Times(computed, max(computed * s.group_share, sent))


def cps(s: TrickSetting) -> Times:
    """A preempted request comes back: its cache always computed again, as vLLM does by default, or copied where that is
    faster; the rival always copies."""
    copied = swap_s(s.kv_kib_per_token, s.layers, s.prompt_tokens, s.host_gb_per_s, s.us_per_copy)
    again = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    return Times(again, min(copied, again), copied)


def sarathi(s: TrickSetting) -> Times:
    """A running request beside a new prompt: it waits for the whole prompt, or for one chunk."""
    whole_s = prefill_s(s.weights_gb, s.prompt_tokens, s.tflop_per_s)
    return Times(whole_s, prefill_s(s.weights_gb, min(s.chunk_tokens, s.prompt_tokens), s.tflop_per_s))


class Idea(NamedTuple):
    """A report's ``formula``, the ``moment`` that it is about, and in words what its ``Times`` are of."""

    formula: Callable[[TrickSetting], Times]
    moment: str
    without: str
    with_it: str
    rival: str = ""


IDEAS = {
    "ProgressiveServe": Idea(
        progressiveserve, "first token of a start", "all layers are loaded first", "some layers come later"
    ),
    "PETALS": Idea(
        petals,
        "first token of a start",
        "all layers are loaded first",
        "only embeddings and head; servers have the layers",
    ),
    "DroidSpeak": Idea(
        droidspeak, "prefill behind another model", "all layers are computed", "a group is computed, the rest is sent"
    ),
    "CPS": Idea(
        cps,
        "return of a preempted request",
        "always computed again (vLLM's default)",
        "the cheaper way",
        "always swapped",
    ),
    "Sarathi-Serve": Idea(
        sarathi, "wait of a running request for a new prompt", "for the whole prompt", "for one chunk of it"
    ),
}
