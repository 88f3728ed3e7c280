"""The manifest: what it says of the files is true, and what it must not say is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from firsttoken.progressiveserve.checkpoint.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DTYPES,
    MANIFEST,
    AdapterFiles,
    FileEntry,
    check_files,
    read_manifest,
    write_manifest,
)
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.errors import ModelError


def test_what_is_written_is_read(staged_folder):
    folder, manifest = staged_folder
    assert read_manifest(folder) == manifest
    with_adapter = replace(
        manifest.stages[1],
        adapter=AdapterFiles(
            "adapters/B", {name: FileEntry(1000, "0" * 64) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        ),
    )
    changed = replace(manifest, stages=(manifest.stages[0], with_adapter, manifest.stages[2]))
    write_manifest(folder, changed)
    assert read_manifest(folder) == changed
    assert changed.bytes == manifest.bytes == sum(stage.bytes for stage in manifest.stages)
    assert changed.stages[1].bytes == manifest.stages[1].bytes + 1000


def test_dtypes_are_those_of_torch():
    for name, itemsize in DTYPES.values():
        assert getattr(torch, name).itemsize == itemsize


def edit(folder, change, seal=True):
    """Change the manifest, as somebody would who knows of its hash."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    if seal:
        content["sha256"] = sha256_of({key: value for key, value in content.items() if key not in ("format", "sha256")})
    (folder / MANIFEST).write_text(json.dumps(content))


def spans(tensor):
    return {key: tensor[key] for key in ("start", "end")}


def shift(tensor, by):
    tensor.update({key: value + by for key, value in spans(tensor).items()})


def last_tensors(content):
    """Two matrices of one layer and of one shape, in the order of their bytes."""
    tensors = content["stages"][2]["parts"][0]["tensors"]
    return [tensors[f"model.layers.2.self_attn.{name}_proj.weight"] for name in ("k", "v")]


def first_part(content):
    return content["stages"][0]["parts"][0]


def first_tensor(content):
    return first_part(content)["tensors"]["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("format"), "is of the format None, not 'firsttoken-staged-3'"),
        (lambda c: c.update(format="gguf"), "is of the format 'gguf'"),
        (lambda c: c.update(colour="red"), "unknown key 'colour'"),
        (lambda c: c.pop("kind"), "missing key 'kind'"),
        (lambda c: c.update(kind="true"), "kind: 'true' is not known; known: random, real"),
        (lambda c: c.update(stages={}), "stages: expected .* not {}"),
        (lambda c: c.update(stages=[]), "it has no stages"),
        (lambda c: c["stages"].append([]), r"stages\[3\]: expected a mapping, not \[\]"),
        (lambda c: c["stages"].append({"name": "D", "parts": [], "adapter": None} | {"x": 1}), "unknown key 'x'"),
        (lambda c: first_part(c).pop("sha256"), r"stages\[0\].parts\[0\]: missing key 'sha256'"),
        (lambda c: first_part(c).update(sha256="0" * 63), r"sha256: expected 64 hex"),
        (lambda c: first_part(c).update(bytes="9"), r"stages\[0\].parts\[0\].bytes: expected int, not '9'"),
        (lambda c: first_part(c).update(bytes=True), "bytes: expected int, not True"),
        (lambda c: first_part(c).update(tensors={}), r"1-A/000-embedding.safetensors \(embedding\) holds no tensor"),
        (lambda c: first_part(c).update(file="../elsewhere"), "'../elsewhere' stands where staging puts '1-A/000-"),
        (lambda c: first_part(c).update(file="x" * 5000), "stands where staging puts '1-A/000-embedding"),
        (lambda c: first_part(c).update(name="tail"), "staging puts '1-A/000-tail.safetensors'"),
        (lambda c: c["stages"].reverse(), "stands where staging puts '1-C/000-layer-02.safetensors'"),
        (lambda c: first_tensor(c).update(shape=[260, 33]), "34,320 bytes by its shape"),
        (lambda c: first_tensor(c).update(shape=[-32, -260]), "expected 0 or more, not -32"),
        (lambda c: first_tensor(c).update(shape=[0, 10**19]), "0 bytes by its shape"),
        (lambda c: first_tensor(c).update(dtype="nonsense"), "the dtype 'nonsense' is none that is read"),
        (lambda c: first_tensor(c).update(dtype="I32"), "holds the dtype I32, in which no weights are served"),
        (lambda c: first_tensor(c).update(start=0, end=33280), "start: expected 8 or more, not 0"),
        (lambda c: shift(first_tensor(c), 80000), r"\(embedding\) is truncated or altered"),
        (lambda c: shift(last_tensors(c)[0], 4), "leaves a gap|ends at"),
        (lambda c: last_tensors(c)[1].update(spans(last_tensors(c)[0])), "ends at"),
        (lambda c: c["side"].pop("config.json"), "it has no stages, or no config.json"),
        (lambda c: c["side"].update({"../x": c["side"]["config.json"]}), "'../x' is no name of a file"),
        (lambda c: c["stages"][0].update(adapter={"folder": "../A", "files": {}}), "staging puts 'adapters/A'"),
        (lambda c: c["stages"][0].update(adapter={"folder": "adapters/A", "files": {}}), "no adapter_config.json"),
    ],
)
def test_a_manifest_that_says_something_else(staged_folder, change, words):
    folder, _ = staged_folder
    edit(folder, change)
    with pytest.raises(ModelError, match=rf"manifest.json.*{words}.*; stage it again") as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_none(tmp_path):
    with pytest.raises(ModelError, match=r"no staged checkpoint in .*; stage it again"):
        read_manifest(tmp_path)
    for text, words in (
        ('{"format": ', "it is truncated or no JSON"),
        ("[]", "is of the format None"),
        ("\xff", "is no UTF-8 text"),
    ):
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=words):
            read_manifest(tmp_path)


def test_missing_and_truncated_shards_are_named(staged_folder):
    folder, manifest = staged_folder
    shard = folder / manifest.stages[1].parts[0].file
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    words = rf"layer-01.safetensors \(layer 01\) is truncated or altered \({len(data) - 1:,} of {len(data):,} bytes\)"
    with pytest.raises(ModelError, match=words + "; stage it again"):
        check_files(folder, manifest)
    shard.unlink()
    with pytest.raises(ModelError, match=r"2-B/000-layer-01.safetensors \(layer 01\) is missing in .*; stage it again"):
        check_files(folder, manifest)
    check_files(folder, manifest, stages=(1, 3))
    with pytest.raises(ModelError, match="layer 01"):
        check_files(folder, manifest, stages=(2,))


@pytest.mark.parametrize("key", ["source", "kind", "plan_sha256", "side", "stages"])
def test_what_was_edited_by_hand_is_refused(staged_folder, key):
    folder, _ = staged_folder
    edit(folder, lambda content: content.update({key: None}), seal=False)
    with pytest.raises(ModelError, match=r"manifest.json: it does not fit its own sha256, .*; stage it again"):
        read_manifest(folder)
