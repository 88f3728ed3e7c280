"""Chunks behind prefixes: two ways to reckon them, and the profiles that they are held against."""

from __future__ import annotations

import numpy as np
import pytest
from changed_mechanisms import rings

from firsttoken.study.errors import ProfileError
from firsttoken_studies.nb42_the_simulator_and_a_gpu import chunk_error as study
from firsttoken_studies.nb42_the_simulator_and_a_gpu.chunk_error import (
    DIFFERENCE,
    HELD_OUT,
    SEEN,
    WAVES,
    by_difference,
    by_waves,
    chunk_summary,
)
from firsttoken_studies.record.results import load_result

SIZES = np.array([1.0, 64.0, 1024.0, 8192.0])
TILE, PROCESSORS, HEADS = 64, 128, 32


def prompts(least=1e-5, key_s=2e-8):
    """What a card would take on which every block takes ``key_s`` for a key and all processors are busy."""
    return SIZES, np.maximum(least, HEADS * SIZES / TILE / PROCESSORS * (SIZES / 2) * key_s)


def test_the_difference_is_what_the_operators_sum_up():
    sizes, seconds = prompts()
    assert by_difference((sizes, seconds), 1024, 7168) == pytest.approx(seconds[3] - seconds[2])
    assert by_difference((sizes, seconds), 1024, 1) == seconds[0]
    assert by_difference((sizes, seconds), 8192, 8192) == pytest.approx(3 * seconds[3])  # the square of twice as much


def test_one_tile_takes_as_long_as_a_full_wave():
    full = PROCESSORS // HEADS * TILE
    short, wave, more = (by_waves(prompts(), HEADS, 4096, n, TILE, PROCESSORS) for n in (1, full, full + 1))
    assert short == pytest.approx(1e-5 + 4096.5 * 2e-8)
    assert wave == pytest.approx(1e-5 + (4096 + full / 2) * 2e-8)
    assert more == pytest.approx(1e-5 + 2 * (4096 + (full + 1) / 2) * 2e-8)


def test_large_chunks_take_what_the_difference_says():
    """Where every processor is busy, both ways count the same pairs of queries and keys."""
    waves = by_waves(prompts(), HEADS, 8192, 8192, TILE, PROCESSORS)
    assert waves == pytest.approx(by_difference(prompts(), 8192, 8192), rel=0.01)


def test_points_are_read_where_nothing_decodes(tmp_path, monkeypatch):
    table = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,32,0,0,5\n16,0,0,0,4\n16,32,1,8,6\n0,0,1,8,2\n"
    (tmp_path / "attention.csv").write_text(table)
    monkeypatch.setattr(study, "downloaded", lambda name: tmp_path)
    assert study.behind_prefixes("x") == [(16, 32, 5.0)]
    (tmp_path / "attention.csv").write_text(table.replace("16,32,0,0,5\n", ""))
    with pytest.raises(ProfileError, match=r"has no chunk behind a prefix; take a profile that was made with prefixes"):
        study.behind_prefixes("x")


def test_errors_are_by_share_and_band():
    rows = [
        {"model": "m", "gpus": gpus, "seen": seen, "chunk": 16, "prefix": [2048], "profiled_us": [100.0]}
        | {"difference_us": [10.0], "waves_us": [100.0 + off]}
        for gpus, seen, off in ((1, SEEN, 5), (2, HELD_OUT, -10), (2, HELD_OUT, 10))
    ]
    summary = chunk_summary(rows, {})

    def off(case, way, across="median"):
        return summary.value("attention_off_pct", case=case, costs=way, than="profile", across=across)

    assert off(SEEN, WAVES) == pytest.approx(5) and off(HELD_OUT, WAVES) == pytest.approx(10)
    assert off(HELD_OUT, WAVES, "mean") == pytest.approx(0) and off("m on 2", DIFFERENCE, "mean") == pytest.approx(-90)
    assert off("chunks up to 256, prefixes from 1,025", DIFFERENCE) == pytest.approx(90)
    assert not summary.all("attention_off_pct", case="chunks from 1,025, prefixes up to 256")


def test_a_changed_rule_counts_the_recorded_points():
    recorded = load_result("chunk_error", "full", machine="any")
    library, doubled = (study.counted_by(recorded, rule) for rule in (by_waves, lambda *case: 2 * by_waves(*case)))
    for row, twice in zip(recorded.rows, doubled.with_mechanism.rows, strict=True):
        assert twice["waves_us"] == pytest.approx([2 * us for us in row["waves_us"]], abs=0.02)
    assert rings(study.by_chunk(recorded, doubled)) and not rings(study.by_chunk(recorded, library))
