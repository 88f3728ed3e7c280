"""A stored entry covers its tokens in every layer: one that lacks any part, or has it twice or shorter, is never used.

Each loss is made at a random place, and all that follows from it (hashes, header, the file's name) is made right again,
as by a program that writes such files and errs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.kvfile import file_name
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.droidspeak.tensor_bytes import bytes_of
from firsttoken.study.errors import CacheError

CONTEXT, EDGES, TIMES = list(range(20)), (0, 2), 120
ROOM = {"memory_bytes": 0, "disk_bytes": 1 << 20, "block_tokens": 4}
Tensors = dict[str, Tensor]


def lose_a_piece(tensors: Tensors, draw: random.Random) -> None:
    del tensors[draw.choice([name for name in tensors if name != "tokens"])]


def shorten_a_piece(tensors: Tensors, draw: random.Random) -> None:
    """By some of its last tokens, or its first."""
    name, cut = draw.choice([name for name in tensors if name != "tokens"]), draw.randint(1, 19)
    kept = slice(cut, None) if draw.random() < 0.5 else slice(None, -cut)
    tensors[name] = (tensors[name][:, kept] if "edge" in name else tensors[name][..., kept, :]).clone()


def claim_more_tokens(tensors: Tensors, draw: random.Random) -> None:
    more = torch.tensor([draw.randrange(100) for _ in range(draw.randint(1, 8))])
    tensors["tokens"] = torch.cat([tensors["tokens"], more])


def claim_fewer_tokens(tensors: Tensors, draw: random.Random) -> None:
    tensors["tokens"] = tensors["tokens"][: -draw.randint(1, 19)].clone()


def bring_a_layer_as_another(tensors: Tensors, draw: random.Random) -> None:
    """One beyond the model's, in the place of one of its own."""
    tensors["layer.3"] = tensors.pop(f"layer.{draw.randrange(3)}")


def lose_the_values(tensors: Tensors, draw: random.Random) -> None:
    name = f"layer.{draw.randrange(3)}"
    tensors[name] = tensors[name][:1].clone()


def double_a_piece(tensors: Tensors, draw: random.Random) -> None:
    tensors[f"layer.{draw.choice([3, 7])}"] = tensors[f"layer.{draw.randrange(3)}"].clone()


def lose_a_head(tensors: Tensors, draw: random.Random) -> None:
    name = f"layer.{draw.randrange(3)}"
    tensors[name] = tensors[name][:, :, :1].clone()


def round_a_piece(tensors: Tensors, draw: random.Random) -> None:
    name = draw.choice([name for name in tensors if name != "tokens"])
    tensors[name] = tensors[name].half()


LOSSES: list[Callable[[Tensors, random.Random], None]] = [
    *(lose_a_piece, shorten_a_piece, claim_more_tokens, claim_fewer_tokens, bring_a_layer_as_another),
    *(lose_the_values, double_a_piece, lose_a_head, round_a_piece),
]


def written(folder: Path, model: ModelIdentity, tensors: Tensors) -> Path:
    """A file of ``tensors`` that is right in all else."""
    entry = Entry(model, tensors["tokens"].numpy().tobytes(), EDGES)
    sums = {name: hashlib.sha256(bytes_of(one)).hexdigest() for name, one in tensors.items()}
    metadata = {"format": "firsttoken-kv-1", "model": asdict(model), "edges": list(EDGES), "sha256": sums}
    path = folder / file_name(entry.key)
    texts = {name: what if isinstance(what, str) else json.dumps(what) for name, what in metadata.items()}
    save_file(tensors, path, texts)
    return path


def restored(store: KVStore, model: ModelIdentity, group: Group, context: list[int]) -> dict[Any, Tensor]:
    """All that an engine would take of ``context``, whose last token is computed."""
    source = StoredPrefix(store, [*context, 99], sender=model, receiver=model, group=group)
    came: dict[Any, Tensor] = dict(source.arrived())
    assert source.complete and all(kv.shape[3] >= source.tokens for kv in came.values())
    if group.needs_e_cache:
        came["edge"] = source.hidden_states()
    return came | {"tokens": torch.tensor(context[: source.tokens])}


def test_what_was_written_right_is_used(tmp_path, identity, drawn) -> None:
    """Else the losses below would show nothing."""
    model = identity()
    cache = drawn(model, CONTEXT, EDGES)
    KVStore(tmp_path / "first", **ROOM).store(CONTEXT, model, cache)
    (path,) = (tmp_path / "first").iterdir()
    (tmp_path / "again").mkdir()
    assert written(tmp_path / "again", model, load_file(path)).name == path.name
    came = restored(KVStore(tmp_path / "again", **ROOM), model, Group(2, 3), CONTEXT)
    assert len(came["tokens"]) == 20 and torch.equal(came["edge"], cache.e_cache[2])
    assert all(torch.equal(came[layer], torch.stack(cache.kv[layer])) for layer in (0, 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_an_entry_that_lacks_any_part_is_never_used(tmp_path, identity, drawn, loss) -> None:
    model, draw = identity(), random.Random(loss.__name__)
    KVStore(tmp_path / "whole", **ROOM).store(CONTEXT, model, drawn(model, CONTEXT, EDGES))
    (path,) = (tmp_path / "whole").iterdir()
    whole = load_file(path)
    for turn in range(TIMES // len(LOSSES)):
        folder, tensors = tmp_path / str(turn), dict(whole)
        folder.mkdir()
        loss(tensors, draw)
        torn = written(folder, model, tensors)
        store = KVStore(folder, **ROOM)
        context = tensors["tokens"].tolist()
        assert len(store) == 0 and store.match(context, model) == 0 and not torn.exists()
        with pytest.raises(CacheError, match="compute and store it"):
            restored(store, model, draw.choice([Group(0, 0), Group(2, 3)]), context)


@pytest.mark.parametrize("seed", range(20))
def test_a_piece_that_is_torn_while_the_store_is_open_ends_it(tmp_path, identity, drawn, seed: int) -> None:
    """Cut or changed anywhere: whoever takes the prefix has an error, and from then on nothing is stored."""
    model, draw = identity(), random.Random(seed)
    cache = drawn(model, CONTEXT, EDGES)
    store = KVStore(tmp_path, **ROOM)
    store.store(CONTEXT, model, cache)
    located, _ = store.locate(CONTEXT, model)
    raw = bytearray(located.path.read_bytes())
    span = located.spans[draw.choice(["layer.0", "layer.1", "edge.2"])]
    at = span.offset + draw.randrange(span.nbytes)
    if draw.random() < 0.5:
        raw[at] ^= draw.randint(1, 255)
    else:
        del raw[at:]
    with located.path.open("r+b") as opened:
        opened.write(raw)
        opened.truncate(len(raw))
    with pytest.raises(CacheError, match="compute the prefix again"):
        restored(store, model, Group(2, 3), CONTEXT)
    assert store.match(CONTEXT, model) == 0
