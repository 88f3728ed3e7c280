"""What OpenAI's /v1/completions and /v1/chat/completions ask for, as far as this engine answers it.

An addition of ours: ``upgrade`` lets an answer move to a better stage when one arrives. What would change the answer
and is not served is refused, never ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from firsttoken.study.errors import RequestError
from firsttoken.study.foreign.json_text import parse_json

MOST_LIKELIEST = 20  # of a token, as with OpenAI's chat
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}  # of the account
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # what these may say: what we do anyway
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}

StopText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Ids = list[int]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the numbers of tokens."""

    include_usage: bool = False


class ServedRequest(_Strict):
    """What both kinds of request share. ``model`` is the served one's name or left out.

    ``temperature`` 0 is greedy, and 1 the default, as with OpenAI; without a ``seed`` each answer draws one of its own.
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1)
    stop: list[StopText] = Field(default=[], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    upgrade: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class CompletionRequest(ServedRequest):
    """Completions of one or several prompts, each a text or token ids; ``echo`` says the prompt first.

    ``logprobs`` is how many of the likeliest tokens are named with each.
    """

    prompt: list[str] | list[Ids]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) or _are_ids(value) else value
        texts = isinstance(prompts, list) and all(isinstance(one, str) for one in prompts)
        if not (texts or (isinstance(prompts, list) and all(map(_are_ids, prompts)))):
            raise ValueError("expected a text, a list of token ids, or a list of texts or of such lists")
        if not prompts:
            raise ValueError("it is empty; give at least one")
        return prompts

    @property
    def likeliest(self) -> int | None:
        """How many tokens to name with each; None: no logarithms at all."""
        return self.logprobs


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn of a conversation; several parts of text are read as one."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return "".join(TextPart.model_validate(part).text for part in value) if isinstance(value, list) else value


class ChatRequest(ServedRequest):
    """The next turn of a conversation. ``max_completion_tokens`` is the newer name of ``max_tokens``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)

    @property
    def likeliest(self) -> int | None:
        """As of a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None


Kind = TypeVar("Kind", bound=ServedRequest)


def parse_request(kind: type[Kind], body: bytes) -> Kind:
    """The request in a JSON body; a null means the same as leaving the field out, as with OpenAI.

    Raises RequestError for what is no JSON object, for an unknown field, a value of the wrong type or out of range,
    and for a setting that is not served.
    """
    try:
        content = parse_json(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError('the body is no JSON object; send at least {"prompt": "..."} or {"messages": [...]}')
    content = {key: value for key, value in content.items() if value is not None and key not in _IGNORED}
    for key, served in _NEUTRAL.items():
        if key in content and content.pop(key) not in served:
            raise RequestError(f"{key}: only {json.dumps(served[0])} is served; leave it out")
    try:
        asked = kind.model_validate(content)
    except ValidationError as error:
        raise RequestError(_one_line(error, kind)) from error
    if asked.stream_options.include_usage and not asked.stream:
        raise RequestError("stream_options: it is for streams; set stream to true, or leave it out")
    return asked


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _one_line(error: ValidationError, kind: type[ServedRequest]) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and "[" in step))
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field; known: {', '.join(kind.model_fields)}"
    if first["type"] == "missing":
        return f"{where}: missing, and required"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"
