"""A conversation as the prompt that a model was trained on: its own template, as transformers renders it.

An answer ends at the tokens that the model's own files name, and in a chat at those of its tokenizer and template too.
"""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  # which Jinja's lexer asks for, when torch may be on its way in
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from firsttoken.assets.lock import first_line
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.tokenizer_files import DEFAULT, MEND, TokenizerFiles, read_tokenizer_files
from firsttoken.study.errors import ModelError, RequestError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import blaming
from firsttoken.study.parsing.schema import Fault, between, shaped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION, _KEY = "generation_config.json", "eos_token_id"
_ANSWER = "An answer to find again."
_ASKED = {"role": "user", "content": "A question."}


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja ``templates`` of a model by name, of which "default" is used, and the special tokens that it may name.

    ``fault`` says why no conversation can be rendered, and is empty where one can.
    """

    templates: Mapping[str, str]
    special: Mapping[str, str]

    def prompt(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """What the model reads before it says the next turn; the template is told ``variables``, too.

        Raises RequestError where there is no template that can be used, and for a conversation that it refuses.
        """
        if self.fault:
            raise RequestError(f"messages: {self.fault}; ask /v1/completions")
        return self._rendered(messages, variables or {}, add_generation_prompt=True)

    @cached_property
    def fault(self) -> str:
        """Why there are no chats; "" where there are."""
        if not any(self.templates.values()):
            return "this model has no chat template"
        if DEFAULT not in self.templates:
            return f"of this model's chat templates ({', '.join(sorted(self.templates))}) none is called {DEFAULT!r}"
        try:
            _ = self._compiled
        except Exception as error:  # the template came with the model, and its compiler raises many kinds
            return f"the model's chat template is none: {first_line(error)}"
        return ""

    def turn_end(self) -> str:
        """The text that the template writes behind an answer, up to the end or to the next blank; "" where it cannot
        be told."""
        if self.fault:
            return ""
        try:
            turns = [_ASKED, {"role": "assistant", "content": _ANSWER}]
            said = self._rendered(turns, {}, add_generation_prompt=False)
        except RequestError:
            return ""
        return said.rpartition(_ANSWER)[2].strip()

    def trial(self) -> str:
        """What goes wrong with a conversation of one short question; "" where nothing does."""
        try:
            self.prompt([_ASKED])
        except RequestError as error:
            return first_line(error).removeprefix("messages: ").removesuffix("; ask /v1/completions")
        return ""

    def _rendered(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        turns = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
        own = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._compiled.render({**variables, **self.special, **own})
        except Exception as error:  # as above
            raise RequestError(f"messages: the model's chat template says {first_line(error)}") from error

    @cached_property
    def _compiled(self) -> Any:
        return _world().from_string(self.templates[DEFAULT])


def read_template(folder: Path, files: TokenizerFiles | None = None) -> ChatTemplate:
    """The template of a model folder, whose tokenizer's ``files`` may have been read already.

    Raises ModelError for a file that is damaged.
    """
    files = files or read_tokenizer_files(folder)
    return ChatTemplate(files.templates, files.special)


def _world() -> Any:
    """What a template finds around it, as in transformers; a sandbox, as the template came with the model."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks for a training what the model says; the text is the same."""

        tags = frozenset(["generation"])

        def parse(self, parser: Parser) -> nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

        def said(self, caller: Any) -> str:
            return caller()

    class OwnNames(Namespace):
        """A namespace without underscored names, by which a template could reach Python."""

        def __init__(*given: Any, **names: Any) -> None:
            self, *given = given
            attributes = dict(*given, **names)
            for name in attributes:
                _check(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            Namespace.__setitem__(self, name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the name {name!r} begins with an underscore")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    world.filters["tojson"] = as_json
    world.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda shape: datetime.now().strftime(shape),
        "namespace": OwnNames,
    }
    return world


def model_ends(folder: Path) -> tuple[int, ...]:
    """The ids that generation_config.json names, or config.json where that says nothing of them.

    Raises ModelError for a file that is damaged, and for an id that is no token of the model.
    """
    size = read_config(folder).vocab_size
    for path in (folder / GENERATION, folder / CONFIG):
        if not path.is_file():
            continue
        with blaming(path, ModelError, MEND):
            content = shaped(dict[str, Any], read_json(path, 1 << 24))
            if _KEY in content:
                return _ends(content[_KEY], between(0, size - 1))
    return ()


def _ends(value: Any, inside: Fault) -> tuple[int, ...]:
    one = Annotated[int, inside]
    if isinstance(value, list):
        return shaped(tuple[one, ...], value, _KEY)
    return () if value is None else (shaped(one, value, _KEY),)


def chat_ends(
    folder: Path, tokenizer: Tokenizer, files: TokenizerFiles | None = None, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """The ids that end an answer in a chat: the model's, the end that the tokenizer names, and the token that the
    template writes behind an answer. Chat models are often published with the base model's end alone in their files.

    ``files`` and ``template`` may have been read already. Raises ModelError as :func:`model_ends`.
    """
    files = files or read_tokenizer_files(folder)
    template = template or read_template(folder, files)
    size, ends = read_config(folder).vocab_size, list(model_ends(folder))
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    behind = template.turn_end()
    written = max((token for token in added if token and behind.startswith(token)), key=len, default="")
    for number in (tokenizer.token_to_id(files.special.get("eos_token", "")), added.get(written)):
        if number is not None and number < size and number not in ends:
            ends.append(number)
    return tuple(ends)
