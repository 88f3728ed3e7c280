"""Token ids of conversations, made once for a file and a tokenizer and kept in the cache.

Reading the pinned file takes a second and tokenising it 20 s of processor time, on as many cores as are free; what is
kept of it (15 MB) loads in 0.06 s.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.assets.gguf import converted
from firsttoken.assets.lock import asset_path, pinned
from firsttoken.assets.models import PINNED
from firsttoken.engine.workload_items import Item
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError, ModelError
from firsttoken.study.files import replacing
from firsttoken.study.parsing.parse_errors import FAULTS, ParseError, regular_size
from firsttoken.study.progress import track

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# The ShareGPT file, which is one JSON list that may break off anywhere: question and answer of each conversation.

_CHUNK = 1 << 22  # bytes; the longest conversation of the pinned file has 437,874
_SPACE = re.compile(r"\s*")
_ROLES = ("human", "gpt")


def first_pairs(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of every conversation: its first human turn that the model answers at once.

    vLLM's benchmark_serving takes the first two turns, whoever wrote them; of the pinned file a third would then be
    answers that pose as prompts, as long conversations were split and their later parts begin with an answer. The
    pairs come in the order of a hash of their text, so that any beginning is a fair sample. Records that are no
    conversation (a turn that is null) are passed by, and a warning says how many. Raises CorpusError for a
    file without such pairs, or that is no list of conversations; a last record that breaks off is left out.
    """
    pairs: list[tuple[str, str]] = []
    passed_by: list[int] = []
    for number, record in enumerate(read_records(path), 1):
        try:
            turns = [(turn["from"], turn["value"]) for turn in record["conversations"]]
            if not all(isinstance(part, str) for turn in turns for part in turn):
                raise TypeError
        except (TypeError, KeyError, AttributeError):
            passed_by.append(number)
            continue
        answered = ((a, b) for (asker, a), (teller, b) in pairwise(turns) if (asker, teller) == _ROLES)
        pairs += [(_as_utf8(a), _as_utf8(b)) for a, b in islice(answered, 1)]
    fault = "no conversation of turns with `from` and `value`"
    if passed_by and not pairs:
        raise CorpusError(f"{path}, record {passed_by[0]}: it is {fault}; use a ShareGPT file")
    if not pairs:
        raise CorpusError(f"{path} has no question that is answered; it is cut too early or of another format")
    if passed_by:
        warnings.warn(
            f"{path}: {len(passed_by)} records are {fault} and were passed by, first record {passed_by[0]}",
            stacklevel=2,
        )
    return sorted(pairs, key=lambda pair: hashlib.sha256("\n".join(pair).encode()).digest())


def read_records(path: Path) -> Iterator[Any]:
    """The complete records of a JSON list, one after the other, with no more in memory than a chunk and a record.

    Raises CorpusError for a file that cannot be read, and for what is no JSON list, other than that it ends early.
    """
    decode = json.JSONDecoder().raw_decode
    text, opened, closed, between, number = "", False, False, False, 0
    for more in _chunks(path):
        text, offset = text + more, 0
        if not opened and (text := text.lstrip()):
            if text[0] != "[":
                raise CorpusError(f"{path} is no JSON list of conversations; use a ShareGPT .json file")
            opened, offset = True, 1
        while (offset := _SPACE.match(text, offset).end()) < len(text):
            if closed or (between and text[offset] not in ",]"):
                fault = "text after the end of the list" if closed else f"no comma after record {number}"
                raise CorpusError(f"{path}: there is {fault}; download the file again")
            if text[offset] == "]" and (between or not number):
                closed, offset = True, offset + 1
                continue
            if between:
                between, offset = False, offset + 1
                continue
            try:
                record, offset = decode(text, offset)
            except RecursionError as error:
                raise CorpusError(f"{path}: record {number + 1} is too deep; use a ShareGPT file") from error
            except json.JSONDecodeError as error:
                if _ends_early(error, text):
                    break
                raise CorpusError(
                    f"{path}: there is no JSON after record {number} ({error.msg}); download the file again"
                ) from error
            number, between = number + 1, True
            yield record
        text = text[offset:]


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file; a letter that the file's end cuts in two is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        regular_size(path)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield decoder.decode(chunk)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text; unpack it if it is compressed, or download it again") from error
    except (OSError, ParseError) as error:
        reason = error if isinstance(error, ParseError) else error.strerror
        raise CorpusError(f"cannot read {path}: {reason}; check the path") from error


