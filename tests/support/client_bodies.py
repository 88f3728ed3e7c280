"""Bodies as clients send them, with what else the usual servers' clients say, and whether each is to be taken.

The values stand here as the clients' own documents have them, and not as the table of the service has them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

BODIES = Path(__file__).parents[1] / "serve" / "bodies"
CHAT_PATH = "/v1/chat/completions"
Body = dict[str, Any]

# field: what asks for nothing else than is done, and what asks for something that is not served
SAID: dict[str, tuple[list[Any], list[Any]]] = {
    "repetition_penalty": ([1, 1.0, None, 1.1], [0, 200, True, "1"]),
    "presence_penalty": ([0, 0.0, None, 0.5, -2], [2.5, False]),
    "frequency_penalty": ([0, 0.0, None, 0.1], [-2.5]),
    "length_penalty": ([1.0], [0.8]),
    "min_p": ([0, 0.0, 0.05], [1.5, -0.1]),
    "top_k": ([-1, 0, None, 40, 1], [-2, 1.5]),
    "typical_p": ([1.0], [0.9]),
    "logit_bias": ([{}, None, {"65": -100}], [{"65": -101}, {"a": 1}, {"-1": 1}, [1]]),
    "use_beam_search": ([False], [True]),
    "best_of": ([1, None], [4, 0]),
    "stop_token_ids": ([[], None, [2]], [["2"], 2, [2] * 65]),
    "include_stop_str_in_output": ([False], [True]),
    "skip_special_tokens": ([True, None], [False]),
    "truncate_prompt_tokens": ([None], [512]),
    "prompt_logprobs": ([None], [0, 5]),
    "allowed_token_ids": ([None], [[1, 2]]),
    "bad_words": ([[]], [["no"]]),
    "logits_processors": ([None, []], [["my.processor"]]),
    "guided_json": ([None], [{"type": "object"}, "{}"]),
    "guided_regex": ([None], ["[a-z]+"]),
    "guided_choice": ([None], [["yes", "no"]]),
    "guided_grammar": ([None], ["root ::= x"]),
    "structured_outputs": ([None], [{"regex": "a"}]),
    "response_format": (
        [{"type": "text"}, None],
        [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    ),
    "priority": ([0, None], [3, -1]),
    "return_tokens_as_token_ids": ([False, None], [True]),
    "return_token_ids": ([False, None], [True]),
    "vllm_xargs": ([None, {}], [{"a": 1}]),
    "kv_transfer_params": ([None], [{"do_remote_decode": True}]),
    "cache_salt": (["salt", "x" * 1024, None], ["", "x" * 1025, 7, ["salt"]]),
    "request_id": (["abc", None], []),
    "chat_template": ([None], ["{{ messages }}"]),
    "chat_template_kwargs": ([{}, None], []),
    "add_generation_prompt": ([True], [False]),
    "continue_final_message": ([False], [True]),
    "regex": ([None], ["a+"]),
    "json_schema": ([None], ["{}"]),
    "no_stop_trim": ([False], [True]),
    "lora_path": ([None], ["adapter"]),
    "return_hidden_states": ([False], [True]),
    "separate_reasoning": ([True, False], ["yes"]),
    "rid": (["r1", None], []),
    "details": ([False], [True]),
    "return_full_text": ([False, None], [True]),
    "watermark": ([False], [True]),
    "mirostat": ([0], [2]),
    "repeat_penalty": ([1, 1.0], [1.1]),
    "cache_prompt": ([True, False], [1]),
    "grammar": (["", None], ["root ::= x"]),
    "think": ([False, None], [True, "high"]),
    "user": (["me", None], []),
    "metadata": ([{"run": "1"}, None], []),
    "store": ([False, None], [True]),
    "service_tier": (["auto", "default", None], ["flex", "priority"]),
    "safety_identifier": (["x"], []),
    "prompt_cache_key": (["x"], []),
    "seed": ([7, -1, None], [1.5, "7"]),
    "n": ([1, 2, None], [0, "1"]),
    "temperature": ([0, 1, 0.7, None], [-1, 3, "0"]),
    "top_p": ([1, 0.9, None], [0, 1.5]),
    "ignore_eos": ([True, False, None], ["yes", 1]),
    "min_tokens": ([0], [-1]),
    "no_such_field": ([], [1, "x", {}]),
}
CHAT_SAID: dict[str, tuple[list[Any], list[Any]]] = {
    "tools": ([[], None], [[{"type": "function", "function": {"name": "f"}}]]),
    "tool_choice": (["none", "auto", None], ["required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": ([True, False, None], ["yes"]),
    "functions": ([[], None], [[{"name": "f"}]]),
    "function_call": (["none", "auto", None], [{"name": "f"}]),
    "modalities": ([["text"], None], [["text", "audio"]]),
    "audio": ([None], [{"voice": "alloy", "format": "wav"}]),
    "prediction": ([None], [{"type": "content", "content": "x"}]),
    "reasoning_effort": (["none", None], ["high"]),
    "verbosity": (["medium", None], ["low", "high"]),
    "web_search_options": ([None], [{}]),
    "add_special_tokens": ([False], [True]),
    "echo": ([False], [True]),
    "top_logprobs": ([None], [21]),
}
COMPLETION_SAID: dict[str, tuple[list[Any], list[Any]]] = {
    "suffix": (["", None], ["end"]),
    "add_special_tokens": ([True], [False]),
}
MESSAGE_SAID: dict[str, tuple[list[Any], list[Any]]] = {
    "refusal": ([None, ""], ["no"]),
    "annotations": ([None, []], []),
    "audio": ([None], [{"id": "a"}]),
    "function_call": ([None], [{"name": "f", "arguments": "{}"}]),
    "tool_calls": ([None, []], [[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]]),
    "reasoning_content": ([None, "so"], [5]),
    "name": (["bob", None], [5]),
    "provider_specific_fields": ([{"refusal": None}], []),
    "content": (
        ["x", None, [], [{"type": "text", "text": "x"}]],
        [5, [{"type": "image_url", "image_url": {"url": "u"}}]],
    ),
    "mood": ([], ["good"]),
}


class Sent(NamedTuple):
    """A body to a path; ``wrong`` is the name of the one field that is to be refused, "" where all is to be taken."""

    path: str
    body: Body
    wrong: str


def recorded() -> list[Sent]:
    """What clients were seen to send, all of it to be taken."""
    rows = json.loads((BODIES / "clients.json").read_text(encoding="utf-8"))
    return [Sent(row["path"], row["body"], "") for row in rows]


def until_lists() -> list[Any]:
    """The stops of the tasks of lm-eval."""
    return json.loads((BODIES / "lm_eval_until.json").read_text(encoding="utf-8"))


def combined(count: int, seed: int) -> Iterator[Sent]:
    """``count`` bodies: a recorded one with up to eight fields more, one of them wrong in half of all."""
    draw, shapes = random.Random(seed), recorded()
    for _ in range(count):
        path, body, _ = draw.choice(shapes)
        body = deepcopy(body)
        known = SAID | (CHAT_SAID if path == CHAT_PATH else COMPLETION_SAID)
        for field in draw.sample(sorted(known), draw.randint(0, 8)):
            if known[field][0]:
                body[field] = draw.choice(known[field][0])
        if path != CHAT_PATH and draw.random() < 0.3:
            body["stop"] = draw.choice(until_lists())
        answers = [n for n, turn in enumerate(body.get("messages", ())) if turn["role"] == "assistant"]
        for number in answers:
            field = draw.choice([field for field in MESSAGE_SAID if MESSAGE_SAID[field][0]])
            body["messages"][number][field] = draw.choice(MESSAGE_SAID[field][0])
        wrong = ""
        if draw.random() < 0.5:
            wrong = _spoilt(draw, body, known, answers)
        yield Sent(path, body, wrong)


def _spoilt(draw: random.Random, body: Body, known: dict[str, tuple[list[Any], list[Any]]], answers: list[int]) -> str:
    """The name of a field that now asks for what is not served."""
    if answers and draw.random() < 0.5:
        number, field = draw.choice(answers), draw.choice([field for field in MESSAGE_SAID if MESSAGE_SAID[field][1]])
        body["messages"][number][field] = draw.choice(MESSAGE_SAID[field][1])
        return f"messages[{number}].{field}"
    field = draw.choice([field for field in known if known[field][1]])
    if field == "typical_p":
        body["temperature"] = 1  # of what is not drawn they change nothing
    if field == "best_of":
        body["n"] = 2
    body[field] = draw.choice(known[field][1])
    return field
