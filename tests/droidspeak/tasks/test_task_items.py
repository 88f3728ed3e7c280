"""An item as tokens: one text, read in three parts."""

from __future__ import annotations

import pytest

from firsttoken_studies.droidspeak.constructed_tasks import build
from firsttoken_studies.droidspeak.reuse_items import TaskItem, encode

ITEM = TaskItem("1", "qa", "Question: who?\n\nthe hat in the wind.\n", "\nAnswer:", ("the hat", "hat"))


def test_the_target_is_the_first_answer_and_the_stop():
    assert ITEM.target == " the hat\n"


def test_the_parts_are_the_tokens_of_the_whole_text(tokenizer):
    encoded = encode(ITEM, tokenizer)
    assert encoded.item is ITEM
    assert encoded.prefix == tokenizer.encode(ITEM.prefix)
    whole = encoded.prefix + encoded.suffix + encoded.target
    text = ITEM.prefix + ITEM.suffix + ITEM.target
    assert tokenizer.decode(whole, skip_special_tokens=True) == text
    if len(tokenizer.encode("\n\n")) == len(tokenizer.encode("\n")) + 1:  # else the seam falls into a token
        assert whole == tokenizer.encode(text)


def test_only_the_prefix_has_a_head(tokenizer):
    encoded = encode(ITEM, tokenizer)
    head = tokenizer.encode("", add_special_tokens=True)
    assert encoded.prefix[: len(head)] == head
    assert tokenizer.bos_token_id not in encoded.suffix + encoded.target


@pytest.mark.assets
@pytest.mark.parametrize("task", ["qa", "lead", "copy"])
def test_the_pinned_tokenizer_joins_nothing_across_the_seams(task):
    from transformers import AutoTokenizer

    from firsttoken.assets.gguf import converted

    pinned = AutoTokenizer.from_pretrained(converted("smollm2-135m"), local_files_only=True)
    for item in build(task, "validation", pinned, 260, 20):
        encoded = encode(item, pinned)
        assert encoded.prefix + encoded.suffix + encoded.target == pinned.encode(
            item.prefix + item.suffix + item.target
        )
        assert 200 < len(encoded.prefix) <= 260
        assert len(encoded.target) <= 34
