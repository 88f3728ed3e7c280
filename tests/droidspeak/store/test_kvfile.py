"""A KV file: any safetensors reader opens it, and a changed byte is found out."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from firsttoken.droidspeak.store import KVStore
from firsttoken.study.errors import CacheError

CONTEXT = list(range(20))
ROOM = {"memory_bytes": 0, "disk_bytes": 1 << 20}


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def stored(tmp_path, identity, drawn):
    store, model = KVStore(tmp_path, **ROOM), identity()
    cache = drawn(model, CONTEXT, edges=[1])
    store.store(CONTEXT, model, cache)
    return store, model, cache


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_reader_of_safetensors_opens_it(tmp_path, identity, drawn, dtype):
    model = identity(dtype=dtype)
    cache = drawn(model, CONTEXT, edges=[0, 2])
    KVStore(tmp_path, **ROOM).store(CONTEXT, model, cache)
    with safe_open(the_file(tmp_path), framework="pt") as file:
        assert set(file.keys()) == {"tokens", "layer.0", "layer.1", "layer.2", "edge.0", "edge.2"}
        assert file.get_tensor("tokens").tolist() == CONTEXT
        for layer, kv in enumerate(cache.kv):
            assert torch.equal(file.get_tensor(f"layer.{layer}"), torch.stack(kv))
        assert torch.equal(file.get_tensor("edge.2"), cache.e_cache[2])


def test_a_link_finds_every_piece_at_its_place(stored):
    store, model, cache = stored
    located, tokens = store.locate([*CONTEXT, 99], model)
    assert tokens == 16 and set(located.spans) == {"layer.0", "layer.1", "layer.2", "edge.1"}
    raw = located.path.read_bytes()
    for name, span in located.spans.items():
        part = bytearray(raw[span.offset : span.offset + span.nbytes])
        found = torch.frombuffer(part, dtype=span.dtype).view(span.shape)
        layer = int(name[-1])
        assert torch.equal(found, torch.stack(cache.kv[layer]) if "layer" in name else cache.e_cache[layer])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_byte_changes_no_wrong_number_comes_out(identity, drawn, data):
    model = identity()
    cache = drawn(model, CONTEXT, edges=[1])
    with tempfile.TemporaryDirectory() as name:
        KVStore(Path(name), **ROOM).store(CONTEXT, model, cache)
        path = the_file(Path(name))
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans(), label="cut"):
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        else:
            header = 8 + int.from_bytes(raw[:8], "little")
            place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(header, len(raw) - 1)), label="place")
            raw[place] ^= data.draw(st.integers(1, 255), label="change")
        path.write_bytes(raw)
        again = KVStore(Path(name), **ROOM)
        for layer, kv in enumerate(cache.kv):
            try:
                found = again.fetch(CONTEXT, model, layer)
            except CacheError:
                continue
            assert torch.equal(found.keys, kv.keys) and torch.equal(found.values, kv.values)
        with contextlib.suppress(CacheError):
            assert torch.equal(again.fetch_e_cache(CONTEXT, model, 1), cache.e_cache[1])


def test_opening_removes_torn_files_and_leaves_others_alone(stored, identity, drawn):
    store, model, cache = stored
    whole = store.locate(CONTEXT, model)[0].path
    foreign = ["model.safetensors", f".{whole.stem}-x1.safetensors", "notes.kv.safetensors"]
    for name in foreign:
        (whole.parent / name).write_bytes(whole.read_bytes()[:-1])
    torn = whole.with_name("0" * 32 + ".kv.safetensors")
    torn.write_bytes(whole.read_bytes()[:-1])
    renamed = whole.with_name("1" * 32 + ".kv.safetensors")
    renamed.write_bytes(whole.read_bytes())
    again = KVStore(whole.parent, **ROOM)
    assert {path.name for path in whole.parent.iterdir()} == {whole.name, *foreign}
    assert len(again) == 1 and again.used == (0, whole.stat().st_size)
    assert torch.equal(again.fetch(CONTEXT, model, 2).keys, cache.kv[2].keys)


def test_a_full_disk_is_said_and_what_is_there_stays(small_disk, identity, drawn):
    model = identity(head_dim=512)
    store = KVStore(small_disk / "kv", memory_bytes=0, disk_bytes=1 << 30)
    first = drawn(model, CONTEXT)
    store.store(CONTEXT, model, first)
    large = list(range(64))
    with pytest.raises(CacheError, match=r"no KV cache can be kept in .*No space left"):
        store.store(large, model, drawn(model, large))
    assert torch.equal(store.fetch(CONTEXT, model, 0).keys, first.kv[0].keys)
    assert store.used[1] == sum(path.stat().st_size for path in (small_disk / "kv").iterdir())


def test_a_folder_that_is_none_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"kept in .*file: .*another folder"):
        KVStore(tmp_path / "file", **ROOM)


def test_a_dtype_that_is_not_kept_is_named(tmp_path, identity, drawn):
    model = identity(dtype="float64")
    with pytest.raises(CacheError, match="float64 is not kept on disk; only in float32, float16, bfloat16"):
        KVStore(tmp_path, **ROOM).store(CONTEXT, model, drawn(model, CONTEXT))
