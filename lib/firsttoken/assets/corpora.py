"""Questions and running text in fixed splits.

The pinned sets are small, and some are only one split of the original, so the splits here are this project's own: a
hash of the passage decides, so that no passage is shared between splits, the split of an item never depends on the
others, and the order is a fixed shuffle of which any beginning is a fair sample.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.lock import asset_path, pinned
from firsttoken.assets.qa_files import QAItem, arrow_rows, kept_rows, read_boolq_train, read_hub, read_qa, triviaqa_item
from firsttoken.assets.question_sets import SETS, question_set
from firsttoken.study import paths
from firsttoken.study.errors import CorpusError

SPLITS = ("train", "validation", "test")
_SCIQ_EDGES = (0.60, 0.68)  # train | validation | test
_SHINGLE_WORDS = 12
_ON_HUB = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}")
_MOST_SHARED = 0.1  # of the 12-word runs of a held-out passage that the train passages may hold
_ASKED_ONLY = "squad"  # the report scores its stages on SQuAD: a thousand questions are what an interval needs
_PINNED_SETS = frozenset(("sciq", "triviaqa", *SETS))
_KNOWN = ", ".join(("sciq", "triviaqa", *SETS))
_HELD_OUT_EDGE = 0.20  # validation | test, where train is a file of its own: the same 8 : 32


def sciq(split: str) -> list[QAItem]:
    """SciQ as extractive and four-choice QA: the pinned validation rows whose answer occurs in their passage.

    About 60 % train, 8 % validation, 32 % test of 825 rows. The choices are in a fixed shuffled order. Raises
    CorpusError for an unknown split, AssetError when the file is not fetched.
    """
    _check_split(split)
    items = []
    for row in arrow_rows("sciq-validation.arrow"):
        passage, answer = row["support"].strip(), row["correct_answer"].strip()
        if not answer or answer.casefold() not in passage.casefold():
            continue
        question = row["question"].strip()
        identity = _digest(f"{passage}\n{question}")[:12]
        options = [answer, *(row[f"distractor{i}"].strip() for i in (1, 2, 3))]
        choices = tuple(sorted(options, key=lambda option, salt=identity: _digest(f"{salt}\n{option}")))
        items.append(QAItem(f"sciq-{identity}", passage, question, (answer,), choices, choices.index(answer)))
    return [item for item in _shuffled(items) if _part(item, *_SCIQ_EDGES) == split]


def triviaqa() -> list[QAItem]:
    """Closed-book TriviaQA (the pinned 7,993 Wikipedia validation questions), in a fixed shuffled order.

    All aliases are accepted answers, the canonical value first.
    """
    rows = arrow_rows("triviaqa-validation.arrow")
    items = [
        triviaqa_item(row["question_id"], row["question"], row["answer"]["value"], row["answer"]["aliases"])
        for row in rows
    ]
    return _shuffled(items)


def boolq_prompts(split: str) -> list[tuple[str, str]]:
    """(passage, question) pairs of BoolQ: Wikipedia paragraphs and yes/no questions, each ending in "?".

    "train" is the original train file without the passages that the original validation file holds too; "validation"
    and "test" are halves of the latter, without passages of which more than a tenth also stands in "train" (other cuts
    of one article). Fixed shuffle; raises CorpusError for an unknown split.
    """
    _check_split(split)
    return list(_boolq(split))


@cache
def _boolq(split: str) -> tuple[tuple[str, str], ...]:
    """The pairs of a split. To find the overlap of two thousand passages takes seconds, and most experiments need it:
    they are kept under the hash of what they are made of, the pinned files and the code that reads them."""
    files = ("boolq-train.jsonl.gz", "boolq-validation.arrow")
    asset_path(files[0])  # for its AssetError
    code = [Path(__file__).read_text(encoding="utf-8"), inspect.getsource(read_boolq_train)]
    made_of = _digest("\n".join([*(pinned(name).sha256 for name in files), *code]))
    make = _boolq_train if split == "train" else lambda: _boolq_held_out()[split]
    return tuple((passage, question) for passage, question in kept_rows(f"boolq-{split}-{made_of[:12]}", make))


@cache
def _boolq_held_out() -> dict[str, tuple[tuple[str, str], ...]]:
    """The pairs of "validation" and "test", which are compared with "train" in one pass."""
    training_shingles = {shingle for passage in {p for p, _ in _boolq("train")} for shingle in _shingles(passage)}
    halves: dict[str, list[tuple[str, str]]] = {"validation": [], "test": []}
    for passage, question in _boolq_validation():
        if _share(passage, training_shingles) <= _MOST_SHARED:
            halves["validation" if _unit(_letters(passage)) < 0.5 else "test"].append((passage, question))
    return {split: _in_fixed_order(pairs) for split, pairs in halves.items()}


def _boolq_train() -> tuple[tuple[str, str], ...]:
    """The pairs of the train file, once an answer there, without passages of the validation file."""
    taken = {_key(passage) for passage, _ in _boolq_validation()}
    read = read_boolq_train(asset_path("boolq-train.jsonl.gz"))
    pairs = dict.fromkeys((passage, _as_question(question)) for passage, question in read if passage)
    return _in_fixed_order(pair for pair in pairs if _key(pair[0]) not in taken)


def _boolq_validation() -> list[tuple[str, str]]:
    return [(row["passage"].strip(), _as_question(row["question"])) for row in arrow_rows("boolq-validation.arrow")]


def _in_fixed_order(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pairs, key=lambda pair: _digest("\n".join(pair))))


def running_text(split: str) -> list[str]:
    """Wikipedia paragraphs, each once, none in two splits: the passages of ``boolq_prompts``, in a fixed shuffle."""
    passages = {_key(passage): passage for passage, _ in boolq_prompts(split)}
    return sorted(passages.values(), key=_digest)


def token_windows(texts: Iterable[str], tokenizer: Any, length: int, count: int) -> torch.LongTensor:
    """Cut texts, joined with the end-of-text token, into windows, each behind the tokenizer's own first token if any.

    Returns token ids [count, length]. Only as many texts are read as are needed; raises CorpusError when they hold
    too few tokens.
    """
    if length < 1 or count < 1:
        raise CorpusError(f"{count} windows of {length} tokens cannot be cut from a text; ask for at least 1 of each")
    head = tokenizer("")["input_ids"]  # Llama's tokenizer begins every text with a token, SmolLM2's does not
    body = length - len(head)
    needed = body * count
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
        if len(ids) >= needed:
            windows = torch.tensor(ids[:needed], dtype=torch.long).view(count, body)
            return torch.cat([torch.tensor(head, dtype=torch.long).expand(count, -1), windows], 1)
    raise CorpusError(f"the text has {len(ids):,} tokens, {count} windows of {length} need {needed:,}; ask for fewer")


def load_qa(source: str, split: str) -> list[QAItem]:
    """Questions from anywhere, in the three splits.

    ``source`` is "sciq", "triviaqa", one of ``SETS``, several of these as "sciq+drop", or the path of a SQuAD or
    TriviaQA .json file (cut 60 / 8 / 32 by hash; all of "squad" is test), a folder with one *train*.json and one
    *dev*.json, or "hub:org/name" or "hub:org/name:config" (both: train is train, the other file is cut 20 / 80 into
    validation and test). Raises CorpusError naming what is missing or wrong, and AssetError where a set was not
    fetched.
    """
    _check_split(split)
    names = source.split("+")
    if len(names) > 1 and _PINNED_SETS.issuperset(names):
        return _shuffled(item for name in names for item in load_qa(name, split))
    if source == "sciq":
        return sciq(split)
    if source == "triviaqa":
        return _cut(triviaqa(), split)
    if source in SETS:
        items = question_set(source)
        if source != _ASKED_ONLY:
            return _cut(items, split)
        if split != "test":
            raise CorpusError(f"all {len(items):,} questions of {source} are asked, none are for {split}; name coqa")
        return _shuffled(items)
    if source.startswith("hub:"):
        name, _, config = source.removeprefix("hub:").partition(":")
        if not _ON_HUB.fullmatch(name) or Path(name).exists():
            raise CorpusError(f"{name!r} is no name of a data set on the Hub, or a folder here; one is like org/name")
        return _two_files(lambda part: read_hub(name, config or None, part), split)
    path = paths.expanded(source)
    if path.is_dir():
        return _two_files(lambda part: read_qa(_only(path, "train" if part == "train" else "dev")), split)
    if path.suffix != ".json":
        raise CorpusError(f"no questions called {source!r}; known: {_KNOWN}, a .json file or folder, hub:NAME")
    return _cut(read_qa(path), split)


def _cut(items: list[QAItem], split: str) -> list[QAItem]:
    return [item for item in _shuffled(items) if _part(item, *_SCIQ_EDGES) == split]


def _two_files(read: Callable[[str], list[QAItem]], split: str) -> list[QAItem]:
    if split == "train":
        return _shuffled(read("train"))
    return [item for item in _shuffled(read("validation")) if _part(item, 0.0, _HELD_OUT_EDGE) == split]


def _only(folder: Path, word: str) -> Path:
    files = sorted(folder.glob(f"*{word}*.json"))
    if len(files) != 1:
        raise CorpusError(f"{folder} must hold exactly one *{word}*.json, it holds {len(files)}; name the file instead")
    return files[0]


def _part(item: QAItem, train_edge: float, validation_edge: float) -> str:
    unit = _unit(item.passage or item.question)
    return "train" if unit < train_edge else "validation" if unit < validation_edge else "test"


def _shuffled(items: Iterable[QAItem]) -> list[QAItem]:
    return sorted(items, key=lambda item: _digest(f"{item.passage}\n{item.question}\n{item.id}"))


def _unit(text: str) -> float:
    """A fixed pseudo-random number in [0, 1) from a text, blind to case and spacing."""
    return int(_digest(_key(text))[:13], 16) / 16**13


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def _letters(text: str) -> str:
    """Letters and digits alone: two cuts of a paragraph that differ in quotation marks are one."""
    return re.sub(r"\W", "", text.casefold())


def _shingles(text: str) -> list[int]:
    """A hash of every run of 12 words; the whole text where it is shorter."""
    words = re.sub(r"[^\w\s]", "", text.casefold()).split()
    runs = range(max(1, len(words) - _SHINGLE_WORDS + 1))
    return [hash(" ".join(words[i : i + _SHINGLE_WORDS])) for i in runs]


def _share(text: str, other_shingles: set[int]) -> float:
    shingles = _shingles(text)
    return sum(shingle in other_shingles for shingle in shingles) / len(shingles)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_question(question: str) -> str:
    return question.strip().rstrip("?").rstrip() + "?"


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise CorpusError(f"no split is called {split!r}; known: {', '.join(SPLITS)}")
