"""What clients may say of settings that are not served here: what is done anyway.

The fields are those of OpenAI's two interfaces, vLLM, SGLang, Text Generation Inference, llama.cpp, LMDeploy, Ollama
and the services that speak OpenAI's language. A null is the same as a field that is left out, and so stands nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from firsttoken.study.errors import RequestError

Values = tuple[Any, ...]
Table = dict[str, Values]

_NONE: Values = ()  # whatever the field says would change something
_EITHER: Values = (True, False)  # of what would change how tools, reasoning or images are treated, and there are none


def _table(*lines: tuple[Values, str]) -> Table:
    return {field: values for values, fields in lines for field in fields.split()}


REQUEST: Table = _table(
    (
        _NONE,
        "audio prediction moderation web_search_options truncate_prompt_tokens prompt_logprobs logprob_token_ids "
        "prompt_embeds allowed_token_ids chat_template structured_outputs guided_json guided_regex guided_choice "
        "guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag "
        "repetition_detection json_schema regex ebnf lora_path custom_logit_processor min_dynamic_patch "
        "max_dynamic_patch input_ids task ngram_corpus_id bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
        "data_parallel_rank disagg_prefill_dp_rank adapter_id truncate tool_prompt guideline n_predict samplers "
        "adapter_name migration_request random_seed prompt_mode search_parameters",
    ),
    (
        (False,),
        "store use_beam_search include_stop_str_in_output continue_final_message return_tokens_as_token_ids "
        "return_token_ids return_token_offsets return_prompt_text watermarking no_stop_trim return_logprob "
        "return_hidden_states return_routed_experts return_cached_tokens_details return_prompt_token_ids "
        "return_meta_info use_audio_in_video details decoder_input_details return_full_text watermark early_stopping "
        "penalize_nl timings_per_token post_sampling_probs return_tokens return_progress thinking_forced_open "
        "ban_eos_token with_cache preserve_cache enable_thinking think safe_prompt deferred include_obfuscation",
    ),
    ((True,), "skip_special_tokens add_generation_prompt include_reasoning add_bos_token do_preprocess"),
    (
        _EITHER,
        "parallel_tool_calls parse_tool_calls separate_reasoning stream_reasoning return_mm_kwargs "
        "return_text_in_logprobs spaces_between_special_tokens cache_prompt",
    ),
    (
        (0,),
        "priority routed_experts_prompt_start routed_experts_start_len "
        "min_new_tokens top_logprobs_num top_n_tokens penalty_alpha no_repeat_ngram_size mirostat mirostat_mode "
        "dynatemp_range dry_multiplier xtc_probability smoothing_factor n_keep n_discard n_probs n_indent min_keep",
    ),
    (
        (1,),
        "length_penalty stream_interval num_beams num_return_sequences encoder_repetition_penalty "
        "guidance_scale repeat_penalty dynatemp_exponent",
    ),
    ((-1,), "thinking_token_budget logprob_start_len id_slot"),
    (
        ([],),
        "tools functions bad_words logits_processors documents stop_regex image_data lora "
        "response_fields transforms plugins data_sources",
    ),
    (
        ({},),
        "mm_processor_kwargs media_io_kwargs kv_transfer_params ec_transfer_params vllm_xargs session_params "
        "custom_params images_config options provider",
    ),
    (("",), "suffix negative_prompt grammar"),
    (("none",), "reasoning_effort reasoning_format"),
    (("none", "auto"), "tool_choice function_call"),  # of no tools
    (("auto", "default"), "service_tier"),
    (("medium",), "verbosity"),
    (("left", "right"), "truncation_side"),  # of what is not truncated
    (({"type": "text"},), "response_format"),
    ((["text"],), "modalities"),
    (({"type": "disabled"},), "thinking"),
    (({}, {"effort": "none"}, {"enabled": False}), "reasoning"),
    (({"include": False}, {"include": True}), "usage"),  # every answer has its usage
    ((0, 64, -1), "repeat_last_n"),  # these six are of others' penalties, which are not served
    ((5,), "mirostat_tau"),
    ((0.1,), "mirostat_eta xtc_threshold"),
    ((1.75,), "dry_base"),
    ((2,), "dry_allowed_length"),
    ((0, -1), "dry_penalty_last_n t_max_predict_ms"),
    (([], ["\n", ":", '"', "*"]), "dry_sequence_breakers"),
)
# Which tokens a draw may take. Where nothing is drawn, any number leaves the likeliest token what it is.
DRAWS: Table = _table(((0,), "top_a"), ((1,), "typical typical_p tfs tfs_z"))
COMPLETION: Table = {"add_special_tokens": (True,), "top_logprobs": (0,), "chat_template_kwargs": ({},)}
CHAT: Table = {"add_special_tokens": (False,), "echo": (False,)}
MESSAGE: Table = _table(
    (_NONE, "audio function_call"),
    (("",), "refusal reasoning"),
    (([],), "tool_calls reasoning_details thinking_blocks images videos tools"),
    ((False,), "prefix partial"),
    (("text",), "type"),  # which some clients say of turns, as of parts
)
# Who asks, and which requests belong together: no answer depends on it, whatever these say.
OF_THE_CLIENT = _table(
    (
        _NONE,
        "user metadata safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options request_id rid "
        "session_id extra_key custom_labels",
    )
).keys()
# What stands in an answer's message beside what was said, and what a cache is told: no model reads it.
OF_AN_ANSWER = _table((_NONE, "id annotations citations provider_specific_fields cache_control")).keys()


def request_table(content: dict[str, Any], fields: Table) -> Table:
    """Return the values that a request's fields may have, where they depend on its other fields, too; ``fields`` are
    those of its kind."""
    greedy = same(content.get("temperature"), 0)
    hanging = {"best_of": (1, content.get("n", 1)), "do_sample": (not greedy,)}
    numbers = {field: (content[field],) for field in DRAWS if greedy and type(content.get(field)) in (int, float)}
    return REQUEST | DRAWS | hanging | numbers | fields


def drop_neutral(content: dict[str, Any], table: Table, passed: Collection[str], prefix: str = "") -> None:
    """Take out of an object of a body what only says what is done anyway, and what is ``passed`` over.

    Raises RequestError where a field of ``table`` says something else; ``prefix`` stands before its name. What is in
    neither is left there.
    """
    for field in [field for field in content if field in passed or field in table]:
        content_value = content.pop(field)
        if field not in passed and not any(same(content_value, value) for value in table[field]):
            only = " or ".join(dict.fromkeys(map(json.dumps, table[field])))
            reason = f"only {only} is served" if only else "it is not served"
            raise RequestError(f"{prefix}{field}: {reason}; leave it out")


def same(value: Any, other: Any) -> bool:
    """Return whether two values of JSON are the same: 1 and 1.0 are, and true is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def without_nulls(value: Any) -> Any:
    """A body without the fields that are null, at any depth: they mean the same as fields that are left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
