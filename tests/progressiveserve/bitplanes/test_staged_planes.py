"""A checkpoint in planes: exact in the end, and refused where it is not whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from loads import Loads, check_exact, refused, retold, rewritten, source_answer

from firsttoken.__main__ import main
from firsttoken.progressiveserve.checkpoint.plan import Stage
from firsttoken.study.errors import ModelError, StageError
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plane_plan import by_planes

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("split", SPLITS)
def test_every_stage_is_nearer_and_the_last_exact(stage_planes, ids, split, dtype):
    staged = stage_planes(split, dtype)
    loads, exact, found = Loads(staged), source_answer(staged, ids), []
    for stage in range(1, len(loads.manifest.stages) + 1):
        found.append(float((loads.answer(ids, loads.bring(stage)) - exact).abs().max()))
    check_exact(staged, loads.model)
    assert len(found) == planes_of(split) and found[-1] == 0
    assert all(later < earlier for earlier, later in pairwise(found))


def test_all_planes_in_one_load(stage_planes, ids):
    staged = stage_planes("bits in three", tied=False, kind="qwen2")
    loads = Loads(staged)
    view = loads.bring(1, 2, 3)
    assert torch.equal(loads.answer(ids, view), source_answer(staged, ids))
    assert sum(link.bytes_moved for link in loads.links) == staged.manifest.bytes


def test_weights_refine_where_they_are(stage_planes):
    """No second copy: a parameter keeps its memory, the view before it has the better bits too."""
    loads = Loads(stage_planes("bits"))
    before = loads.bring(1)
    places = [parameter.data_ptr() for parameter in before.layers.parameters()]
    after = loads.bring(2)
    assert [parameter.data_ptr() for parameter in after.layers.parameters()] == places


@pytest.mark.parametrize("split", ["bits", "4 bits"])
def test_a_load_that_is_tried_again_merges_nothing_twice(stage_planes, ids, split):
    staged = stage_planes(split)
    wanted = source_answer(staged, ids)
    loads = Loads(staged)
    loads.bring(1)
    spoilt = staged.folder / staged.manifest.stages[1].parts[4].file
    content = spoilt.read_bytes()
    spoilt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match="wrong sha256"):
        loads.bring(2)
    spoilt.write_bytes(content)
    loads.bring(2)
    assert torch.equal(loads.answer(ids), wanted)


def test_what_is_stored_narrow_may_compute_wide(stage_planes):
    staged = stage_planes("6 bits", F16)
    loads = Loads(staged, dtype=F32)
    loads.bring(1)
    loads.bring(2)
    check_exact(staged, loads.model)


def test_a_dtype_that_does_not_hold_what_is_stored_is_refused(stage_planes):
    """fp16 has more bits of mantissa than bf16: rounded, they could not be refined."""
    loads = Loads(stage_planes("bits", F16), dtype=BF16)
    loads.bring(1)
    with pytest.raises(ModelError, match=r"is stored as torch.float16 and computes as torch.bfloat16, which does not"):
        loads.bring(2)


# what is refused


def cut_otherwise(**told):
    """The same plane, of which the manifest says something else of each tensor."""
    return lambda part: told_otherwise(cut={name: tensor | told for name, tensor in part.content["cut"].items()})(part)


def told_otherwise(**told):
    """The same file, of which the manifest says something else."""
    return lambda part: [replace(part, content=part.content | told)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (told_otherwise(plane=0), "has a plane of .* that the split 'bits' of BF16 has not"),
        (told_otherwise(plane=2), "has a plane of .* that the split 'bits' of BF16 has not"),
        (told_otherwise(split="bytes"), "the split 'bytes' of BF16 has not"),
        (told_otherwise(split=""), "is cut and names no split"),
        (told_otherwise(split="4 bits"), "has no stream|has a plane of|and decoded it has"),
        (cut_otherwise(sha256="0" * 64), "holds .* of another checkpoint"),
        (cut_otherwise(dtype="F16"), "has a plane of .* that the split 'bits' of F16 has not"),
        (cut_otherwise(shape=(1 << 40, 1 << 20)), "and decoded it has"),
        (cut_otherwise(codecs=("raw",)), "has a plane of"),
        (cut_otherwise(codecs=("gzip", "raw")), "'gzip' is not known"),
    ],
    ids=["first", "third", "unknown", "none", "other", "mixed", "dtype", "huge", "streams", "codec"],
)
def test_a_manifest_that_tells_planes_otherwise(stage_planes, change, words):
    staged = stage_planes("bits")
    index = [part.layer for part in staged.manifest.stages[1].parts].index(1)
    retold(staged, 2, index, change)
    refused(staged, words)


def test_a_plane_that_no_stage_brings(stage_planes):
    staged = stage_planes("bits")
    retold(staged, 2, len(staged.manifest.stages[1].parts) - 1, lambda part: [])
    refused(staged, "layer 5 .* lacks 1 of its planes: name them in a later stage; stage it again")


def test_a_coded_stream_that_expands_beyond_its_declared_size(stage_planes):
    import zstandard

    staged = stage_planes("bits", F16)
    part = staged.manifest.stages[0].parts[2]
    name = next(name for name, tensor in part.coding.cut.items() if name == GATE and tensor.codecs == ("zstd",))
    bomb = zstandard.compress(bytes(1 << 26))

    def swell(streams):
        streams[f"{name}.plane0.0"] = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)

    rewritten(staged, 1, 2, swell)
    if len(bomb) <= part.carried[name].shape[0] * part.carried[name].shape[1]:
        refused(staged, "would expand to 67,108,864 bytes, by its shape")
    else:
        refused(staged, "and decoded it has")


def test_plans_that_do_not_hold(stage_planes):
    staged = stage_planes("bits in three")
    shapes = {name: tuple(tensor.shape) for name, tensor in staged.served.model.named_parameters()}
    plan = by_planes(shapes, "bits in three")
    first, second, third = plan.stages
    for stages, words in (
        ((first, third, second), "comes as plane 2 where plane 1 is due"),
        ((first, second), "lacks 1 of its planes"),
        ((first, second, second, third), "comes as plane 1 where plane 2 is due"),
        ((first, recut(second, split="bits"), third), "comes as plane . where plane"),
        ((recut(first, split="bytes"), second, third), "is cut by 'bytes': no split of weights is called so"),
        ((replace_part(first, dtype="F8_E5M2"), second, third), "is rounded and comes in planes; choose one"),
        ((first, second, replace_part(third, coding=None)), "came in planes and comes again whole"),
    ):
        with pytest.raises(StageError, match=words):
            replace(plan, stages=stages).check(list(shapes))
    with pytest.raises(StageError, match="no split of weights is called 'half'"):
        by_planes(shapes, "half")


def recut(stage: Stage, **told) -> Stage:
    return replace_part(stage, coding=replace(stage.parts[1].coding, **told))


def replace_part(stage: Stage, **told) -> Stage:
    return replace(stage, parts=(stage.parts[0], replace(stage.parts[1], **told), *stage.parts[2:]))


def test_the_command_line_stages_planes(tmp_path, capsys):
    chosen = ["--set", "model=random:tiny-6", "--set", "dtype=bfloat16"]
    assert main(["stage", str(tmp_path / "staged"), "--planes", "bits", *chosen]) == 0
    assert "stage 2 (plane-2): 7 files" in capsys.readouterr().out
    assert main(["stage", str(tmp_path / "staged"), "--planes", "bits", *chosen]) == 0, "what is there is kept"
    assert main(["stage", str(tmp_path / "other"), "--planes", "bits", "--adapters", "ours", *chosen]) == 2
    assert "this plan has others" in capsys.readouterr().err
