"""A conversation as the prompt that a model was trained on: its own template, as transformers renders it.

An answer ends at the tokens that the model's own files name, and in a chat at those of its tokenizer and template too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.tokenizer_files import DEFAULT, MEND, TokenizerFiles, read_tokenizer_files
from firsttoken.study.errors import FirstTokenError, ModelError, RequestError, first_line
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.parsing.schema import Fault, between, parse_as
from firsttoken_serve.chat.template_renderer import RENDERER, TemplateLimit, TemplateRefusal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION, _KEY = "generation_config.json", "eos_token_id"
_ANSWER = "An answer to find again."
_QUESTION = {"role": "user", "content": "A question."}


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja ``templates`` of a model by name, of which "default" is used, and the special tokens that it may name.

    ``fault`` says why no conversation can be rendered, and is empty where one can.
    """

    templates: Mapping[str, str]
    special: Mapping[str, str]

    def prompt(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Render the text that the model reads before it says the next turn; the template is told ``variables``, too.
        The content of a turn is a text, or a list of parts of text; the template gets the form that it reads.

        Raises RequestError where there is no template that can be used, and for a conversation that it refuses.
        """
        if self.fault:
            raise RequestError(f"messages: {self.fault}; ask /v1/completions")
        return self._rendered(self._as_read(messages), variables or {}, add_generation_prompt=True)

    @property
    def chats(self) -> bool:
        """Return whether there is a template for conversations; it may still not be usable."""
        return bool(self.templates.get(DEFAULT))

    @cached_property
    def fault(self) -> str:
        """Return why there are no chats; "" where there are."""
        if not any(self.templates.values()):
            return "this model has no chat template"
        if DEFAULT not in self.templates:
            return f"of this model's chat templates ({', '.join(sorted(self.templates))}) none is called {DEFAULT!r}"
        try:
            RENDERER.render(self.templates[DEFAULT], None)
            with suppress(TemplateRefusal):
                RENDERER.render(self.templates[DEFAULT], self._names([_QUESTION], {}, add_generation_prompt=True))
        except TemplateRefusal as error:
            return f"the model's chat template is none: {error}"
        except TemplateLimit as error:
            return f"the model's chat template {error}"
        return ""

    def turn_end(self) -> str:
        """The text that the template writes behind an answer, up to the end or to the next blank; "" where it cannot
        be told."""
        if self.fault:
            return ""
        turns = self._as_read([_QUESTION, {"role": "assistant", "content": _ANSWER}])
        try:
            text = self._rendered(turns, {}, add_generation_prompt=False)
        except RequestError:
            return ""
        return text.rpartition(_ANSWER)[2].strip()

    def trial(self) -> str:
        """Return the fault of a conversation of one short question; "" where it renders."""
        try:
            self.prompt([_QUESTION])
        except FirstTokenError as error:
            return first_line(error).removeprefix("messages: ").removesuffix("; ask /v1/completions")
        return ""

    def _as_read(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The turns without what is None, their content as the template reads that of their role."""
        turns = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
        for turn in turns:
            content = turn.get("content")
            if isinstance(content, str) and self._reads_parts(turn["role"]):
                turn["content"] = [{"type": "text", "text": content}]
            elif isinstance(content, list) and not self._reads_parts(turn["role"]):
                turn["content"] = "".join(part["text"] for part in content)
        return turns

    def _reads_parts(self, role: str) -> bool:
        """Return whether the template walks over parts where a turn of ``role`` has a text, of which it would say
        nothing."""
        if role not in self._parts:
            question = [] if role == "user" else self._as_read([_QUESTION])
            before, behind = ([], question) if role in ("system", "developer") else (question, [])
            for form in (_ANSWER, [{"type": "text", "text": _ANSWER}]):
                with suppress(RequestError):
                    turns = [*before, {"role": role, "content": form}, *behind]
                    if _ANSWER in self._rendered(turns, {}, add_generation_prompt=True):
                        self._parts[role] = form is not _ANSWER
                        break
            else:  # it refuses such turns, or leaves them out
                self._parts[role] = self._parts.get("user", False)
        return self._parts[role]

    @cached_property
    def _parts(self) -> dict[str, bool]:
        return {}

    def _rendered(
        self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        names = self._names(turns, variables, add_generation_prompt=add_generation_prompt)
        try:
            return RENDERER.render(self.templates[DEFAULT], names)
        except TemplateRefusal as error:
            raise RequestError(f"messages: the model's chat template says {error}") from error
        except TemplateLimit as error:
            raise RequestError(f"messages: the model's chat template {error}; ask /v1/completions") from error

    def _names(
        self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> dict[str, Any]:
        given = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return {**variables, **self.special, **given}


def read_template(folder: Path, files: TokenizerFiles | None = None) -> ChatTemplate:
    """The template of a model folder, whose tokenizer's ``files`` may have been read already.

    Raises ModelError for a file that is damaged.
    """
    files = files or read_tokenizer_files(folder)
    return ChatTemplate(files.templates, files.special)


def model_ends(folder: Path) -> tuple[int, ...]:
    """The ids that generation_config.json names, or config.json where that says nothing of them.

    Raises ModelError for a file that is damaged, and for an id that is no token of the model.
    """
    size = read_config(folder).vocab_size
    for path in (folder / GENERATION, folder / CONFIG):
        if not path.is_file():
            continue
        with errors_as(path, ModelError, MEND):
            content = parse_as(dict[str, Any], read_json(path, 1 << 24))
            if _KEY in content:
                return _turn_ends(content[_KEY], between(0, size - 1))
    return ()


def _turn_ends(value: Any, inside: Fault) -> tuple[int, ...]:
    token_id = Annotated[int, inside]
    if isinstance(value, list):
        return parse_as(tuple[token_id, ...], value, _KEY)
    return () if value is None else (parse_as(token_id, value, _KEY),)


def chat_ends(
    folder: Path, tokenizer: Tokenizer, files: TokenizerFiles | None = None, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """The ids that end an answer in a chat: the model's, the end that the tokenizer names, and the token that the
    template writes behind an answer. Chat models are often published with the base model's end alone in their files.

    ``files`` and ``template`` may have been read already. Raises ModelError as :func:`model_ends`.
    """
    files = files or read_tokenizer_files(folder)
    template = template or read_template(folder, files)
    size, stop_ids = read_config(folder).vocab_size, list(model_ends(folder))
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    behind = template.turn_end()
    written = max((token for token in added if token and behind.startswith(token)), key=len, default="")
    for number in (tokenizer.token_to_id(files.special.get("eos_token", "")), added.get(written)):
        if number is not None and number < size and number not in stop_ids:
            stop_ids.append(number)
    return tuple(stop_ids)
