"""The tokenizer of a model folder by its own library, without transformers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import Damaged, blaming, read_bytes

FILE = "tokenizer.json"
_MOST_BYTES = 1 << 28  # the largest published vocabularies take 35 MB


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in ``folder``. Raises ModelError when its file is missing, no tokenizer, or truncated."""
    with blaming(folder / FILE, ModelError, "copy the model's own"):
        text = read_bytes(folder / FILE, _MOST_BYTES).decode("utf-8")
        try:
            return Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise Damaged(f"it is truncated or no tokenizer ({error})") from error
