"""The tokenizer of a model folder by its own library, for a start that is timed."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from firsttoken.assets.text_tokenizer import read_text_tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in ``folder``. Raises ModelError as :func:`read_text_tokenizer`."""
    return read_text_tokenizer(folder).tokenizer
