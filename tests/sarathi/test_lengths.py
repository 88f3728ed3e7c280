"""Lengths of prompts and answers, and the requests that are drawn of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firsttoken.simulation.lengths import lengths, workload
from firsttoken.study.errors import AssetError, CorpusError

HEAD = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n"


def test_a_table_of_the_readers_own(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(HEAD + "74,918,992\n290,905,1195\n")
    assert lengths(str(table)).tolist() == lengths(str(tmp_path)).tolist() == [[74, 918], [290, 905]]


def test_a_seed_draws_the_same_requests_at_every_rate() -> None:
    pairs = np.arange(1, 201).reshape(100, 2)
    slow, fast = workload(pairs, 20, seed=3, rate_per_s=1.0), workload(pairs, 20, seed=3, rate_per_s=4.0)
    assert [item.prompt_tokens for item in slow] == [item.prompt_tokens for item in fast]
    assert [item.arrival_s / 4 for item in slow] == pytest.approx([item.arrival_s for item in fast])
    assert len({item.prompt_tokens for item in slow}) == 20, "without replacement"
    assert [item.prompt_tokens for item in workload(pairs, 20, 4, 1.0)] != [item.prompt_tokens for item in slow]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_prefill_tokens,other\n1,2\n", "has no column num_decode_tokens"),
        (HEAD + "0,3,3\n", "line 2: num_prefill_tokens is '0', it must be a number from 1 on"),
        (HEAD + "many,3,3\n", "line 2: num_prefill_tokens is 'many'"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(CorpusError, match=message):
        lengths(str(tmp_path / "mine.csv"))


def test_more_requests_than_there_are_and_files_that_are_not_there() -> None:
    with pytest.raises(CorpusError, match="2 conversations are there and 3 asked for"):
        workload(np.ones((2, 2), dtype=int), 3, 0, 1.0)
    with pytest.raises(AssetError, match=r"there is no nowhere\.csv"):
        lengths("nowhere.csv")
