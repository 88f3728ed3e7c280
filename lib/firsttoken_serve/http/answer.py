"""The answers to one request: so many choices in the engine, whose pieces come as the engine says them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

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
    """Parse the ``body`` of a /tokenize, as vLLM has it; return the request and the ids of its text or conversation.
    Raises RequestError."""
    parsed = parse_request(TokenizeRequest, body)
    turns = [vars(message) for message in parsed.messages]
    if turns:
        return parsed, vocabulary.chat_ids(turns, parsed.chat_template_kwargs)
    return parsed, vocabulary.prompt_ids(parsed.prompt, parsed.add_special_tokens)


def detokenized(vocabulary: Vocabulary, body: bytes) -> tuple[DetokenizeRequest, str]:
    """Parse the ``body`` of a /detokenize, as vLLM has it; return the request and the text of its ids with that of
    special tokens. Raises RequestError."""
    parsed = parse_request(DetokenizeRequest, body)
    ids = vocabulary.known_ids("tokens", parsed.tokens)
    return parsed, vocabulary.tokenizer.decode(ids, skip_special_tokens=False)


class Answers:
    """The answers to ``served_request`` by ``server`` or a ``variant`` of its model, from ``begin`` to ``close``.

    What the engine says arrives in ``inbox``.
    """

    def __init__(
        self,
        server: ModelServer,
        vocabulary: Vocabulary,
        served_request: ServedRequest,
        inbox: Inbox,
        metrics: ModelMetrics,
        variant: str = "",
    ) -> None:
        self.request = served_request
        self._variant = variant
        self.prompt_tokens = 0
        self._server, self._vocabulary, self._inbox, self._metrics = server, vocabulary, inbox, metrics
        self._choices: list[AnswerChoice] = []
        self._closed = False
        self._last_token_s: dict[int, float] = {}  # when each choice's last token came
        self._arrived_s = time.monotonic()

    def begin(self) -> None:
        """Read the prompts and open a session for each answer; blocks for a moment, so not on the event loop.

        Raises RequestError and BusyError as the vocabulary and the server do; then none of them is open.
        """
        prompts = self._prompts()
        first = secrets.randbelow(_SEEDS) if self.request.seed is None else self.request.seed
        try:
            for number, (ids, echo) in enumerate(prompts):
                self.prompt_tokens += len(ids)
                for turn in range(self.request.n):
                    self._open(number * self.request.n + turn, ids, echo, first + turn)
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
                    if not (choice.prompt_only or item.draft):
                        self._observe_token(choice, item.at_s)
                    deltas += choice.push(item)
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
        request, top_count = self.request, self.request.top_count
        stop_ids = self._vocabulary.chat_stop_ids if isinstance(request, ChatRequest) else self._vocabulary.stop_ids
        stop_ids = (
            *(() if request.ignore_eos else stop_ids),
            *self._vocabulary.known_ids("stop_token_ids", request.stop_token_ids),
        )
        biased = self._vocabulary.known_ids("logit_bias", map(int, request.logit_bias))
        sampling = Sampling(
            self._most(len(ids)),
            request.temperature,
            request.top_p,
            stop=stop_ids,
            seed=(seed + _SEEDS) % (2 * _SEEDS) - _SEEDS,
            logprobs=top_count,
            prompt_logprobs=bool(echo) and top_count is not None,
            cache_salt=request.cache_salt,
            top_k=request.top_k,
            min_p=request.min_p,
            min_tokens=request.min_tokens,
            logit_bias=tuple(zip(biased, request.logit_bias.values(), strict=True)),
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            verify=self._rule,
            drafts=request.provisional is not False,
        )
        session = self._server.submit(
            ids, sampling, request.upgrade, events=self._inbox.slot(number), variant=self._variant
        )
        scoring = {
            "min_tokens": request.min_tokens,
            "echo": echo,
            "logprobs": top_count is not None,
            "prompt_only": request.most_new == 0,
            "provisional": bool(request.provisional),
        }
        self._choices.append(
            AnswerChoice(number, self._vocabulary, ids, session, stop_ids=stop_ids, stops=request.stop, **scoring)
        )
        if self._closed:
            session.cancel()

    @property
    def _rule(self) -> Literal["equal", "distribution"] | None:
        """The rule by which drafts stay: a seed promises one text, however much of it was drafted."""
        if self.request.provisional is None:
            return None
        return "distribution" if self.request.seed is None else "equal"

    def _prompts(self) -> list[tuple[list[int], str]]:
        """The ids of each prompt, and its text where it is to be said first."""
        request, vocabulary = self.request, self._vocabulary
        if isinstance(request, ChatRequest):
            return [(self._chat_ids(request), "")]
        assert isinstance(request, CompletionRequest)
        most = self._server.limits.max_sessions
        if len(request.prompt) * request.n > most:
            raise RequestError(
                f"prompt: {len(request.prompt)} with n={request.n} are more answers than the {most} served"
            )
        read = [vocabulary.prompt_ids(prompt) for prompt in request.prompt]
        if not request.echo:
            return [(ids, "") for ids in read]
        tokenizer = vocabulary.tokenizer
        texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in request.prompt]
        return list(zip(read, texts, strict=True))

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        """Raises RequestError for turns of a rare role that the model's template leaves out without a word."""
        turns, vocabulary = [vars(message) for message in request.messages], self._vocabulary
        text = vocabulary.chat_text(turns, request.chat_template_kwargs)
        first = {turn["role"]: number for number, turn in reversed(list(enumerate(turns)))}
        # its turns together: one by one they take the square of their number
        for role in sorted(first.keys() - _USUAL):
            if self._text_without(role, turns, request) == text:
                raise RequestError(
                    f"messages[{first[role]}].role: this model's chat template leaves out what {role!r} says; "
                    "say it as 'system' or 'user'"
                )
        return vocabulary.prompt_ids(text, special=False)

    def _text_without(self, role: str, turns: list[dict[str, Any]], request: ChatRequest) -> str | None:
        """Return the template's text of the turns of other roles; None where it refuses to."""
        others = [turn for turn in turns if turn["role"] != role]
        try:
            return self._vocabulary.chat_text(others, request.chat_template_kwargs)
        except RequestError:
            return None

    def _most(self, prompt_tokens: int) -> int:
        """Tokens to say at most: what was asked for, or as OpenAI has it, 16 of a completion and of a chat all there is
        room for. The engine says 1 at least."""
        request, limits = self.request, self._server.limits
        if request.most_new is not None:
            return max(1, request.most_new)
        room = min(limits.max_new_tokens, min(limits.longest, self._vocabulary.context) - prompt_tokens)
        return max(1, room if isinstance(request, ChatRequest) else min(max(16, request.min_tokens), room))

    def _observe_token(self, choice: AnswerChoice, at_s: float) -> None:
        before = self._last_token_s.get(choice.index)
        if before is None:
            self._metrics.first_token_s.observe(at_s - self._arrived_s)
            if (begun_s := choice.session.begun_s) is not None:
                self._metrics.queue_s.observe(begun_s - self._arrived_s)
        else:
            self._metrics.between_tokens_s.observe(at_s - before)
        self._last_token_s[choice.index] = at_s
        self._metrics.generated_tokens.inc()
