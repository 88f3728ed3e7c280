"""What is known to be computed here as transformers computes it: families of models, and keys of config.json.

Each family of the lists was held against transformers through the ways that its list names
(``tests/assets/families_soak.py``). Every other one is refused by its name, and every key by its own that neither the
model's class reads nor is known to say nothing of how tokens become logits. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import shown

Way = Literal["alone", "spans", "stages"]
"""How a model is taken: whole, from one plain folder and with nothing beside it; its layers apart, as a swarm, a
variant, a stored prefix and a worker do; or its tensors in stages, which serve in all three ways."""

_IN_STAGES = frozenset(
    {
        *("Arcee", "BitNet", "Cohere", "Ernie4_5", "Gemma", "Glm", "Glm4", "Granite", "Helium", "HunYuanDenseV1"),
        *("HyperCLOVAX", "Llama", "Ministral3", "Mistral", "NanoChat", "Olmo", "Olmo2", "Phi3", "Qwen2", "Qwen3"),
        *("SeedOss", "SmolLM3"),
    }
)
_IN_SPANS = frozenset({"Jais2", "Phi", "Starcoder2"})  # a stage knows no such norm at the end
_ALONE = frozenset(  # Gemma-3 for its windows, the others as transformers renames their experts while it loads
    {
        *("Dots1", "Ernie4_5_Moe", "FlexOlmo", "Gemma3", "Glm4Moe", "GraniteMoe", "GraniteMoeShared", "HYV3", "Mellum"),
        *("MiniMaxM2", "Mixtral", "Olmoe", "Phimoe", "Qwen2Moe", "Qwen3Moe", "SolarOpen"),
    }
)
_REFUSALS: dict[Way, str] = {
    "alone": "was not compared with transformers, and is not served",
    "spans": "is served from its own folder alone, and neither by a swarm nor with variants or stored prefixes",
    "stages": "is served, and not in stages",
}
_FAMILIES: dict[Way, frozenset[str]] = {
    "alone": _IN_STAGES | _IN_SPANS | _ALONE,
    "spans": _IN_STAGES | _IN_SPANS,
    "stages": _IN_STAGES,
}

SILENT = frozenset(
    {
        # names, versions and what tools leave behind
        *(
            "_name_or_path",
            "_model_name_or_path",
            "name_or_path",
            "transformers_version",
            "is_llama_config",
            "auto_map",
        ),
        *("_commit_hash", "unsloth_version", "unsloth_fixed", "transformers.js_config", "custom_pipelines", "license"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("architectures", "model_type", "dtype", "torch_dtype", "torchscript", "use_bfloat16", "tokenizer_class"),
        *(
            "_attn_implementation",
            "attn_implementation",
            "_attn_implementation_autoset",
            "_attn_implementation_internal",
        ),
        *("_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention", "use_flash_attention_2"),
        # token ids and texts
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "mask_token_id"),
        *("decoder_start_token_id", "eod_token_id", "end_token_id", "im_start_id", "im_end_id", "prefix"),
        # how weights were drawn and trained, and what training dropped out
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
        *("classifier_dropout", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "tf_legacy_loss"),
        *("gradient_checkpointing", "neftune_noise_alpha", "max_sequence_length", "model_max_length", "seq_length"),
        *("tokenizer_model_max_length", "tokenizer_padding_side", "max_window_layers", "loss_type"),
        # how it is asked, and what transformers chooses a token by
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        *("cache_implementation", "return_dict_in_generate", "output_scores", "max_length", "min_length", "do_sample"),
        *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    }
)
"""Keys that say nothing of how tokens become logits, whatever they hold; ``auto_map`` too, since the class that
computes is transformers' own of that name, and no code of a folder is run."""
_SILENT_OFF = frozenset(
    {
        *("quantization_config", "quantization", "compression_config", "transformers_weights", "pruned_heads"),
        *("is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"),
        *("tie_encoder_decoder", "rope_scaling", "rope_interleaved", "use_mrope", "mlp_bias", "attention_bias"),
        *("lm_head_bias", "use_bias", "qkv_bias", "use_qk_norm", "qk_layernorm", "head_dim", "layer_types"),
        *("sliding_window", "sliding_window_pattern", "use_sliding_window", "sliding_window_size", "attention_window"),
        *("attention_chunk_size", "use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"),
        *("logit_softcap", "hidden_activation", "num_experts", "num_local_experts", "embedding_dropout"),
        *("original_max_position_embeddings", "partial_rotary_factor", "rope_parameters"),
    }
)
"""Keys that say nothing where they are null, false or empty."""
_SILENT_AS: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "interpolate_factor": (1,),
    "full_attn_mod": (1,),
    "activation": ("silu", "swiglu"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "ep_size": (1,),
}
_REPLACED = ("attn_logit_softcapping", "use_bidirectional_attention", "is_encoder_decoder")
"""Fields of transformers' classes that act within the attention, in whose place stands the engine's without them."""
_READ_BY_ALL = frozenset(
    {
        "intermediate_size",
        *("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"),
        *("sliding_window", "original_max_position_embeddings"),
    }
)
"""Keys that transformers or this library reads of any model."""
_LLAMA = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    }
)
FIELDS = {
    "LlamaForCausalLM": _LLAMA | {"attention_bias", "mlp_bias"},
    "Qwen2ForCausalLM": _LLAMA | {"use_sliding_window"},
}
"""What transformers' class reads of the models that are known without it, beside what is silent."""


def check_family(architecture: str, way: Way = "alone") -> None:
    """Raise ModelError for a model of ``architecture``, a class of transformers, that was not compared in this way."""
    family = architecture.removesuffix("ForCausalLM")
    if family in _FAMILIES[way] and family != architecture:
        return
    reason: Way = next(tried for tried in _FAMILIES if family not in _FAMILIES[tried] or tried == way)
    raise ModelError(f"{architecture} {_REFUSALS[reason]}; use one of {', '.join(sorted(_IN_STAGES))}")


def is_silent(key: str, value: Any) -> bool:
    """Return whether a ``key`` of config.json with this ``value`` says nothing of how tokens become logits."""
    if key in SILENT or (key in _SILENT_OFF and not value):
        return True
    return any(type(value) is type(silent) and value == silent for silent in _SILENT_AS.get(key, ()))


def unread_keys(content: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The keys of ``content``, of a config.json, that may say something and are none of ``fields``, which the model's
    class reads; and a field that acts within the attention."""
    return {
        key: value
        for key, value in sorted(content.items())
        if not is_silent(key, value) and (key in _REPLACED or not (key in fields or key in _READ_BY_ALL))
    }


def check_keys(path: Path, unread: Mapping[str, Any]) -> None:
    """Raise ModelError for the first of the ``unread`` keys of the config.json at ``path``."""
    for key, value in unread.items():
        raise ModelError(
            f"{path}: {shown(key)} is {shown(value)}, and what that changes is not computed here; use another model, "
            "or remove the key where it says nothing of the model"
        )
