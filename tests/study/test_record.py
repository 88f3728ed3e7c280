from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from edited import set_keys
from entries import entry

from firsttoken.study import paths
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.files import new_folder, replacing, write_text
from firsttoken_studies.record.results import (
    MANY,
    all_results,
    expanded,
    git_revision,
    load_result,
    pick,
    read_result,
    write_result,
)

pytestmark = pytest.mark.usefixtures("root")


def test_a_result_survives_the_file(make_result) -> None:
    result = make_result()
    path = write_result(result)
    assert path == paths.RESULTS / "test-cpu-2c" / "quick" / "machine.json"
    assert read_result(path) == result
    assert all_results() == [result]
    assert result.frame()["copy_s"].tolist() == [0.25, 0.5]
    assert '{"copy_s":0.25,"trial":0},' in path.read_text(encoding="utf-8"), "a row is a line, its keys sorted"
    assert path.read_text(encoding="utf-8") == write_result(read_result(path)).read_text(encoding="utf-8")


def test_numpy_and_torch_scalars_become_numbers(make_result) -> None:
    rows = [{"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2)}]
    assert read_result(write_result(make_result(rows=rows))).rows == [{"a": 0.5, "b": 3, "c": 2}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan"), torch.tensor(float("nan"))])
def test_a_number_that_is_not_finite_is_named_and_nothing_is_written(make_result, bad) -> None:
    with pytest.raises(FirstTokenError, match=r"rows\[1\].x is not finite"):
        write_result(make_result(rows=[{"x": 1.0}, {"x": bad}]))
    assert not list(paths.DATA.rglob("*.json"))


def test_a_value_that_json_cannot_hold_is_refused(make_result) -> None:
    with pytest.raises(FirstTokenError, match="a set cannot be kept"):
        write_result(make_result(provenance={"tags": {1, 2}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99, this version reads 3; measure it again"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"rows": None}, "missing key 'rows'"),
        ({"machine": {}}, "machine: does not say on which machine"),
        ({"machine": {"slug": "x", "gpu": 3}}, "machine: does not say on which machine"),
        ({"machine": {"slug": "", "gpu": None}}, "machine: does not say on which machine"),
        ({"summary": {"x": {"value": 1}}}, "summary: expected list"),
        ({"summary": [{"value": 1}]}, r"summary\[0\]: expected a measure, and where it holds"),
        ({"summary": [entry()]}, r"summary\[0\]: expected a value"),
        ({"summary": [entry(value=1, low=0)]}, "low and high as numbers or not at all"),
        ({"summary": [entry(value=[1])]}, "expected a number, yes or no, or text"),
        ({"summary": [entry(value=1), entry(value=2)]}, "summary: m is there already"),
        ({"summary": [entry("m", {"polizy": "swap"}, value=1)]}, "no place 'polizy'.*did you mean 'policy'"),
        ({"duration_s": -1}, "duration_s: expected 0 or more"),
        ({"seeds": ["0"]}, "expected int, not '0'"),
    ],
)
def test_a_file_of_another_shape_is_refused(make_result, change: dict, message: str) -> None:
    path = write_result(make_result())
    content = json.loads(path.read_text(encoding="utf-8")) | change
    content = {k: v for k, v in content.items() if v is not None and k != "sha256"}
    path.write_text(json.dumps(content | {"sha256": sha256_of(content)}), encoding="utf-8")
    with pytest.raises(FirstTokenError, match=message):
        read_result(path)


def test_many_rows_have_their_keys_once_and_are_read_as_they_were(make_result) -> None:
    """A line a row in either layout, and one hash; rows may have other keys than their neighbours."""
    few = [{"at_s": 0.1 * i, "row": "token"} | ({"stage": None} if i % 3 else {}) for i in range(MANY)]
    many = [*few, {"row": "end"}]
    short, long = (
        write_result(make_result(rows=rows, experiment=name)) for rows, name in ((few, "few"), (many, "many"))
    )
    assert '"keys"' not in short.read_text() and short.read_text().count('"at_s"') == MANY
    text = long.read_text()
    assert text.count('"at_s"') == 2 and text.count("\n[") == len(many) + 3, (
        "a line a row, and one for each set of keys"
    )
    assert read_result(short).rows == few and read_result(long).rows == many
    content = json.loads(text)
    assert sha256_of({k: v for k, v in expanded(content).items() if k != "sha256"}) == content["sha256"]


def test_a_large_result_is_packed_and_found_as_any_other(make_result) -> None:
    """It replaces the plain file of before, and is replaced by one."""
    few, many = [{"at_s": 0.5, "n": 1}], [{"at_s": 0.1 * i, "n": i} for i in range(30_000)]
    plain = write_result(make_result(rows=few))
    packed = write_result(make_result(rows=many))
    assert packed.name == plain.name + ".gz" and not plain.exists() and packed.stat().st_size < 256 * 1024
    assert read_result(packed).rows == many and load_result("machine", "quick", "test-cpu-2c").rows == many
    assert [result.path for result in all_results()] == [packed]
    assert packed.read_bytes() == write_result(read_result(packed)).read_bytes(), "the same content is the same file"
    assert write_result(make_result(rows=few)) == plain and not packed.exists()


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"{}", lambda b: b[:40] + b"x" + b[41:]])
def test_a_damaged_packed_result_is_refused_in_one_line(make_result, damage) -> None:
    path = write_result(make_result(rows=[{"at_s": 0.1 * i} for i in range(40_000)]))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FirstTokenError, match=r"measure it again") as raised:
        read_result(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": 3},
        {"rows": {"a": 1}},
        {"rows": [[0, 1, 2, 3, 4, 5]]},
        {"rows": [[9, 1]]},
        {"rows": [[]]},
        {"rows": [7]},
        {"rows": [["0", 1]]},
    ],
)
def test_rows_that_do_not_fit_their_keys_are_refused(make_result, change: dict) -> None:
    path = write_result(make_result(rows=[{"at_s": 0.5}] * (MANY + 1)))
    set_keys(path, **change)
    with pytest.raises(FirstTokenError, match=r"keys.*measure it again") as raised:
        read_result(path)
    assert "\n" not in str(raised.value)


