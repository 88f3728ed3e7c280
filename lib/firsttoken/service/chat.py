"""A conversation as the prompt that a model was trained on: its own template, as transformers renders it."""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  # which Jinja's lexer asks for, when torch may be on its way in
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firsttoken.study.errors import ModelError, RequestError
from firsttoken.study.foreign.faults import blaming, read_bytes
from firsttoken.study.foreign.json_text import parse_json

_MOST_BYTES = 1 << 20
_DIGITS = 31  # transformers writes 10 ** 30 for a length without limit
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, "" where the model has none, and the special tokens that it may name."""

    text: str
    special: dict[str, str]

    def prompt(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any] | None = None) -> str:
        """What the model reads before it says the next turn; the template is told ``variables``, too.

        Raises RequestError where there is no template, and for a conversation that it refuses or cannot show.
        """
        if not self.text:
            raise RequestError("messages: this model has no chat template; ask /v1/completions")
        try:
            told = {"messages": list(messages), "add_generation_prompt": True, **self.special}
            return self._compiled().render((variables or {}) | told)
        except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError) as error:
            raise RequestError(f"messages: the model's chat template says {' '.join(str(error).split())}") from error

    def _compiled(self) -> Any:
        """In a sandbox: the template came with the model. Jinja keeps what it has compiled by its text."""

        def refuse(message: str) -> None:
            raise TemplateError(message)

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        world.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        world.globals |= {"raise_exception": refuse, "strftime_now": lambda shape: datetime.now().strftime(shape)}
        return world.from_string(self.text)


def read_template(folder: Path) -> ChatTemplate:
    """The template of a model folder: ``chat_template.jinja``, or what tokenizer_config.json says, or none.

    Raises ModelError for a file that is damaged.
    """
    text, settings = "", {}
    if (folder / SETTINGS).is_file():
        with blaming(folder / SETTINGS, ModelError, "copy the model's own"):
            found = parse_json(read_bytes(folder / SETTINGS, _MOST_BYTES << 6), digits=_DIGITS)
            settings = found if isinstance(found, dict) else {}
    if (folder / TEMPLATE).is_file():
        with blaming(folder / TEMPLATE, ModelError, "copy the model's own"):
            text = read_bytes(folder / TEMPLATE, _MOST_BYTES).decode("utf-8")
    elif isinstance(settings.get("chat_template"), str):
        text = settings["chat_template"]
    named = {key: settings.get(key) for key in _SPECIAL}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return ChatTemplate(text, {key: value for key, value in contents.items() if isinstance(value, str)})
