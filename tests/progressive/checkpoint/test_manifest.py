"""The manifest: what it says of the files is true, and what it must not say is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from firsttoken.progressive.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    AdapterFiles,
    FileEntry,
    check_files,
    read_manifest,
    verify,
    write_manifest,
)
from firsttoken.study.errors import ModelError


def test_importing_it_brings_nothing_but_the_standard_library():
    code = "import sys; import firsttoken.progressive.checkpoint.manifest; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "peft", "safetensors", "yaml"} & set(loaded)
    ours = {name for name in loaded if name.startswith("firsttoken.")}
    parents = {"firsttoken.progressive", "firsttoken.progressive.checkpoint", "firsttoken.study"}
    assert ours == parents | {"firsttoken.progressive.checkpoint.manifest", "firsttoken.study.errors"}


def test_what_is_written_is_read(staged_folder):
    folder, manifest = staged_folder
    assert read_manifest(folder) == manifest
    with_adapter = replace(
        manifest.stages[1],
        adapter=AdapterFiles("adapters/B", {"adapter_model.safetensors": FileEntry(1000, "0" * 64)}),
    )
    changed = replace(manifest, stages=(manifest.stages[0], with_adapter, manifest.stages[2]))
    write_manifest(folder, changed)
    assert read_manifest(folder) == changed
    assert changed.bytes == manifest.bytes == sum(stage.bytes for stage in manifest.stages)
    assert changed.stages[1].bytes == manifest.stages[1].bytes + 1000


def test_the_byte_ranges_are_those_of_the_tensors(staged_folder):
    folder, manifest = staged_folder
    for part in (part for stage in manifest.stages for part in stage.parts):
        data = (folder / part.file).read_bytes()
        with safe_open(folder / part.file, "pt") as stored:
            assert set(stored.keys()) == set(part.tensors)
            for name, entry in part.tensors.items():
                dtype = getattr(torch, DTYPES[entry.dtype][0])
                raw = torch.frombuffer(bytearray(data[entry.start : entry.end]), dtype=dtype).reshape(entry.shape)
                assert torch.equal(raw, stored.get_tensor(name))


def test_dtypes_are_those_of_torch():
    for name, itemsize in DTYPES.values():
        assert getattr(torch, name).itemsize == itemsize


def first_part(content):
    return content["stages"][0]["parts"][0]


def first_tensor(content):
    return first_part(content)["tensors"]["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("format"), "is of the format None, not 'firsttoken-staged-1'"),
        (lambda c: c.update(format="gguf"), "is of the format 'gguf'"),
        (lambda c: c.update(colour="red"), "the top level lacks or adds colour"),
        (lambda c: c.pop("depth"), "the top level lacks or adds depth"),
        (lambda c: c.update(depth=True), "depth is 'True'"),
        (lambda c: c.update(kind="true"), "kind is 'true'"),
        (lambda c: c.update(stages={}), "stages is '{}'"),
        (lambda c: c["stages"].append([]), r"stages\[3\] is '\[\]'"),
        (lambda c: first_part(c).pop("sha256"), r"stages\[0\].parts\[0\] lacks or adds sha256"),
        (lambda c: first_part(c).update(bytes="9"), r"stages\[0\].parts\[0\].bytes is '9'"),
        (lambda c: first_part(c).update(layer=4), "embedding.safetensors is for layer 4 of 4"),
        (lambda c: first_part(c).update(file="../elsewhere"), "the path '../elsewhere' leaves the folder"),
        (lambda c: first_part(c).update(file="/etc/passwd"), "the path '/etc/passwd' leaves the folder"),
        (lambda c: first_tensor(c).update(shape=[260, 33]), r"1-A/000-embedding.safetensors \(embedding\) has 34,320"),
        (lambda c: first_tensor(c).update(dtype="I8"), "model.embed_tokens.weight is of the dtype 'I8'"),
        (lambda c: first_tensor(c).update(start=0, end=33280), "range 0 to 33,280 of"),
        (lambda c: first_tensor(c).update(start=80000, end=113280), "range 80,000 to 113,280 of"),
        (
            lambda c: c["stages"][0].update(adapter={"folder": "../A", "files": {}}),
            "../A has no adapter_model.safetensors",
        ),
        (
            lambda c: c["stages"][0].update(
                adapter={"folder": "../A", "files": {"adapter_model.safetensors": {"bytes": 1, "sha256": ""}}}
            ),
            "the path '../A/adapter_model.safetensors' leaves the folder",
        ),
    ],
)
def test_a_manifest_that_says_something_else(staged_folder, change, words):
    folder, _ = staged_folder
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"manifest.json.*{words}.*; stage it again") as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_none(tmp_path):
    with pytest.raises(ModelError, match=r"no staged checkpoint in .*; stage it again"):
        read_manifest(tmp_path)
    for text, words in (('{"format": ', "is truncated or no JSON"), ("[]", "is of the format None"), ("\xff", "JSON")):
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=rf"manifest.json {words}|{words}"):
            read_manifest(tmp_path)


def test_missing_truncated_and_altered_shards_are_named(staged_folder):
    folder, manifest = staged_folder
    verify(folder, manifest)
    shard = folder / manifest.stages[1].parts[0].file
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    check_files(folder, manifest)
    with pytest.raises(ModelError, match=r"2-B/000-layer-01.* \(layer 01\) is altered.*delete it and stage it again"):
        verify(folder, manifest)
    shard.write_bytes(data[:-1])
    words = rf"layer-01.safetensors \(layer 01\) is truncated or altered \({len(data) - 1:,} of {len(data):,} bytes\)"
    with pytest.raises(ModelError, match=words + "; stage it again"):
        check_files(folder, manifest)
    shard.unlink()
    with pytest.raises(ModelError, match=r"2-B/000-layer-01.safetensors \(layer 01\) is missing in .*; stage it again"):
        verify(folder, manifest)
    check_files(folder, manifest, stages=(1, 3))
    with pytest.raises(ModelError, match="layer 01"):
        check_files(folder, manifest, stages=(2,))
