"""The bodies that OpenAI's clients read: answers, chunks of answers, numbers of tokens, likelihoods.

Additions of ours: ``stage`` is the one that computed the last of the tokens in hand, and a choice of a stream may have
``provisional`` text, or the number of characters to retract from the end of it before the choice's own text.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from firsttoken_serve.http.logprobs_format import AnswerToken, as_chat, as_completion

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The form of one request's answers; ``identity`` and ``created`` (s since the epoch) are those of all chunks."""

    model: str
    identity: str
    created: int

    whole: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]

    @classmethod
    def new(cls, model: str) -> Reply:
        """Make the reply to a request that has just come, with a new identity and the current time."""
        return cls(model, f"{cls.prefix}-{uuid.uuid4().hex}", int(time.time()))

    def body(self, kind: str, choices: Sequence[Json], stage: int) -> Json:
        """``choices`` with what stands around them."""
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            "stage": stage,
        }

    def answer(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None) -> Json:
        """Return one whole choice; ``logprobs`` is None where nobody asked for likelihoods."""
        raise NotImplementedError

    def delta(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None) -> Json:
        """Return a part of a choice."""
        raise NotImplementedError

    def role_delta(self, index: int) -> Json | None:
        """Return the chunk before the first part of a choice, None where there is none."""
        return None


class Completion(Reply):
    """The bodies of /v1/completions: a chunk looks like the whole answer."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def answer(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None) -> Json:
        logs = None if logprobs is None else as_completion(logprobs)
        return {"index": index, "text": text, "logprobs": logs, "finish_reason": finish_reason}

    delta = answer


class Chat(Reply):
    """The bodies of /v1/chat/completions, whose first chunk names the role."""

    whole, chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def answer(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, {"message": message}, finish_reason, logprobs)

    def delta(self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None) -> Json:
        return self._choice(index, {"delta": {"content": text} if text else {}}, finish_reason, logprobs)

    def role_delta(self, index: int) -> Json:
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def _choice(
        self, index: int, content: Json, finish_reason: str | None, logprobs: Sequence[AnswerToken] | None
    ) -> Json:
        logs = None if logprobs is None else as_chat(logprobs)
        return {"index": index} | content | {"logprobs": logs, "finish_reason": finish_reason}


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Numbers of tokens; those that ended answers are counted."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(content: Json) -> bytes:
    """One server-sent event. Raises ValueError for a number that JSON does not have, as a whole answer's body does."""
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
