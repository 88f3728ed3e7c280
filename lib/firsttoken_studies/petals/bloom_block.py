"""One block of BLOOM-176B, timed here: what a token takes through it, and so through all 70.

Its weights are random, and each row of a matrix is the same: a product takes as long whatever its values are. No
state is large enough to stay out of the integers, as one in a thousand is in the paper.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import BloomConfig, DynamicCache
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor

from firsttoken.engine.linear8 import Linear8, coded
from firsttoken.study.clock import timed

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
    codes, scales = coded(linear.weight[:1])
    rows = linear.out_features
    return Linear8(codes.expand(rows, -1).contiguous(), scales.expand(rows).contiguous(), linear.bias.clone())


@torch.inference_mode()
def block_seconds(block: nn.Module, context: int, repeats: int) -> list[float]:
    """Seconds of one token through ``block`` after ``context`` others, ``repeats`` times."""
    norm = block.input_layernorm.weight
    hidden, heads = norm.shape[0], block.num_heads
    cache = DynamicCache()

    def run(tokens: int, seen: int) -> None:
        states = torch.randn(1, tokens, hidden).to(norm)
        alibi = build_alibi_tensor(torch.ones(1, seen + tokens, device=norm.device), heads, norm.dtype)
        block(states, alibi, None, layer_past=cache, use_cache=True)

    def step() -> None:
        run(1, context)
        cache.crop(-1)

    run(context, 0)
    return timed(step, repeats=repeats, warmup=1, device=norm.device)
