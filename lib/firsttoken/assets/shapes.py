"""Named model shapes: the public dimensions of real models, for timing with random weights.

Dimensions are those of the ``config.json`` that each model's authors publish on the Hugging Face Hub
(HuggingFaceTB/SmolLM2-135M-Instruct, TinyLlama/TinyLlama-1.1B-Chat-v1.0, Qwen/Qwen2.5-0.5B, meta-llama/Llama-2-7b-hf,
meta-llama/Llama-3.1-8B, whose rescaled rotary angles cost nothing and are left out). "tiny" is nobody's model: it is
for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firsttoken.study.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TINY_VARIANTS = tuple(f"tiny-{layers}" for layers in range(2, 9))

# family; layers, hidden, MLP, heads, KV heads, vocabulary, context, rotary base, tied embeddings
_SHAPES: dict[str, tuple[str, tuple[int, int, int, int, int, int, int, float, bool]]] = {
    "smollm2-135m": ("Llama", (30, 576, 1536, 9, 3, 49152, 8192, 1e5, True)),
    "tinyllama-1.1b": ("Llama", (22, 2048, 5632, 32, 4, 32000, 2048, 1e4, False)),
    "qwen2.5-0.5b": ("Qwen2", (24, 896, 4864, 14, 2, 151936, 32768, 1e6, True)),
    "llama-2-7b": ("Llama", (32, 4096, 11008, 32, 32, 32000, 4096, 1e4, False)),
    "llama-3.1-8b": ("Llama", (32, 4096, 14336, 32, 8, 128256, 131072, 5e5, False)),
    "tiny": ("Llama", (4, 32, 64, 4, 2, 256, 512, 1e4, True)),
}


def shape_config(name: str) -> PretrainedConfig:
    """The transformers configuration of a named shape; "tiny" also comes as "tiny-2" to "tiny-8", by number of layers.

    Raises ModelError for a name that is not known.
    """
    import transformers

    shape, layers = ("tiny", name[5:]) if name in _TINY_VARIANTS else (name, "")
    if shape not in _SHAPES:
        raise ModelError(f"no shape is called {name!r}; known: {', '.join(_SHAPES)}, tiny-2 to tiny-8")
    family, (depth, hidden, mlp, heads, kv_heads, vocabulary, context, theta, tied) = _SHAPES[shape]
    extra: dict[str, Any] = {"max_window_layers": depth} if family == "Qwen2" else {}
    return getattr(transformers, f"{family}Config")(
        architectures=[f"{family}ForCausalLM"],
        num_hidden_layers=int(layers or depth),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=1e-6 if family == "Qwen2" else 1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
