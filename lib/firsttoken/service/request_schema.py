"""What OpenAI's /v1/completions and /v1/chat/completions ask for, as far as this engine answers it.

An addition of ours: ``upgrade`` lets an answer move to a better stage when one arrives. What would change the answer
and is not served is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from firsttoken.service.neutral import (
    CHAT,
    COMPLETION,
    MESSAGE,
    OF_AN_ANSWER,
    OF_THE_CLIENT,
    Table,
    request_table,
    take_neutral,
    without_nulls,
)
from firsttoken.study.errors import RequestError
from firsttoken.study.parsing.json_text import parse_json

# The turns of a conversation as a request has them, which are also those that an answer had.

_TEXT = ("text", "input_text", "output_text")  # how the chat's interface, and that of responses, call a part of text


class Strict(BaseModel):
    """An object of a body: a field that it does not know, or of another type, is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ChatMessage(Strict):
    """One turn of a conversation, as the model's template is handed it.

    Several parts of text are read as one. A turn of the assistant may have no text. Whether the template can show a
    role, only the template knows.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def as_message(turn: Any, where: str) -> Any:
    """The fields of a turn that is named ``where``, less what only describes an answer, with its parts as one text.

    Raises RequestError for what would change the prompt and is not served, and for a part that is no text.
    """
    if not isinstance(turn, dict):
        return turn
    message = dict(turn)
    take_neutral(message, MESSAGE, OF_AN_ANSWER, f"{where}.")
    if message.get("role") == "assistant":
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        parts = enumerate(message["content"])
        message["content"] = "".join(_text(part, f"{where}.content.{number}") for number, part in parts)
    return message


def _text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where}: a part is an object with its type and its text")
    if part.get("type") not in _TEXT:
        raise RequestError(f"{where}.type: {str(part.get('type'))[:40]!r} is not served; send 'text'")
    unknown = [field for field in part if field not in ("type", "text", *OF_AN_ANSWER)]
    if unknown:
        raise RequestError(f"{where}.{unknown[0][:40]}: unknown field; known: type, text")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text: a part of text has one")
    return part["text"]


MOST_TOP_LOGPROBS = 20  # of a token, as with OpenAI's chat
MOST_STOPS, MOST_STOP_CHARS = 64, 4096  # ours; lm-eval's tasks send up to seven, templates of agents a dozen

StopText = Annotated[str, StringConstraints(min_length=1)]
Ids = list[int]


class StreamOptions(Strict):
    """``include_usage``: a last chunk with the numbers of tokens; ``continuous_usage_stats``: those so far in each.

    With ``include_obfuscation`` OpenAI fills chunks up to one length, which is not done here.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def _plain(cls, value: bool) -> bool:
        if value:
            raise ValueError("only false is served; leave it out")
        return value


class ServedRequest(Strict):
    """What both kinds of request share. ``model`` is the served one's name or left out.

    ``temperature`` 0 is greedy, and 1 the default, as with OpenAI; without a ``seed`` each answer draws one of its own.
    With ``ignore_eos`` no token ends an answer; ``min_tokens`` are served where nothing can end it before.
    """

    neutral: ClassVar[Table]

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1)
    stop: list[StopText] = Field(default=[], max_length=MOST_STOPS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    upgrade: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _bounded(cls, value: list[str]) -> list[str]:
        if (chars := sum(map(len, value))) > MOST_STOP_CHARS:
            raise ValueError(f"its texts have {chars} characters, and the limit is {MOST_STOP_CHARS}")
        return value

    @property
    def most_new(self) -> int | None:
        """Tokens to say at most; None where nobody asked."""
        return self.max_tokens

    @property
    def top_count(self) -> int | None:
        """How many of the likeliest tokens to name with each; None: no logarithms at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises RequestError for fields of which one does not go with another."""
        if self.stream_options.include_usage and not self.stream:
            raise RequestError("stream_options: it is for streams; set stream to true, or leave it out")
        if self.min_tokens and (self.stop or not self.ignore_eos):
            raise RequestError("min_tokens: it is served with ignore_eos and without stop only; leave it out")
        if self.min_tokens > (self.most_new or 0):
            raise RequestError(f"min_tokens: {self.min_tokens} are more than the most that is asked for; ask for more")


class CompletionRequest(ServedRequest):
    """Completions of one or several prompts, each a text or token ids; ``echo`` says the prompt first.

    ``logprobs`` is how many of the likeliest tokens are named with each. With ``max_tokens`` 0 the prompt is echoed and
    nothing is said, which is how prompts are scored.
    """

    neutral = COMPLETION

    prompt: list[str] | list[Ids]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
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

    @field_validator("logprobs", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def top_count(self) -> int | None:
        """The number of likeliest tokens to name with each: the request's ``logprobs``; None: no logarithms at all."""
        return self.logprobs

    def check(self) -> None:
        """Raises RequestError for fields of which one does not go with another, such as max_tokens 0 without echo."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 scores a prompt, which is echoed; set echo to true, or ask for 1")


class ChatRequest(ServedRequest):
    """The next turn of a conversation. ``max_completion_tokens`` is the newer name of ``max_tokens``;
    ``chat_template_kwargs`` are variables that the model's template knows, such as enable_thinking."""

    neutral = CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default={}, max_length=32)

    @field_validator("messages", mode="before")
    @classmethod
    def _turns(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [as_message(turn, f"messages.{number}") for number, turn in enumerate(value)]

    @property
    def most_new(self) -> int | None:
        """The number of tokens to say at most: ``max_completion_tokens``, the newer name, or else ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_count(self) -> int | None:
        """The number of likeliest tokens to name with each; None: no logarithms at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises RequestError for fields of which one does not go with another; top_logprobs needs logprobs."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: it goes with logprobs; set logprobs to true, or leave it out")


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
    content = without_nulls(content)
    take_neutral(content, request_table(content, kind.neutral), OF_THE_CLIENT)
    try:
        asked = kind.model_validate(content)
    except ValidationError as error:
        raise RequestError(_one_line(error, kind)) from error
    asked.check()
    return asked


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _one_line(error: ValidationError, kind: type[ServedRequest]) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and "[" in step))
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field; known: {', '.join(_object_at(kind, first['loc'][:-1]).model_fields)}"
    if first["type"] == "missing":
        return f"{where}: missing, and required"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def _object_at(kind: type[BaseModel], steps: tuple[int | str, ...]) -> type[BaseModel]:
    """The kind of the object to which ``steps`` lead from a ``kind``."""
    for step in steps:
        if isinstance(step, str) and step in kind.model_fields:
            inner = kind.model_fields[step].annotation
            kind = next(
                one for one in (*get_args(inner), inner) if isinstance(one, type) and issubclass(one, BaseModel)
            )
    return kind
