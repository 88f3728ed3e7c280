"""A folder that others write to and take from: what they do shows, and none of their files is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.identity import check_compatible, difference
from firsttoken.droidspeak.store import KVStore
from firsttoken.study.errors import CacheError

CONTEXTS = [list(range(first, first + 32)) for first in range(0, 120, 40)]


def opened(folder: Path) -> KVStore:
    return KVStore(folder, memory_bytes=0, disk_bytes=sys.maxsize)


def test_what_another_puts_and_takes_shows_after_a_look(tmp_path, identity, drawn) -> None:
    model = identity()
    mine, other = opened(tmp_path), opened(tmp_path)
    assert not mine.refresh()
    other.store(CONTEXTS[0], model, drawn(model, CONTEXTS[0]))
    assert mine.match(CONTEXTS[0], model) == 0
    assert mine.refresh() and mine.match(CONTEXTS[0], model) == 32 and len(mine) == 1
    assert not mine.refresh()
    (file,) = other.files
    other.drop(file.entry.key)
    with pytest.raises(CacheError, match="No such file or directory; compute the prefix again"):
        mine.fetch(CONTEXTS[0], model, 0)
    assert mine.refresh() is False and len(mine) == 0, "who finds that a file is gone has noticed it"


def test_a_file_that_was_replaced_is_read_anew_and_stays(tmp_path, identity, drawn) -> None:
    model = identity()
    mine, other = opened(tmp_path), opened(tmp_path)
    other.store(CONTEXTS[0], model, drawn(model, CONTEXTS[0]))
    mine.refresh()
    other.store(CONTEXTS[0], model, drawn(model, CONTEXTS[0], edges=[1], seed=1))
    assert mine.refresh() and mine.match(CONTEXTS[0], model, 1) == 32
    assert mine.fetch_e_cache(CONTEXTS[0], model, 1).shape == (1, 32, 5)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_gone_holds_nothing(tmp_path, identity, drawn) -> None:
    model = identity()
    store = opened(tmp_path / "store")
    store.store(CONTEXTS[0], model, drawn(model, CONTEXTS[0]))
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    (tmp_path / "store").rmdir()
    assert store.refresh() and len(store) == 0 and store.used == (0, 0)


def test_what_is_torn_or_no_prefix_is_passed_over(tmp_path, identity, drawn) -> None:
    model = identity()
    mine, other = opened(tmp_path), opened(tmp_path)
    other.store(CONTEXTS[0], model, drawn(model, CONTEXTS[0]))
    (file,) = (file.path for file in other.files)
    file.write_bytes(file.read_bytes()[:-200])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'a' * 32}.kv.safetensors").write_bytes(b"{}")
    os.mkdir(tmp_path / f"{'b' * 32}.kv.safetensors")
    assert not mine.refresh() and len(mine) == 0 and len(list(tmp_path.iterdir())) == 4


def test_a_key_that_is_not_there_cannot_be_dropped(tmp_path) -> None:
    with pytest.raises(CacheError, match="no prefix 'nosuch' is stored; `firsttoken prefix list` names them"):
        opened(tmp_path).drop("nosuch")


@settings(max_examples=40, deadline=None)
@given(
    deeds=st.lists(st.tuples(st.sampled_from(["put", "drop", "look"]), st.integers(0, 2), st.booleans()), max_size=14)
)
def test_two_stores_over_one_folder_agree_once_they_look(tmp_path_factory, identity, drawn, deeds) -> None:
    folder, model = tmp_path_factory.mktemp("shared"), identity()
    stores = [opened(folder), opened(folder)]
    held: set[int] = set()
    for deed, number, first in deeds:
        store, context = stores[first], CONTEXTS[number]
        store.refresh()
        if deed == "put":
            store.store(context, model, drawn(model, context, seed=number))
            held.add(number)
        elif deed == "drop" and number in held:
            store.drop(store.locate(context, model)[0].entry.key)
            held.discard(number)
    for store in stores:
        store.refresh()
        assert {number for number, context in enumerate(CONTEXTS) if store.match(context, model)} == held
        assert store.used[1] == sum(file.stat().st_size for file in folder.iterdir())
        for number in held:
            assert store.fetch(CONTEXTS[number], model, 0).keys.equal(
                drawn(model, CONTEXTS[number], seed=number).kv[0].keys
            )


# Whose a prefix is.


def test_an_owner_is_part_of_who_it_is(identity: Callable, tmp_path, drawn) -> None:
    public, alice, bob = identity(), identity(owner="alice"), identity(owner="bob")
    assert len({public.key, alice.key, bob.key}) == 3 and alice.anybody == public == public.anybody
    store = opened(tmp_path)
    store.store(CONTEXTS[0], alice, drawn(alice, CONTEXTS[0]))
    assert [store.match(CONTEXTS[0], who) for who in (public, alice, bob)] == [0, 32, 0]
    again = opened(tmp_path)
    assert again.match(CONTEXTS[0], alice) == 32 and again.models == [alice]
    for who in (public, bob):
        with pytest.raises(CacheError, match="no stored context of"):  # and not whose it is
            again.fetch(CONTEXTS[0], who, 0)


def test_only_the_owner_may_use_it(identity: Callable) -> None:
    public, alice, bob = identity(), identity(owner="alice"), identity(owner="bob")
    assert difference(public, alice) == difference(alice, alice) == ""
    for who in (public, bob):
        with pytest.raises(CacheError, match="another owner; prefill without it"):
            check_compatible(alice, who)
