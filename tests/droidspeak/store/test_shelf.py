"""Two tiers: bounds hold, the least recently used goes first, and readers see whole entries only."""

from __future__ import annotations

import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.kvfile import draft
from firsttoken.droidspeak.prefix_index import token_bytes
from firsttoken.droidspeak.store import KVStore
from firsttoken.study.errors import CacheError, RequestError

BLOCK = 2
contexts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
models = st.sampled_from(["aa", "bb"])
operations = st.one_of(
    st.tuples(st.just("store"), models, contexts, st.sets(st.integers(0, 2), max_size=2), st.integers(0, 99)),
    st.tuples(st.just("fetch"), models, contexts, st.integers(0, 2)),
    st.tuples(st.just("fetch"), models, contexts, st.integers(0, 2)),
    st.tuples(st.just("edge"), models, contexts, st.integers(0, 2)),
    st.tuples(st.just("reopen")),
)


class Reference:
    """What a store of ``limit`` bytes must hold: entries in the order of coming, and their keys in that of use."""

    def __init__(self, limit: int) -> None:
        self.limit, self.entries, self.used = limit, {}, []

    def store(self, key, cache, size) -> bool:
        if size > self.limit:
            return False
        self._drop(key)
        while size + sum(held for _, held in self.entries.values()) > self.limit:
            self._drop(self.used[0])
        self.entries[key] = cache, size
        self.used.append(key)
        return True

    def find(self, model, context, edge=None):
        """The cache with the longest prefix, the newest of several, and its length; marks it as used."""
        best, length = None, 0
        for key, (cache, _) in self.entries.items():
            if key[0] == model and (edge is None or edge in cache.e_cache):
                common = 0
                while common < min(len(key[1]), len(context)) and key[1][common] == context[common]:
                    common += 1
                common = common if key[1] == context else common // BLOCK * BLOCK
                if common and common >= length:
                    best, length = key, common
        if best is None:
            return None, 0
        self.used.remove(best)
        self.used.append(best)
        return self.entries[best][0], length

    def reopen(self) -> None:
        self.entries = {key: self.entries[key] for key in self.used}

    def _drop(self, key) -> None:
        if self.entries.pop(key, None):
            self.used.remove(key)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(operations, max_size=25),
    st.sampled_from([0, 300, 700, 5000]),
    st.sampled_from([None, 1000, 4000, 7000]),
)
def test_whatever_happens_bounds_hold_and_what_was_stored_comes_back(identity, drawn, todo, memory, disk):
    with tempfile.TemporaryDirectory() if disk else nullcontext() as name:
        folder = Path(name) / "kv" if disk else None
        room = {"memory_bytes": memory, "disk_bytes": disk or 0, "block_tokens": BLOCK}
        store, expected = KVStore(folder, **room), Reference(disk or memory)
        for what, *given_ in todo:
            if what == "reopen":
                if disk:
                    store = KVStore(folder, **room)
                    expected.reopen()
                continue
            model, context = identity(weights=given_[0]), given_[1]
            if what == "store":
                cache = drawn(model, context, sorted(given_[2]), given_[3])
                entry = Entry(model, token_bytes(context), tuple(sorted(cache.e_cache)))
                pieces = entry.pieces(cache)
                size = sum(piece.nbytes for piece in pieces.values())
                if disk:
                    size = draft(folder / "any", entry, pieces).file.nbytes
                if expected.store((model.key, context), cache, size):
                    store.store(context, model, cache)
                else:
                    with pytest.raises(CacheError, match=f"takes {size:,} bytes.*has {expected.limit:,}; raise"):
                        store.store(context, model, cache)
            else:
                layer, edge = given_[2], given_[2] if what == "edge" else None
                cache, length = expected.find(model.key, context, edge)
                assert store.match(context, model, edge) == length
                fetch = store.fetch if edge is None else store.fetch_e_cache
                if cache is None:
                    with pytest.raises(CacheError):
                        fetch(context, model, layer)
                elif what == "edge":
                    assert torch.equal(fetch(context, model, layer), cache.e_cache[layer][:, :length])
                else:
                    keys, values = fetch(context, model, layer)
                    assert torch.equal(keys, cache.kv[layer].keys[:, :, :length])
                    assert torch.equal(values, cache.kv[layer].values[:, :, :length])
            assert len(store) == len(expected.entries)
            in_memory, on_disk = store.used
            assert in_memory <= memory and on_disk <= (disk or 0)
            if disk:
                assert on_disk == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_who_reads_an_entry_reads_all_of_it_though_it_is_evicted(tmp_path, identity, drawn, tier):
    model, context, other = identity(), list(range(20)), list(range(20, 40))
    cache = drawn(model, context)
    room = {"memory_bytes": 2500, "disk_bytes": 0} if tier == "memory" else {"memory_bytes": 0, "disk_bytes": 5000}
    store = KVStore(tmp_path if tier == "disk" else None, **room)
    store.store(context, model, cache)
    with store.open(context, model) as reading:
        store.store(other, model, drawn(model, other, seed=1))
        assert len(store) == 1 and store.match(context, model) == 0
        for layer, kv in enumerate(cache.kv):
            assert torch.equal(reading.piece(f"layer.{layer}"), torch.stack(kv))
    assert store.used[0] <= room["memory_bytes"] and store.match(other, model) == 20


