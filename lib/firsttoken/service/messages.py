"""The turns of a conversation as a request has them, which are also those that an answer had."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from firsttoken.service.neutral import MESSAGE, OF_AN_ANSWER, take_neutral
from firsttoken.study.errors import RequestError

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


def as_said(turn: Any, where: str) -> Any:
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
