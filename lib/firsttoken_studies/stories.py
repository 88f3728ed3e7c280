"""A small model whose weights were never rounded: Karpathy's 15 M TinyStories checkpoint, as llama2.c stores it.

The default model comes from a 4-bit file, which flatters whatever is measured of the bits of its weights.
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.study.errors import AssetError
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, read_bytes

NAME, FILE = "stories15m", "llama2.data"
_MOST = 1 << 16  # of each size in the header: above every llama2.c model


def story_model() -> LlamaForCausalLM:
    """The pinned checkpoint in float32, in eval mode. Raises AssetError when it is not in the cache."""
    return read_llama2c(downloaded(NAME) / FILE)


def read_llama2c(path: Path) -> LlamaForCausalLM:
    """A llama2.c checkpoint (its first format: seven int32, then float32 tensors of all layers, head tied).

    What follows the weights (rotary tables, a tokenizer) is not read. llama2.c turns neighbours (2i, 2i + 1) of a head,
    transformers (i, i + n / 2): the rows of queries and keys are put in that order. Raises AssetError for a file that
    is too short for its own header, or whose header is none.
    """
    with errors_as(path, AssetError, "take it again"):
        data = bytearray(read_bytes(path))  # torch wants memory that it could write to
        if len(data) < 28:
            raise ParseError("it is too short for a header")
        dim, hidden, layers, heads, kv_heads, vocabulary, context = sizes = struct.unpack("<7i", data[:28])
        if not all(0 < size <= _MOST for size in sizes) or dim % heads or heads % kv_heads or (dim // heads) % 2:
            raise ParseError(f"its header names no model of llama2.c with a tied head: {list(sizes)}")
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
        kv = dim * kv_heads // heads
        shapes = {
            "model.embed_tokens": (vocabulary, dim),
            "input_layernorm": (layers, dim),
            "self_attn.q_proj": (layers, dim, dim),
            "self_attn.k_proj": (layers, kv, dim),
            "self_attn.v_proj": (layers, kv, dim),
            "self_attn.o_proj": (layers, dim, dim),
            "post_attention_layernorm": (layers, dim),
            "mlp.gate_proj": (layers, hidden, dim),
            "mlp.down_proj": (layers, dim, hidden),
            "mlp.up_proj": (layers, hidden, dim),
            "model.norm": (dim,),
        }
        if len(data) < 28 + 4 * sum(map(math.prod, shapes.values())):
            raise ParseError("it is truncated: shorter than its header says")
        state, offset = {}, 28
        for name, shape in shapes.items():
            tensor = (
                torch.frombuffer(data, dtype=torch.float32, count=math.prod(shape), offset=offset).view(shape).clone()
            )
            offset += 4 * tensor.numel()
            state |= _named(name, tensor, dim // heads)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        return model.eval().requires_grad_(False)


def _named(name: str, tensor: Tensor, head: int) -> dict[str, Tensor]:
    if name.startswith("model."):
        return {f"{name}.weight": tensor}
    if name.endswith(("q_proj", "k_proj")):
        turned = tensor.view(len(tensor), -1, head // 2, 2, tensor.shape[-1]).transpose(2, 3)
        tensor = turned.reshape(tensor.shape)
    return {f"model.layers.{layer}.{name}.weight": part.contiguous() for layer, part in enumerate(tensor)}