def _ends_early(error: json.JSONDecodeError, text: str) -> bool:
    """Return whether more text could mend ``error``: an open string, or a fault in the last letters (half an escape,
    half a word)."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - 8


def _as_utf8(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


_ASSET = "sharegpt"
_FEWEST = 4  # tokens of a prompt and of an answer; vLLM's benchmark_serving drops shorter ones too
_BATCH = 256
_RULES = 1  # part of the kept file's name: raise it when other pairs are taken, or in another order


@dataclass(frozen=True)
class Conversations:
    """Prompts and the lengths of their answers, in an order of which any beginning is a fair sample.

    ``ids`` [all prompt tokens] holds the prompts end to end, or nothing where only lengths are known; ``starts``
    [n + 1] where each begins and the last ends; ``output_tokens`` [n] how long the answers are, without special tokens.
    """

    ids: np.ndarray
    starts: np.ndarray
    output_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.output_tokens)

    @property
    def prompt_tokens(self) -> np.ndarray:
        """Return the lengths of the prompts in tokens [n]."""
        return np.diff(self.starts)

    def item(self, index: int) -> Item:
        """Conversation ``index`` as a request that arrives at 0."""
        start, end = self.starts[index : index + 2].tolist()
        return Item(0.0, end - start, int(self.output_tokens[index]), tuple(self.ids[start:end].tolist()))


def conversations(tokenizer: Any | None) -> Conversations:
    """Every question that is answered in the pinned ShareGPT file.

    The prompt has the tokenizer's own first and last tokens, if any, and no chat template, as in vLLM's
    benchmark_serving; pairs with fewer than four tokens on a side are left out. Without a tokenizer there are lengths
    only, the pinned model's; once they are kept (0.3 MB), neither that model nor the file is needed any more.

    Raises AssetError when the pinned file or model is not fetched, ModelError for a tokenizer that is not a fast one,
    CorpusError for a file that cannot be used and a cache that cannot be written.
    """
    if tokenizer is None:
        rules = f"lengths-{pinned(PINNED).sha256}"
    else:
        backend = _backend(tokenizer)
        rules = hashlib.sha256(backend.to_str().encode()).hexdigest()
    cache_file = paths.CACHE / "conversations" / f"v{_RULES}-{pinned(_ASSET).sha256[:16]}-{rules[:16]}.npz"
    made = _load(cache_file)
    if made is None:
        if tokenizer is None:
            made = conversations(pinned_tokenizer())
            made = replace(made, ids=made.ids[:0])
        else:
            made = _tokenised(backend, asset_path(_ASSET))
        try:
            with replacing(cache_file) as partial, partial.open("wb") as file:
                np.savez(file, ids=made.ids, starts=made.starts, output_tokens=made.output_tokens)
        except OSError as error:
            raise CorpusError(
                f"cannot write {cache_file}: {error.strerror}; set FIRSTTOKEN_CACHE to another folder"
            ) from error
    return made


def pinned_tokenizer() -> Any:
    """The tokenizer of the pinned model, without the model. Raises AssetError when it was not fetched."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted(PINNED), local_files_only=True)


def _backend(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{type(tokenizer).__name__} is no fast tokenizer; load one with a tokenizer.json")
    # the tokenizer's last call may have left these behind; its next call sets its own
    backend.no_truncation()
    backend.no_padding()
    return backend


def _load(cache_file: Path) -> Conversations | None:
    """Return the conversations in ``cache_file``; None, to make them again, when there are none or they are damaged."""
    try:
        regular_size(cache_file)
        with np.load(cache_file, allow_pickle=False) as arrays:
            made = Conversations(arrays["ids"], arrays["starts"], arrays["output_tokens"])
    except (OSError, TokenError, *FAULTS):  # numpy reads a header as Python
        return None
    valid = all(part.ndim == 1 and part.dtype.kind == "i" for part in (made.ids, made.starts, made.output_tokens))
    fits = valid and len(made.starts) == len(made.output_tokens) + 1 and made.starts[0] == 0
    fits = (
        fits and len(made.ids) in (0, made.starts[-1]) and min(made.prompt_tokens.min(), made.output_tokens.min()) > 0
    )
    return made if fits else None


def _tokenised(tokenizer: Tokenizer, path: Path) -> Conversations:
    pairs = first_pairs(path)
    prompts: list[np.ndarray] = []
    outputs: list[int] = []
    with track(total=len(pairs), desc=f"tokenising {path.name}, once", unit="conversation") as bar:
        for start in range(0, len(pairs), _BATCH):
            questions, answers = zip(*pairs[start : start + _BATCH], strict=True)
            encodings = tokenizer.encode_batch_fast(list(questions))
            answered = tokenizer.encode_batch_fast(list(answers), add_special_tokens=False)
            for prompt, output in zip(encodings, answered, strict=True):
                if len(prompt) >= _FEWEST and len(output) >= _FEWEST:
                    prompts.append(np.array(prompt.ids, dtype=np.int32))
                    outputs.append(len(output))
            bar.update(len(questions))
    if not prompts:
        raise CorpusError(f"{path} has no question and answer of at least {_FEWEST} tokens; use a longer file")
    starts = np.cumsum([0, *map(len, prompts)])
    return Conversations(np.concatenate(prompts), starts, np.array(outputs))
