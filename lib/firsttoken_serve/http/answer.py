"""The answers to one request: so many choices in the engine, whose pieces come as the engine says them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from firsttoken.engine.model_server import ModelServer
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import RequestError
from firsttoken_serve.chat.text import Vocabulary
from firsttoken_serve.http.choice import AnswerChoice, TextDelta
from firsttoken_serve.http.prometheus_metrics import ModelMetrics
from firsttoken_serve.http.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ServedRequest,
    TokenizeRequest,
    parse_request,
)
from firsttoken_serve.http.token_queue import Inbox

_SEEDS = 2**63
_USUAL = {"system", "user", "assistant"}


def tokenized(vocabulary: Vocabulary, body: bytes) -> tuple[TokenizeRequest, list[int]]:
    """What the ``body`` of a /tokenize asks for, as vLLM has it, and the ids of its text or conversation. Raises
    RequestError."""
    asked = parse_request(TokenizeRequest, body)
    turns = [vars(message) for message in asked.messages]
    if turns:
        return asked, vocabulary.chat_ids(turns, asked.chat_template_kwargs)
    return asked, vocabulary.prompt_ids(asked.prompt, asked.add_special_tokens)


def detokenized(vocabulary: Vocabulary, body: bytes) -> tuple[DetokenizeRequest, str]:
    """What the ``body`` of a /detokenize asks for, as vLLM has it, and the text of its ids with that of special
    tokens. Raises RequestError."""
    asked = parse_request(DetokenizeRequest, body)
    ids = vocabulary.known_ids("tokens", asked.tokens)
    return asked, vocabulary.tokenizer.decode(ids, skip_special_tokens=False)


class Answers:
    """``asked`` before ``server``, or a ``variant`` of its model, from :meth:`begin` to :meth:`close`.

    What the engine says arrives in ``inbox``.
    """

    def __init__(
        self,
        server: ModelServer,
        vocabulary: Vocabulary,
        asked: ServedRequest,
        inbox: Inbox,
        metrics: ModelMetrics,
        variant: str = "",
    ) -> None:
        self.asked = asked
        self._variant = variant
        self.prompt_tokens = 0
        self._server, self._vocabulary, self._inbox, self._metrics = server, vocabulary, inbox, metrics
        self._choices: list[AnswerChoice] = []
        self._closed = False
        self._heard_s: dict[int, float] = {}  # when each choice's last token came
        self._arrived_s = time.monotonic()

    def begin(self) -> None:
        """Read the prompts and open a session for each answer; blocks for a moment, so not on the event loop.

        Raises RequestError and BusyError as the vocabulary and the server do; then none of them is open.
        """
        prompts = self._prompts()
        first = secrets.randbelow(_SEEDS) if self.asked.seed is None else self.asked.seed
        try:
            for number, (ids, echo) in enumerate(prompts):
                self.prompt_tokens += len(ids)
                for turn in range(self.asked.n):
                    self._open(number * self.asked.n + turn, ids, echo, first + turn)
        except BaseException:
            self.close()
            raise
        self._metrics.prompt_tokens.inc(self.prompt_tokens)

    async def batches(self) -> AsyncIterator[list[TextDelta]]:
        """The pieces of all choices, those together that came together, until the last choice has ended.

        Raises what ended one of them in the engine, and ClientGone.
        """
        open_ones = len(self._choices)
        while open_ones:
            deltas: list[TextDelta] = []
            for number, item in await self._inbox.get():
                choice = self._choices[number]
                if choice.finished:
                    continue
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    deltas += choice.end()
                else:
                    if not choice.scored:
                        self._hear(choice, item.at_s)
                    deltas += choice.take(item)
                if choice.finished:
                    open_ones -= 1
                    choice.session.cancel()
            if not open_ones:
                self._metrics.request_s.observe(time.monotonic() - self._arrived_s)
            if deltas:
                yield deltas

    @property
    def completion_tokens(self) -> int:
        """The number of tokens that all choices have so far."""
        return sum(choice.tokens for choice in self._choices)

    def close(self) -> None:
        """End what is open in the engine, and what ``begin`` still opens in its own thread."""
        self._closed = True
        for choice in self._choices:
            choice.session.cancel()

    def _open(self, number: int, ids: Sequence[int], echo: str, seed: int) -> None:
        asked, top_count = self.asked, self.asked.top_count
        ends = self._vocabulary.chat_stop_ids if isinstance(asked, ChatRequest) else self._vocabulary.stop_ids
        ends = (
            *(() if asked.ignore_eos else ends),
            *self._vocabulary.known_ids("stop_token_ids", asked.stop_token_ids),
        )
        biased = self._vocabulary.known_ids("logit_bias", map(int, asked.logit_bias))
        sampling = Sampling(
            self._most(len(ids)),
            asked.temperature,
            asked.top_p,
            stop=ends,
            seed=(seed + _SEEDS) % (2 * _SEEDS) - _SEEDS,
            logprobs=top_count,
            prompt_logprobs=bool(echo) and top_count is not None,
            cache_salt=asked.cache_salt,
            top_k=asked.top_k,
            min_p=asked.min_p,
            min_tokens=asked.min_tokens,
            logit_bias=tuple(zip(biased, asked.logit_bias.values(), strict=True)),
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
        )
        session = self._server.submit(
            ids, sampling, asked.upgrade, events=self._inbox.slot(number), variant=self._variant
        )
        told = {"least": asked.min_tokens, "echo": echo, "judged": top_count is not None, "scored": asked.most_new == 0}
        self._choices.append(AnswerChoice(number, self._vocabulary, ids, session, ends=ends, stops=asked.stop, **told))
        if self._closed:
            session.cancel()

    def _prompts(self) -> list[tuple[list[int], str]]:
        """The ids of each prompt, and its text where it is to be said first."""
        asked, vocabulary = self.asked, self._vocabulary
        if isinstance(asked, ChatRequest):
            return [(self._chat_ids(asked), "")]
        assert isinstance(asked, CompletionRequest)
        most = self._server.limits.max_sessions
        if len(asked.prompt) * asked.n > most:
            raise RequestError(f"prompt: {len(asked.prompt)} with n={asked.n} are more answers than the {most} served")
        read = [vocabulary.prompt_ids(prompt) for prompt in asked.prompt]
        if not asked.echo:
            return [(ids, "") for ids in read]
        tokenizer = vocabulary.tokenizer
        texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in asked.prompt]
        return list(zip(read, texts, strict=True))

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        """Raises RequestError for turns of a rare role that the model's template leaves out without a word."""
        turns, vocabulary = [vars(message) for message in asked.messages], self._vocabulary
        text = vocabulary.chat_text(turns, asked.chat_template_kwargs)
        first = {turn["role"]: number for number, turn in reversed(list(enumerate(turns)))}
        for role in sorted(
            first.keys() - _USUAL
        ):  # its turns together: one by one they take the square of their number
            if self._text_without(role, turns, asked) == text:
                raise RequestError(
                    f"messages[{first[role]}].role: this model's chat template leaves out what {role!r} says; "
                    "say it as 'system' or 'user'"
                )
        return vocabulary.prompt_ids(text, special=False)

    def _text_without(self, role: str, turns: list[dict[str, Any]], asked: ChatRequest) -> str | None:
        """What the template makes of the turns of others; None where it refuses to."""
        others = [turn for turn in turns if turn["role"] != role]
        try:
            return self._vocabulary.chat_text(others, asked.chat_template_kwargs)
        except RequestError:
            return None

    def _most(self, prompt_tokens: int) -> int:
        """Tokens to say at most: what was asked for, or as OpenAI has it, 16 of a completion and of a chat all there is
        room for. The engine says 1 at least."""
        asked, limits = self.asked, self._server.limits
        if asked.most_new is not None:
            return max(1, asked.most_new)
        room = min(limits.max_new_tokens, min(limits.longest, self._vocabulary.context) - prompt_tokens)
        return max(1, room if isinstance(asked, ChatRequest) else min(max(16, asked.min_tokens), room))

    def _hear(self, choice: AnswerChoice, at_s: float) -> None:
        before = self._heard_s.get(choice.index)
        if before is None:
            self._metrics.first_token_s.observe(at_s - self._arrived_s)
            if (begun_s := choice.session.begun_s) is not None:
                self._metrics.queue_s.observe(begun_s - self._arrived_s)
        else:
            self._metrics.between_tokens_s.observe(at_s - before)
        self._heard_s[choice.index] = at_s
        self._metrics.generated_tokens.inc()
