"""What OpenAI's /v1/completions and /v1/chat/completions ask for, as far as this engine answers it.

Additions of ours: ``upgrade`` lets an answer move to a better stage when one arrives, and with ``provisional`` it holds
the whole model's tokens only. What would change the answer and is not served is refused, never ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from firsttoken.study.errors import RequestError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken.study.parsing.schema import Fault, at_least, between, fits, non_empty, parse_as
from firsttoken_serve.http.neutral import (
    CHAT,
    COMPLETION,
    MESSAGE,
    OF_AN_ANSWER,
    OF_THE_CLIENT,
    Table,
    drop_neutral,
    request_table,
    without_nulls,
)

# The turns of a conversation as a request has them, which are also those that an answer had.

_TEXT = ("text", "input_text", "output_text")  # how the chat's interface, and that of responses, call a part of text


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation, as the model's template is handed it.

    Its content may be several parts of text, of which a template that reads texts gets one. A turn of the assistant
    may have no text. Whether the template can show a role, only the template knows.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, str]]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def as_message(turn: Any, path: str) -> Any:
    """The fields of a turn that is named ``path``, less what only describes an answer, each part as a text.

    Raises RequestError for what would change the prompt and is not served, and for a part that is no text.
    """
    if not isinstance(turn, dict):
        return turn
    message = dict(turn)
    drop_neutral(message, MESSAGE, OF_AN_ANSWER, f"{path}.")
    if message.get("role") == "assistant":
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        parts = enumerate(message["content"])
        texts = [_text(part, f"{path}.content[{number}]") for number, part in parts]
        several = [{"type": "text", "text": text} for text in texts]
        message["content"] = several if len(texts) > 1 else "".join(texts)
    return message


def _text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{path}: a part is an object with its type and its text")
    if part.get("type") not in _TEXT:
        raise RequestError(f"{path}.type: {str(part.get('type'))[:40]!r} is not served; send 'text'")
    unknown = [field for field in part if field not in ("type", "text", *OF_AN_ANSWER)]
    if unknown:
        raise RequestError(f"{path}.{unknown[0][:40]}: unknown key; known: type, text")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{path}.text: a part of text has one")
    return part["text"]


MOST_TOP_LOGPROBS = 20  # of a token, as with OpenAI's chat
MOST_SALT_CHARS = 1024  # ours; vLLM has no limit
MOST_BIASES = 1024  # ours; OpenAI has 300
MOST_STOPS, MOST_STOP_CHARS = 64, 4096  # ours; lm-eval's tasks send up to seven, templates of agents a dozen

Ids = list[int]
_ID = re.compile(r"[0-9]{1,9}")
_KEY = re.compile(r"^(?:(\S+): )?(unknown|missing) key '([^']+)'")


def _at_most(count: int) -> Fault:
    return fits(lambda value: len(value) <= count, f"expected {count:,} at most")


_TOGETHER = f"expected texts of at most {MOST_STOP_CHARS:,} characters together"
_no_longer_together = fits(lambda texts: sum(map(len, texts)) <= MOST_STOP_CHARS, _TOGETHER)
_above_zero_to_1 = fits(lambda value: 0 < value <= 1, "expected more than 0 and at most 1")
_false = fits(lambda value: not value, "only false is served")
_a_text = fits(bool, "expected a text")
_by_ids = fits(lambda value: all(map(_ID.fullmatch, value)), "expected token ids as keys")


@dataclass(frozen=True)
class StreamOptions:
    """``include_usage``: a last chunk with the numbers of tokens; ``continuous_usage_stats``: those so far in each.

    With ``include_obfuscation`` OpenAI fills chunks up to one length, which is not done here.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, _false] = False


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """The fields that both kinds of request share. ``model`` is the served one's name or left out.

    ``temperature`` 0 is greedy, and 1 the default, as with OpenAI; without a ``seed`` each answer draws one of its own.
    With ``ignore_eos`` no token ends an answer but those of ``stop_token_ids``, and before it has ``min_tokens`` none
    does, and no text. Prompts share what was computed of equal beginnings with those of the same ``cache_salt`` only.
    With ``provisional``, whatever its value, an answer is the whole model's; what a stage says is a draft of it, which
    is sent where ``provisional`` is true and made at all only where the prompt cannot follow the layers that arrive.
    """

    neutral: ClassVar[Table]

    model: str | None = None
    max_tokens: Annotated[int, at_least(1)] | None = None
    n: Annotated[int, at_least(1)] = 1
    stop: Annotated[list[Annotated[str, _a_text]], _at_most(MOST_STOPS), _no_longer_together] = field(
        default_factory=list
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    temperature: Annotated[float, between(0, 2)] = 1.0
    top_p: Annotated[float, _above_zero_to_1] = 1.0
    top_k: Annotated[int, at_least(-1)] = 0
    min_p: Annotated[float, between(0, 1)] = 0.0
    presence_penalty: Annotated[float, between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, between(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, between(0.01, 100)] = 1.0
    logit_bias: Annotated[dict[str, Annotated[float, between(-100, 100)]], _at_most(MOST_BIASES), _by_ids] = field(
        default_factory=dict
    )
    stop_token_ids: Annotated[list[int], _at_most(MOST_STOPS)] = field(default_factory=list)
    upgrade: bool = False
    provisional: bool | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, at_least(0)] = 0
    cache_salt: Annotated[str, _a_text, _at_most(MOST_SALT_CHARS)] = ""

    @classmethod
    def prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body where one that may be written in several ways is written in one.

        Raises RequestError for what is written in none of them.
        """
        stop = content.get("stop")
        none = {"top_k": 0} if content.get("top_k") == -1 else {}
        return content | none | ({"stop": [stop]} if isinstance(stop, str) else {})

    @property
    def most_new(self) -> int | None:
        """Tokens to say at most; None where nobody asked."""
        return self.max_tokens

    @property
    def top_count(self) -> int | None:
        """Return the number of likeliest tokens to name with each; None: no logarithms at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises RequestError for fields of which one does not go with another."""
        if self.stream_options.include_usage and not self.stream:
            raise RequestError("stream_options: it is for streams; set stream to true, or leave it out")
        if self.provisional and not self.stream:
            raise RequestError("provisional: drafts are for streams; set stream to true, or provisional to false")
        if self.most_new is not None and self.min_tokens > self.most_new:
            raise RequestError(f"min_tokens: {self.min_tokens} are more than the most that is asked for; ask for more")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ServedRequest):
    """Completions of one or several prompts, each a text or token ids; ``echo`` says the prompt first.

    ``logprobs`` is how many of the likeliest tokens are named with each. With ``max_tokens`` 0 the prompt is echoed and
    nothing is said, which is how prompts are scored.
    """

    neutral = COMPLETION

    prompt: list[str] | list[Ids]
    max_tokens: Annotated[int, at_least(0)] | None = None
    logprobs: Annotated[int, between(0, MOST_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @classmethod
    def prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body with a list of prompts; logprobs that are false are none. Raises RequestError where
        there is no such list."""
        content = super().prepared(content)
        if content.get("logprobs") is False:
            del content["logprobs"]
        if "prompt" not in content:
            return content
        value = content["prompt"]
        prompts = [value] if isinstance(value, str) or _are_ids(value) else value
        texts = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
        if not (texts or (isinstance(prompts, list) and all(map(_are_ids, prompts)))):
            raise RequestError("prompt: expected a text, a list of token ids, or a list of texts or of such lists")
        if not prompts:
            raise RequestError("prompt: it is empty; give at least one")
        return content | {"prompt": prompts}

    @property
    def top_count(self) -> int | None:
        """The number of likeliest tokens to name with each: the request's ``logprobs``; None: no logarithms at all."""
        return self.logprobs

    def check(self) -> None:
        """Raises RequestError for fields of which one does not go with another, such as max_tokens 0 without echo."""
        super().check()
        if self.provisional and self.echo:
            raise RequestError("provisional: no drafts stand behind an echo; leave echo out, or set it to false")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 scores a prompt, which is echoed; set echo to true, or ask for 1")


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ServedRequest):
    """The next turn of a conversation. ``max_completion_tokens`` is the newer name of ``max_tokens``;
    ``chat_template_kwargs`` are variables that the model's template knows, such as enable_thinking."""

    neutral = CHAT

    messages: Annotated[list[ChatMessage], non_empty, _at_most(1000)]
    max_completion_tokens: Annotated[int, at_least(1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, MOST_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], _at_most(32)] = field(default_factory=dict)

    @classmethod
    def prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body with each turn as :func:`as_message` makes it, which raises RequestError."""
        content, turns = super().prepared(content), content.get("messages")
        if isinstance(turns, list):
            content["messages"] = [as_message(turn, f"messages[{number}]") for number, turn in enumerate(turns)]
        return content

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


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest(ChatRequest):
    """A text or a conversation whose tokens are asked for, as vLLM has it."""

    neutral: ClassVar[Table] = {"return_token_strs": (False,)}

    prompt: str = ""
    messages: Annotated[list[ChatMessage], _at_most(1000)] = field(default_factory=list)
    add_special_tokens: bool = True


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest(ServedRequest):
    """Token ids whose text is asked for, as vLLM has it."""

    neutral: ClassVar[Table] = {}

    tokens: Ids


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
    drop_neutral(content, request_table(content, kind.neutral), OF_THE_CLIENT)
    try:
        parsed = parse_as(kind, kind.prepared(content))
    except ParseError as error:
        raise RequestError(_KEY.sub(_named_first, str(error))) from error
    parsed.check()
    return parsed


def _named_first(match: re.Match[str]) -> str:
    """Begin a message with the field's name, which clients read from there."""
    path, fault, name = match.groups()
    return f"{path}.{name}: {fault} key" if path else f"{name}: {fault} key"


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
