"""A stage serves only what is whole: every edit that would have served other weights, or none, ends in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edited import set_keys
from loads import ALL, Loads, refused, retold, rewritten, stock_answer

from firsttoken.assets.lock import file_sha256
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, FileEntry, read_manifest, write_manifest
from firsttoken.progressiveserve.loading.views import check_loaded, make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.study.errors import ModelError

Q, OUT = (f"model.layers.4.self_attn.{name}_proj.weight" for name in "qo")


def swapped(part):
    """The two square matrices of a layer, each where the other lies."""
    tensors = dict(part.tensors)
    tensors[Q], tensors[OUT] = tensors[OUT], tensors[Q]
    return replace(part, tensors=tensors)


def as_bf16(part):
    """Half as many numbers, each read from four bytes as from two twice as wide."""
    entry = part.tensors[Q]
    told = replace(entry, dtype="BF16", shape=(entry.shape[0], 2 * entry.shape[1]))
    return replace(part, tensors=part.tensors | {Q: told})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swapped, r"its header and manifest\.json say different things of its tensors"),
        (as_bf16, r"layer 04 brings .*q_proj\.weight as \[32, 64\], by config\.json it has the shape \[32, 32\]"),
        (lambda part: replace(part, sha256="0" * 64), "wrong sha256"),
    ],
    ids=["swapped", "dtype", "sum"],
)
def test_a_part_that_is_told_otherwise(stage, change, words):
    staged = stage()
    retold(staged, 3, 0, lambda part: [change(part)])
    refused(staged, words)


def test_a_tensor_that_is_in_neither_manifest_nor_file(stage):
    staged = stage()
    rewritten(staged, 3, 0, lambda tensors: tensors.pop(Q))
    refused(staged, rf"hole: layer 4 \({Q}\) is in no stage")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, r"config\.json \(beside .* is altered"),
        ({"num_hidden_layers": 7}, "is altered"),
        (None, r"config\.json cannot be read: No such file"),
    ],
    ids=["angles", "depth", "missing"],
)
def test_a_config_json_that_was_not_staged(stage, change, words):
    staged = stage()
    path = staged.folder / CONFIG
    if change is None:
        path.unlink()
    else:
        set_keys(path, **change)
    refused(staged, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 7}, "hole: layer 6 .* is in no stage"),
        ({"num_hidden_layers": 5}, "brings model.layers.5.*, which the model does not have"),
        ({"tie_word_embeddings": False}, r"hole: lm_head\.weight is in no stage"),
        ({"intermediate_size": 48}, r"by config\.json it has the shape \[48, 32\]"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected 1 to 1,000, not 10000000"),
    ],
    ids=str,
)
def test_a_config_json_that_was_summed_again_and_is_of_another_model(stage, change, words):
    staged = stage()
    path, manifest = staged.folder / CONFIG, read_manifest(staged.folder)
    set_keys(path, **change)
    entry = FileEntry(path.stat().st_size, file_sha256(path))
    write_manifest(staged.folder, replace(manifest, side=manifest.side | {CONFIG: entry}))
    refused(staged, words)


def test_without_sums_a_header_is_still_held_against_the_manifest(stage):
    staged = stage()
    path = staged.folder / staged.manifest.stages[2].parts[0].file
    data = path.read_bytes()
    q, o = (f'"{name}"'.encode() for name in (Q, OUT))
    mark = b"@" * len(q)
    path.write_bytes(data.replace(q, mark).replace(o, q).replace(mark, o))
    loads = Loads(staged)
    with pytest.raises(ModelError, match=r"layer-04\.safetensors: its header and manifest\.json say"):
        loads.begin(*ALL, verify=False).wait()


def test_a_view_with_a_tensor_that_was_never_written_is_not_published(stage, ids):
    staged = stage()
    loads = Loads(staged)
    view = loads.bring(*ALL)
    check_loaded(view, range(6))
    assert torch.equal(loads.answer(ids), stock_answer(staged.folder, ids))
    unwritten = Loads(staged).meta_model.layers
    broken = make_view(3, [*view.base[:4], unwritten[4], view.base[5]], view.ends)
    with pytest.raises(ModelError, match=r"stage 3: self_attn\.q_proj\.weight of layer 4 was never brought"):
        check_loaded(broken, range(6))
    for lost in range(6):  # and one that passes a layer which its manifest brings
        thinner = [PassLayer() if i == lost else layer for i, layer in enumerate(view.base)]
        with pytest.raises(ModelError, match=f"stage 3 lacks layer {lost}, and its manifest says otherwise"):
            check_loaded(make_view(3, thinner, view.ends), range(6))
