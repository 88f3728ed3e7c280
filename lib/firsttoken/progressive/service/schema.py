"""OpenAI's /v1/completions, the part that a greedy engine answers, with two additions of ours.

In the request ``upgrade`` lets an answer move to a better stage when one arrives; in the response ``stage`` is the one
that computed the last of the tokens in hand. What would change the answer and is not served is refused, never ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from firsttoken.study.errors import RequestError

Json = dict[str, Any]

_IGNORED = {"user", "seed", "top_p"}  # greedy decoding draws nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # what these may say: what we do anyway
    "temperature": (0,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
_WHY = {"temperature": " (greedy decoding)"}

StopText = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the numbers of tokens."""

    include_usage: bool = False


class CompletionRequest(_Strict):
    """One greedy completion. ``prompt`` is a text or token ids, ``model`` the served one's name or left out."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    stop: list[StopText] = Field(default=[], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    upgrade: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        ids = isinstance(value, list) and all(type(item) is int for item in value)
        if not ids and not isinstance(value, str):
            raise ValueError("expected a text or a list of token ids, one prompt a request")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def parse_request(body: bytes) -> CompletionRequest:
    """The request in a JSON body; a null means the same as leaving the field out, as with OpenAI.

    Raises RequestError for what is no JSON object, for an unknown field, a value of the wrong type or out of range,
    and for a setting that is not served.
    """
    try:
        content = json.loads(body)
        json.dumps(content, ensure_ascii=False).encode()  # "\\ud800" is JSON, and no text that could be answered
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError('the body is no JSON object; send at least {"prompt": "..."}')
    content = {key: value for key, value in content.items() if value is not None and key not in _IGNORED}
    for key, served in _NEUTRAL.items():
        if key in content and content.pop(key) not in served:
            only = f"only {json.dumps(served[0])} is served{_WHY.get(key, '')}" if served else "this is not served"
            raise RequestError(f"{key}: {only}; leave it out")
    try:
        return CompletionRequest.model_validate(content)
    except ValidationError as error:
        raise RequestError(_one_line(error)) from error


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field; known: {', '.join(CompletionRequest.model_fields)}"
    if first["type"] == "missing":
        return f"{where}: missing, and required"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def completion(
    identity: str, created: int, model: str, text: str, stage: int, finish_reason: str | None = None
) -> Json:
    """A response without usage, or one chunk of a stream; ``created`` in s since the epoch."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": identity,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "stage": stage,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Numbers of tokens; the one that ended the answer is counted."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def models(model: str, created: int) -> Json:
    """The list of the one model that is served."""
    return {
        "object": "list",
        "data": [{"id": model, "object": "model", "created": created, "owned_by": "firsttoken"}],
    }