def test_a_truncated_file_is_refused(make_result) -> None:
    path = write_result(make_result())
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    with pytest.raises(FirstTokenError, match="truncated or no JSON"):
        all_results()


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ('"copy_s":0.25', '"copy_s":0.24'),
        ('"low":0.25', '"low":0.26'),
        ('"git_revision": "unknown"', '"git_revision": "0123"'),
        ('"duration_s": 1.5', '"duration_s": 0.5'),
    ],
)
def test_what_was_edited_is_refused(make_result, said: str, instead: str) -> None:
    path = write_result(make_result())
    text = path.read_text(encoding="utf-8")
    assert said in text
    path.write_text(text.replace(said, instead), encoding="utf-8")
    with pytest.raises(FirstTokenError, match="does not fit its own sha256, so it was edited; measure it again"):
        read_result(path)


def test_an_experiment_has_one_result_a_machine_and_profile(make_result) -> None:
    path = write_result(make_result())
    shutil.copy(path, path.with_name("machine-again.json"))
    with pytest.raises(FirstTokenError, match=r"machine-again.json: it is of machine, .* remove one"):
        all_results()


def test_the_larger_profile_goes_first_and_the_machine_is_respected(make_result) -> None:
    gpu = {"slug": "nvidia-x", "gpu": "X"}
    quick, full = make_result(), make_result(profile="full")
    late = make_result(started="2026-02-01T00:00:00+00:00")
    there = make_result(profile="gpu", machine=gpu)
    results = [quick, full, late, there]
    assert pick(results, "machine", machine="test-cpu-2c") is full
    assert pick(results, "machine", ["quick"], "test-cpu-2c") is late
    assert pick(results, "machine", ["gpu"], "any") is there
    assert pick(results, "machine", machine="another") is None
    assert pick(results, "other", machine="any") is None
    for result in (quick, there):
        write_result(result)
    assert load_result("machine", "gpu", "nvidia-x") == there
    assert load_result("machine", "quick", "nvidia-x") is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(root) -> None:
    path = root / "folder" / "file.json"
    write_text(path, "old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("over_older", [False, True])
@pytest.mark.parametrize("at", ["within", "named", "nowhere"])
def test_a_folder_is_written_whole_or_stays_as_it_was(root, monkeypatch, at: str, over_older: bool) -> None:
    folder, rename = root / "above" / "folder", Path.rename
    write_text(folder / "old", "old")

    def interrupted(path: Path, target: Path) -> None:
        if target == folder and path.name == "made":
            raise KeyboardInterrupt
        rename(path, target)

    def write() -> None:
        with new_folder(folder, over_older=over_older) as made:
            (made / "in").mkdir(0o700)
            (made / "in" / "new").write_text("new", encoding="utf-8")
            (made / "in" / "new").chmod(0o600)
            if at == "within":
                raise KeyboardInterrupt

    if at == "named":
        monkeypatch.setattr(Path, "rename", interrupted)
    if over_older and at == "nowhere":
        write()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
        assert modes == {"folder": 0o755, "in": 0o755, "new": 0o644}
    else:
        with pytest.raises(OSError if at == "nowhere" else KeyboardInterrupt):
            write()
        assert [path.name for path in folder.iterdir()] == ["old"]
    assert list(folder.parent.iterdir()) == [folder]


def test_outside_a_clone_the_revision_is_unknown() -> None:
    assert git_revision() == "unknown"
