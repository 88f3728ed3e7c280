"""Where in a text its tokens begin, when some of them are parts of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from firsttoken.service.spelling import Spelling

_LAST = 32  # tokens of a prompt: a character is four at most, and what is no text seldom more


class Offsets:
    """Counts the characters of a text that comes in bytes, from ``begin`` on; it follows the bytes ``before``.

    Bytes that are no UTF-8 count as the U+FFFD that they are shown as, cut as Unicode's standard cuts them. Those at
    the end of ``before`` are shown with the text, as a :class:`TextStream` has it: more may have been on its way.
    """

    def __init__(self, begin: int = 0, before: bytes = b"") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        read = self._decoder.decode(before)
        self._whole = begin + len(read) - len(read.rstrip("\ufffd"))  # characters

    def take(self, spelt: bytes) -> int:
        """The place of the character that the first of these bytes belongs to."""
        place = self._whole
        for number in range(len(spelt)):
            self._whole += len(self._decoder.decode(spelt[number : number + 1]))
            if number == 0:
                within = bool(self._decoder.getstate()[0])
                place = self._whole if within else self._whole - 1
        return place


def after(spelling: Spelling, prompt_ids: Sequence[int], begin: int) -> Offsets:
    """What counts the text behind a prompt, which starts at ``begin``: the prompt may end within a character."""
    ends = [i for i in prompt_ids[-_LAST:] if not spelling.special(i)]
    return Offsets(begin, b"".join(map(spelling.spelt, ends)))


def of_prompt(tokenizer: Tokenizer, spelling: Spelling, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Where in ``text``, which the prompt was read from or reads as, each of its tokens begins.

    The tokens' bytes are the text's, but for special tokens that are not written in it. Where the tokenizer has changed
    the text (by a normal form), its own record says where each token came from; bytes that are no text are counted.
    """
    spelt = [spelling.spelt(token_id) for token_id in prompt_ids]
    raw, at, places = text.encode(), 0, []
    character = _characters(raw)
    for token_id, own in zip(prompt_ids, spelt, strict=True):
        if at == 0 and not raw.startswith(own):
            own = own.removeprefix(b" ")  # which such tokenizers add to a text, and take away again
        if not raw.startswith(own, at):
            if not spelling.special(token_id):
                break
            own = b""
        places.append(character[at])
        at += len(own)
    if len(places) == len(prompt_ids) and at == len(raw):
        return places
    read = tokenizer.encode(text)
    if read.ids == list(prompt_ids):
        begins = [begin for begin, _ in read.offsets]
    else:
        counted = Offsets()
        begins = [counted.take(own) for own in spelt]
    return [min(max(begins[: number + 1]), len(text)) for number in range(len(begins))]


def _characters(raw: bytes) -> list[int]:
    """Of each byte, and of the end, the number of its character."""
    count, numbers = -1, []
    for byte in raw:
        count += byte & 0xC0 != 0x80
        numbers.append(count)
    return [*numbers, count + 1]