def test_a_torn_file_does_not_take_its_replacement_along(tmp_path, identity, drawn):
    model, context = identity(), list(range(20))
    store = KVStore(tmp_path, memory_bytes=0, disk_bytes=1 << 20)
    store.store(context, model, drawn(model, context))
    with store.open(context, model) as reading:
        with reading.file.path.open("r+b") as file:
            file.truncate(reading.file.nbytes - 1)
        again = drawn(model, context, seed=1)
        store.store(context, model, again)
        with pytest.raises(CacheError, match="torn"):
            reading.piece("layer.2")
    with store.open(context, model) as reading:
        assert torch.equal(reading.piece("layer.2"), torch.stack(again.kv[2]))


@pytest.mark.parametrize("on_disk", [False, True])
def test_readers_and_writers_at_once(tmp_path, identity, drawn, on_disk):
    model = identity()
    contexts = [[first, *range(20)] for first in range(6)]
    caches = [drawn(model, context, seed=i) for i, context in enumerate(contexts)]
    store = KVStore(tmp_path if on_disk else None, memory_bytes=5000, disk_bytes=12_000)  # room for two, for three
    for context, cache in zip(contexts, caches, strict=True):
        store.store(context, model, cache)
    wrong, read = [], []

    def reader(seed: int) -> None:
        for turn in range(120):
            which = (turn * (seed + 2) + seed) % len(contexts)
            try:
                found = store.fetch(contexts[which], model, turn % 3)
            except CacheError as error:
                if "compute and store it" not in str(error):
                    wrong.append(error)
            except Exception as error:
                wrong.append(error)
            else:
                read.append(which)
                if not torch.equal(found.keys, caches[which].kv[turn % 3].keys):
                    wrong.append(which)

    def writer(seed: int) -> None:
        try:
            for turn in range(40):
                which = (turn * 5 + seed) % len(contexts)
                store.store(contexts[which], model, caches[which])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=reader, args=[i]) for i in range(4)]
    threads += [threading.Thread(target=writer, args=[i]) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and read
    in_memory, used = store.used
    assert in_memory <= 5000 and used <= 12_000 and len(store) == (3 if on_disk else 2)
    assert used == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_use_counts_when_the_folder_is_opened_again(tmp_path, identity, drawn):
    model, contexts = identity(), [[first, *range(20)] for first in range(3)]
    store = KVStore(tmp_path, memory_bytes=1 << 20, disk_bytes=1 << 20)
    for context in contexts:
        store.store(context, model, drawn(model, context))
    store.fetch(contexts[0], model, 0)  # from memory: the file is marked all the same
    smaller = KVStore(tmp_path, memory_bytes=0, disk_bytes=store.used[1] - 1)
    assert [smaller.match(context, model) for context in contexts] == [21, 0, 21]
    assert len(list(tmp_path.iterdir())) == 2
    tiny = KVStore(tmp_path, memory_bytes=0, disk_bytes=1000)
    assert len(tiny) == 0 and list(tmp_path.iterdir()) == []


def test_blocks_may_be_of_another_size_when_a_folder_is_opened_again(tmp_path, identity, drawn):
    model, context = identity(), list(range(20))
    room = {"memory_bytes": 0, "disk_bytes": 1 << 20}
    KVStore(tmp_path, **room, block_tokens=16).store(context, model, drawn(model, context))
    asked = [*context[:19], 99]
    assert [KVStore(tmp_path, **room, block_tokens=size).match(asked, model) for size in (16, 7, 1)] == [16, 14, 19]


@pytest.mark.parametrize("wrong", [{"memory_bytes": -1}, {"disk_bytes": -1}, {"block_tokens": 0}])
def test_sizes_that_make_no_sense(wrong):
    with pytest.raises(RequestError, match="must be at least 0, 0 and 1"):
        KVStore(None, **({"memory_bytes": 0} | wrong))
