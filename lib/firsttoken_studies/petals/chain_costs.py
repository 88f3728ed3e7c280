"""What a step takes through a chain of servers and by offloading, and what the paper's Table 3 says of both.

A client that talks to each server itself pays a round trip and the hidden states there and back for each. Offloading,
as the paper bounds it, pays the bytes of all weights over its link, and nothing for computing (section 3.3).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BloomConfig, DynamicCache
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor

from firsttoken.assets.decoder_layers import layers_of
from firsttoken.engine.linear8 import Linear8, quantize
from firsttoken.petals.int8_transport import BLOCK
from firsttoken.petals.routing import Hop, Reachable
from firsttoken.study.errors import ProfileError, StorageError
from firsttoken.study.timing import timed

# One block of BLOOM-176B, timed here: what a token takes through it, and so through all 70.
#
# Its weights are random, and each row of a matrix is the same: a product takes as long whatever its values are. No
# state is large enough to stay out of the integers, as one in a thousand is in the paper.

HEAD = 128  # values of a head, as BLOOM-176B has 112 of them


def bloom_block(hidden: int, dtype: torch.dtype, device: torch.device, bits: int) -> nn.Module:
    """A block ``hidden`` wide, a multiple of 128, its weights in ``dtype`` or, with 8 ``bits``, in codes of a byte."""
    with torch.device("meta"):
        block = BloomBlock(BloomConfig(hidden_size=hidden, n_head=hidden // HEAD), layer_idx=0).to(dtype)
    random = torch.Generator().manual_seed(0)
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            row = torch.randn(parameter.shape[-1], generator=random) / hidden**0.5
            values = row.to(device, dtype).expand(parameter.shape)  # no memory of its own until it is copied
            setattr(module, name, nn.Parameter(values if bits == 8 else values.contiguous(), requires_grad=False))
    for parent in list(block.modules()) if bits == 8 else ():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, _in_8_bits(child))
    return block.eval()


def _in_8_bits(linear: nn.Linear) -> Linear8:
    """``Linear8.of(linear)``, whose rows are all the same: one is put into codes instead of up to 57,344."""
    codes, scales = quantize(linear.weight[:1])
    rows = linear.out_features
    return Linear8(codes.expand(rows, -1).contiguous(), scales.expand(rows).contiguous(), linear.bias.clone())


@torch.inference_mode()
def block_seconds(block: nn.Module, context: int, repeats: int) -> list[float]:
    """Seconds of one token through ``block`` after ``context`` others, ``repeats`` times."""
    norm = block.input_layernorm.weight
    hidden, heads = norm.shape[0], block.num_heads
    cache = DynamicCache()

    def run(tokens: int, cached: int) -> None:
        states = torch.randn(1, tokens, hidden).to(norm)
        alibi = build_alibi_tensor(torch.ones(1, cached + tokens, device=norm.device), heads, norm.dtype)
        block(states, alibi, None, layer_past=cache, use_cache=True)

    def step() -> None:
        run(1, context)
        cache.crop(-1)

    run(context, 0)
    return timed(step, repeats=repeats, warmup=1, device=norm.device)


def decode_step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Return a function that makes one decoding step of all layers of ``model`` after the prompts ``ids`` [batch,
    tokens] but their last token, and forgets it."""
    cache = model.model(ids[:, :-1], use_cache=True).past_key_values

    def step() -> None:
        model.model(ids[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


# Offloading as it is measured beside a swarm: each layer's weights are brought for each token, from memory or disk.


class _Brought(nn.Module):
    """Layer ``index`` of a model: its weights come into the one working layer, which then runs."""

    def __init__(self, index: int, weights: Resting) -> None:
        super().__init__()
        self._index, self._weights = index, [weights]  # in a list, so that it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._weights[0].layer(self._index)(*args, **kwargs)


class Resting:
    """The weights of ``layers`` as one row each, in host memory [layers, parameters] or in ``file``; a step brings
    ``step_bytes``."""

    def __init__(self, layers: nn.ModuleList, file: Path | None) -> None:
        rows = torch.stack([torch.cat([p.data.flatten() for p in layer.parameters()]) for layer in layers])
        self._working, self._buffer, on_gpu = copy.deepcopy(layers[0]), torch.ones_like(rows[0]), rows.is_cuda
        self._rows = rows.cpu().pin_memory() if on_gpu else rows
        self._arrival = torch.ones_like(self._rows[0]).pin_memory() if on_gpu else self._buffer
        offset = 0
        for parameter in self._working.parameters():
            parameter.data = self._buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.row_bytes, self._file = self._buffer.numel() * self._buffer.element_size(), None
        self.step_bytes = self.row_bytes * len(layers)
        if file is not None:
            file.write_bytes(_bytes_of(self._rows))
            self._file, self._rows = open(file, "rb", buffering=0), self._rows[:0]  # noqa: SIM115 closed by offloaded

    def layer(self, index: int) -> nn.Module:
        """Layer ``index``, brought. Raises StorageError where the file ends too early."""
        if self._file is None:
            self._buffer.copy_(self._rows[index])
        else:
            self._file.seek(index * self.row_bytes)
            if self._file.readinto(_bytes_of(self._arrival)) != self.row_bytes:
                raise StorageError("the offloaded layers' file is cut short; run it again")
            if self._arrival is not self._buffer:
                self._buffer.copy_(self._arrival)
        self._working.self_attn.layer_idx = index
        return self._working

    def bring_all(self) -> None:
        """Bring all that a step brings, and compute nothing."""
        for index in range(self.step_bytes // self.row_bytes):
            self.layer(index)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


@contextmanager
def offloaded(model: nn.Module, file: Path | None) -> Iterator[Resting]:
    """Keep the layers of ``model`` in memory, or in ``file``, within the block, and bring them one by one when they
    run.

    Yields the resting weights. The layers are of one shape, as those of Llama-like models are.
    """
    layers = layers_of(model)
    weights = Resting(layers, file)
    model.model.layers = nn.ModuleList(_Brought(index, weights) for index in range(len(layers)))
    try:
        yield weights
    finally:
        model.model.layers = layers
        weights.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


BLOOM_BYTES, BLOOM_HIDDEN, BLOOM_BLOCKS = 176e9, 14336, 70  # in 8 bits
# Steps a second of a client with 128 tokens, as the authors' README has them for three servers with an A100 each, and
# the two bounds of offloading.
PUBLISHED_STEPS_PER_S = {"1 Gbit/s, 5 ms": 1.71, "100 Mbit/s, 5 ms": 1.66, "100 Mbit/s, 100 ms": 1.23}
OFFLOADING_GBIT_PER_S = {"PCIe 4.0 x16": 256.0, "behind a switch": 128.0, "SSD": 64.0}
PUBLISHED_SERVERS = 3


@dataclass(frozen=True)
class Network:
    """A link to each server, ``gbit_per_s`` each way and ``rtt_s`` seconds there and back. ProfileError for none."""

    gbit_per_s: float
    rtt_s: float

    def __post_init__(self) -> None:
        if not self.gbit_per_s > 0 or not self.rtt_s >= 0:
            raise ProfileError(f"a network has a rate and a latency, not {self.gbit_per_s} Gbit/s and {self.rtt_s} s")

    def hop_s(self, hidden: int, tokens: int = 1) -> float:
        """Seconds on the way to one server and back, with ``tokens`` packed states of ``hidden`` values each way."""
        states = 2 * tokens * (hidden + 4 * -(-hidden // BLOCK))
        return self.rtt_s + 8 * states / (self.gbit_per_s * 1e9)


NETWORKS = {
    "1 Gbit/s, 5 ms": Network(1.0, 0.005),
    "100 Mbit/s, 5 ms": Network(0.1, 0.005),
    "100 Mbit/s, 100 ms": Network(0.1, 0.1),
}


def swarm_s(compute_s: float, servers: int, hidden: int, network: Network, tokens: int = 1) -> float:
    """Seconds of ``tokens`` at once through ``servers`` in turn that compute for ``compute_s`` together."""
    return compute_s + servers * network.hop_s(hidden, tokens)


def offload_s(weight_bytes: float, gbit_per_s: float) -> float:
    """The least that a step takes when all weights come over a link of ``gbit_per_s``."""
    return 8 * weight_bytes / (gbit_per_s * 1e9)


def published_compute_s() -> float:
    """Return the seconds of BLOOM's blocks on the paper's three servers: their fastest row without its network."""
    network = "1 Gbit/s, 5 ms"
    return 1 / PUBLISHED_STEPS_PER_S[network] - PUBLISHED_SERVERS * NETWORKS[network].hop_s(BLOOM_HIDDEN)


def crossover_bytes(link_gbit_per_s: float, servers: int, hidden: int, network: Network) -> float:
    """Bytes of weights from which on a swarm is faster than offloading, which computes as fast and hides nothing."""
    return servers * network.hop_s(hidden) * link_gbit_per_s * 1e9 / 8


def clients_step_s(chain: Sequence[Hop], clients: int) -> float:
    """Mean seconds of a step when ``clients`` at once go round ``chain`` without end.

    Exact mean value analysis of a closed network (Reiser and Lavenberg, 1980): a server takes one step at a time, first
    come first served, and steps vary in length as exponential ones do; the way there and back keeps nobody waiting.
    """
    queued = [0.0] * len(chain)
    way_s = sum(hop.server.ping_s for hop in chain)
    step_s = 0.0
    for count in range(1, clients + 1):
        inside = [hop.row_s * (1 + before) for hop, before in zip(chain, queued, strict=True)]
        step_s = way_s + sum(inside)
        queued = [count / step_s * seconds for seconds in inside]
    return step_s


# The paper's 14 small servers on two continents, and 12 equal ones: simulated, on what an A100 needed for a block.
#
# A block of BLOOM-176B in 8 bits takes a GPU the time to read it and the time that the host needs to start its kernels.
# The first follows from the card's memory bandwidth; the second is what the paper's A100 needed beyond it.

_BLOCK_BYTES = BLOOM_BYTES / BLOOM_BLOCKS
_A100_GB_PER_S = 2039.0
_KEPT = 0.9  # of a card's memory for blocks, the rest for keys, values and the context of CUDA
_NEAR, _FAR = 0.02, 0.12  # seconds there and back within a continent and across the ocean
_RELAYED = 2.0  # times the way, behind a firewall


@dataclass(frozen=True)
class Card:
    """A consumer GPU by its maker's data sheet: ``memory_gb`` (1e9 bytes) and ``gb_per_s`` of its memory."""

    name: str
    memory_gb: float
    gb_per_s: float

    @property
    def blocks(self) -> int:
        """Return the number of BLOOM's blocks that fit in 8 bits."""
        return int(_KEPT * self.memory_gb * 1e9 / _BLOCK_BYTES)

    @property
    def block_s(self) -> float:
        """Seconds of a token in one block."""
        started_s = published_compute_s() / BLOOM_BLOCKS - _BLOCK_BYTES / (_A100_GB_PER_S * 1e9)
        return started_s + _BLOCK_BYTES / (self.gb_per_s * 1e9)


CARDS = (
    *[Card("RTX 3060", 12.9, 360.0)] * 2,
    *[Card("RTX 2080 Ti", 11.8, 616.0)] * 4,
    *[Card("RTX 3090", 25.8, 936.0)] * 2,
    *[Card("RTX A4000", 17.2, 448.0)] * 2,
    *[Card("RTX A5000", 25.8, 768.0)] * 4,
)


def fourteen() -> list[Reachable]:
    """The paper's cards side by side over all blocks, every other one across the ocean at 100 Mbit/s, the near ones at
    1 Gbit/s, every fourth behind a firewall; the last takes what is left."""
    servers, first = [], 0
    for number, card in enumerate(CARDS):
        far, stop = number % 2 == 1, min(BLOOM_BLOCKS, first + card.blocks)
        rtt = (_FAR if far else _NEAR) * (_RELAYED if number % 4 == 3 else 1.0)
        ping = Network(0.1 if far else 1.0, rtt).hop_s(BLOOM_HIDDEN)
        if first < stop:
            servers.append(Reachable(f"{number:02} {card.name}", range(first, stop), ping, 1 / card.block_s))
        first = stop
    return servers


def twelve(network: Network) -> list[Reachable]:
    """The three A100 cut into 12 equal servers on ``network``."""
    edges = [BLOOM_BLOCKS * part // 12 for part in range(13)]
    rate = BLOOM_BLOCKS / published_compute_s()
    ping = network.hop_s(BLOOM_HIDDEN)
    spans = itertools.pairwise(edges)
    return [Reachable(f"{number:02}", range(*span), ping, rate) for number, span in enumerate(spans)]
