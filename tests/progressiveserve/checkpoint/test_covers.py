"""A manifest brings every byte of the model once: whatever part of it is lost, doubled or shortened is found.

The manifests are those of random plans; each is changed at a random place, and everything in it that follows from the
change is made right again, as somebody would who knows how it is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from coarse_plans import coarse_first

from firsttoken.assets.servable import model_shapes
from firsttoken.progressiveserve.checkpoint.manifest import (
    Manifest,
    PartFile,
    StageFiles,
    check_complete,
    check_layout,
    part_file,
)
from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, by_layers
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.parse_errors import ParseError
from firsttoken_extras.bitplanes.plane_plan import by_planes

LAYERS, TIMES = 4, 60
Parts = list[list[PartFile]]


def random_groups(dice: random.Random) -> list[list[int]]:
    order = dice.sample(range(LAYERS), LAYERS)
    cuts = sorted(dice.sample(range(1, LAYERS), dice.randrange(LAYERS)))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True)]


PLANS: dict[str, Callable[[FolderSource, random.Random], LoadPlan]] = {
    "layers": lambda source, dice: by_layers(source.names, random_groups(dice)),
    "rounded first": lambda source, dice: coarse_first(source.names, LAYERS),
    "planes": lambda source, dice: by_planes(source.shapes, "8 bits"),
}


def retiled(part: PartFile, names: list[str]) -> PartFile:
    """``part`` with the tensors ``names`` of it, one after another in its file."""
    at, tensors = part.data_start, {}
    for name in names:
        size = part.tensors[name].end - part.tensors[name].start
        tensors[name] = replace(part.tensors[name], start=at, end=at + size)
        at += size
    return replace(part, tensors=tensors, bytes=at)


def lose_a_stage(parts: Parts, dice: random.Random) -> None:
    parts.pop(dice.randrange(len(parts)))


def lose_a_part(parts: Parts, dice: random.Random) -> None:
    stage = dice.choice(parts)
    stage.pop(dice.randrange(len(stage)))


def double_a_part(parts: Parts, dice: random.Random) -> None:
    dice.choice(parts).append(dice.choice(dice.choice(parts)))


def lose_a_tensor(parts: Parts, dice: random.Random) -> None:
    """With its streams, where it is cut."""
    stage = dice.choice(parts)
    place = dice.randrange(len(stage))
    part = stage[place]
    name = dice.choice(list(part.carried))
    gone = {name, *(() if name in part.tensors else part.coding.entries(name))}
    if kept := [one for one in part.tensors if one not in gone]:
        cut = {one: tensor for one, tensor in part.content.get("cut", {}).items() if one != name}
        told = {"format": part.format, "content": part.content | {"cut": cut}} if cut else {"format": "", "content": {}}
        stage[place] = retiled(replace(part, **told), kept)
    else:
        stage.pop(place)


def shorten_a_tensor(parts: Parts, dice: random.Random) -> None:
    """A row less, and its bytes gone from the file; of one in planes, its shape alone."""
    stage = dice.choice(parts)
    place = dice.randrange(len(stage))
    part = stage[place]
    name = dice.choice(list(part.carried))
    if name not in part.tensors:
        tensor = part.content["cut"][name]
        shape = [tensor["shape"][0] - 1, *tensor["shape"][1:]]
        cut = part.content["cut"] | {name: tensor | {"shape": shape}}
        stage[place] = replace(part, content=part.content | {"cut": cut})
        return
    entry = part.tensors[name]
    shorter = replace(
        entry,
        shape=(entry.shape[0] - 1, *entry.shape[1:]),
        end=entry.end - (entry.end - entry.start) // entry.shape[0],
    )
    stage[place] = retiled(replace(part, tensors=part.tensors | {name: shorter}), list(part.tensors))


def leave_a_byte(parts: Parts, dice: random.Random) -> None:
    stage = dice.choice(parts)
    place = dice.randrange(len(stage))
    stage[place] = replace(stage[place], bytes=stage[place].bytes + dice.choice([-1, 1]))


def exchange_two_stages(parts: Parts, dice: random.Random) -> None:
    """Of one stage, it is lost."""
    if len(parts) == 1:
        parts.clear()
    else:
        first, second = dice.sample(range(len(parts)), 2)
        parts[first], parts[second] = parts[second], parts[first]


CHANGES = [
    *(lose_a_stage, lose_a_part, double_a_part, lose_a_tensor, shorten_a_tensor, leave_a_byte),
    exchange_two_stages,
]


def told(manifest: Manifest, parts: Parts) -> Manifest:
    """``manifest`` of ``parts``, each under the name that its place gives it."""
    stages = []
    for number, (name, mine) in enumerate(zip("ABCDEFGH", parts, strict=False), 1):
        placed = [replace(one, file=part_file(number, name, at, one.name)) for at, one in enumerate(mine)]
        stages.append(StageFiles(name, tuple(placed), None))
    return replace(manifest, stages=tuple(stages))


def check(manifest: Manifest, source: FolderSource) -> None:
    check_layout(manifest)
    check_complete(source._folder, manifest, model_shapes(source._folder, source._files.config))


@pytest.mark.parametrize("kind", PLANS)
def test_a_manifest_that_brings_anything_else_than_every_byte_once_is_found(kind, saved, tmp_path):
    dice = random.Random(f"covers {kind}")
    source = FolderSource(saved(dtype=torch.bfloat16)[1])
    manifests = [
        write_staged(source, PLANS[kind](source, dice), tmp_path / f"{kind} {n}")
        for n in range(3 if kind == "layers" else 1)
    ]
    for turn in range(TIMES):
        manifest = dice.choice(manifests)
        parts = [list(stage.parts) for stage in manifest.stages]
        change = CHANGES[turn % len(CHANGES)]
        check(told(manifest, parts), source)
        change(parts, dice)
        if change is exchange_two_stages and parts and kind == "layers" and _ends_first(parts):
            continue
        with pytest.raises((ModelError, ParseError)):
            check(told(manifest, parts), source)


def _ends_first(parts: Parts) -> bool:
    """Whether the first stage brings the embedding still: then layers in another order are another sound plan."""
    return any(part.layer is None for part in parts[0])


def test_what_is_written_is_checked_as_what_is_read(saved, tmp_path, monkeypatch):
    """A writer that loses a part of a plan ends with an error, and no folder appears under its name."""
    source = FolderSource(saved()[1])
    plan = by_layers(source.names, [[0, 1, 2, 3]])
    monkeypatch.setattr("firsttoken.progressiveserve.checkpoint.writer.islice", lambda files, count: list(files)[:-1])
    with pytest.raises(ModelError, match=r"hole: model\.norm\.weight is in no stage"):
        write_staged(source, plan, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()
