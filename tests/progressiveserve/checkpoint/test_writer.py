"""Writing: stock transformers loads the folder bit for bit, and no interruption costs more than a shard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from coarse_plans import coarse_first
from peft import PeftModel
from transformers import AutoModelForCausalLM

from firsttoken.assets.adapters import export_adapter
from firsttoken.assets.models import load_model
from firsttoken.progressiveserve.checkpoint.manifest import check_files, check_side, read_manifest
from firsttoken.progressiveserve.checkpoint.plan import HEAD, by_layers, single_stage, staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource, ModelSource, Origin, RandomSource
from firsttoken.progressiveserve.checkpoint.writer import LOG, write_staged
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import ModelError, StageError

BASE = "ba5e" * 16
GROUPS = [(0, 3), (1,), (2,)]


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def refused(words, *args, **kwargs) -> None:
    with pytest.raises(StageError, match=words) as caught:
        write_staged(*args, **kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_stock_transformers_loads_the_whole_model(saved, assert_same, tmp_path, kind, tied, sharded):
    model, folder = saved(kind, tied, sharded)
    source = FolderSource(folder)
    for name, plan in {
        "abc": staged(source.names, StagePlan.from_block(4, (1, 2))),
        "coarse": coarse_first(source.names, 4),
    }.items():
        manifest = write_staged(source, plan, tmp_path / name)
        assert_same(model, tmp_path / name)
        assert (manifest.dtype, manifest.tied) == ("float32", tied)
        assert manifest.source_sha256 == source.provenance.sha256
        assert [stage.name for stage in manifest.stages] == [stage.name for stage in plan.stages]
    assert (tmp_path / "abc" / "1-A" / "001-layer-00.safetensors").is_file()
    assert load_model(str(tmp_path / "abc")).tokenizer is not None


def test_a_model_in_memory_in_16_bits(saved, assert_same, tokenizer, tmp_path):
    model, _ = saved("qwen2", dtype=torch.bfloat16)
    source = ModelSource(model, tokenizer, Origin("tiny", BASE, "real"))
    manifest = write_staged(source, single_stage(source.names, 4), tmp_path / "one")
    assert_same(model, tmp_path / "one")
    assert (manifest.dtype, manifest.source, manifest.source_sha256) == ("bfloat16", "tiny", BASE)
    data = sum(entry.end - entry.start for part in manifest.stages[0].parts for entry in part.tensors.values())
    assert data == sum(parameter.numel() * 2 for parameter in model.parameters())


def test_random_weights(tmp_path):
    source = RandomSource("tiny-4", torch.float16, seed=2)
    manifest = write_staged(source, by_layers(source.names, GROUPS), tmp_path / "random")
    assert (manifest.kind, manifest.source_sha256, manifest.dtype) == ("random", None, "float16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "random").state_dict()
    assert all(torch.equal(loaded[name], source.get(name)) for name in source.names)
    assert loaded[HEAD].dtype == torch.float16


@pytest.fixture
def adapters(saved, randomised, tmp_path) -> dict[int, Path]:
    """Adapters of stage 1 (layers 0 and 3) and stage 2 (0, 1 and 3)."""
    made = {}
    for stage, (layers, missing) in {1: ([0, 3], [1, 2]), 2: ([0, 1, 3], [2])}.items():
        model, _ = saved()
        pass_layers(model, missing)
        recipe = {"layers": layers, "base_sha256": BASE, "curve": []}
        made[stage] = export_adapter(randomised(model, layers), tmp_path / "adapters" / f"stage-{stage}", recipe)
    return made


def test_adapters_travel_with_their_stage(saved, adapters, assert_same, ids, tmp_path):
    model, folder = saved()
    source = FolderSource(folder)
    source.provenance = source.provenance._replace(sha256=BASE)
    manifest = write_staged(source, by_layers(source.names, GROUPS), tmp_path / "out", adapters)
    assert [stage.adapter and stage.adapter.folder for stage in manifest.stages] == ["adapters/A", "adapters/B", None]
    weights = manifest.stages[0].adapter.bytes
    assert manifest.stages[0].bytes == sum(part.bytes for part in manifest.stages[0].parts) + weights
    assert weights == (adapters[1] / "adapter_model.safetensors").stat().st_size
    assert_same(model, tmp_path / "out")
    logits = []
    for where in (tmp_path / "out" / "adapters" / "A", adapters[1]):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        pass_layers(base, [1, 2])
        logits.append(PeftModel.from_pretrained(base, str(where)).eval()(ids).logits)
    assert torch.equal(*logits)
    (tmp_path / "out" / "adapters" / "A" / "recipe.json").unlink()
    write_staged(source, by_layers(source.names, GROUPS), tmp_path / "out", adapters)
    check_files(tmp_path / "out", manifest)


def test_adapters_that_do_not_fit(source, adapters, tmp_path):
    plan, target = by_layers(source.names, GROUPS), tmp_path / "out"
    refused("stage-1 belongs to the base ba5eba5eba5e, not", source, plan, target, {1: adapters[1]})
    source.provenance = source.provenance._replace(sha256=BASE)
    refused("stage-2 was trained with layers 0-1, 3 present", source, plan, target, {1: adapters[2]})
    refused("stage-1 is for stage 4 of 3", source, plan, target, {4: adapters[1]})
    assert not target.exists() and not (tmp_path / "out.partial").exists()


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_written(source, tmp_path):
    refused("hole: layer 3", source, by_layers(source.names[:-10] + source.names[-1:], [(0, 1, 2)]), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_is_there_is_returned_as_it_is(source, staged_folder, saved):
    folder, manifest = staged_folder
    before = times(folder)
    assert len(before) == 6 and not list(folder.rglob(".*")) and not (folder / LOG).exists()
    (folder / LOG).write_text("left by a kill")
    assert write_staged(source, by_layers(source.names, GROUPS), folder) == manifest == read_manifest(folder)
    assert times(folder) == before and not (folder / LOG).exists()
    refused("holds another plan, model or adapter: remove it", source, single_stage(source.names, 4), folder)
    model, _ = saved(tied=False)
    other = ModelSource(model, None, Origin("other", BASE, "real"))
    refused("holds another plan, model or adapter", other, by_layers(other.names, GROUPS), folder)
    assert times(folder) == before


def test_folders_of_other_people_are_left_alone(source, tmp_path):
    plan = single_stage(source.names, 4)
    for name in ("out", "out.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    refused("out is no staged checkpoint: remove it or choose another", source, plan, tmp_path / "out")
    (tmp_path / "out" / "thesis.txt").unlink()
    refused("out.partial is there and was not begun by staging", source, plan, tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"
    shutil.rmtree(tmp_path / "out.partial")
    write_staged(source, plan, tmp_path / "out")


@pytest.mark.parametrize("how", ["missing", "truncated", "no config", "no index"])
def test_a_damaged_folder_is_mended(source, staged_folder, assert_same, saved, how):
    folder, manifest = staged_folder
    before = times(folder)
    shard = folder / "2-B" / "000-layer-01.safetensors"
    damaged = {"no config": folder / "config.json", "no index": folder / "model.safetensors.index.json"}.get(how, shard)
    damaged.write_bytes(b"") if how == "truncated" else damaged.unlink()
    assert write_staged(source, by_layers(source.names, GROUPS), folder) == manifest
    assert_same(saved()[0], folder)
    after = times(folder)
    assert {name for name in after if after[name] != before.get(name)} <= {"2-B/000-layer-01.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_what_lies_beside_the_weights_is_mended_too(source, staged_folder, name):
    folder, manifest = staged_folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-5] + b"     ")
    with pytest.raises(ModelError, match=f"{name} .* is altered: wrong sha256"):
        check_side(folder, manifest)
    assert write_staged(source, by_layers(source.names, GROUPS), folder) == manifest
    assert (folder / name).read_bytes() == content


class Interrupted(FolderSource):
    """Stops at a tensor of layer 1, the first of stage 2."""

    def get(self, name: str) -> torch.Tensor:
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt
        return super().get(name)


def test_ctrl_c_leaves_the_partial_folder_only(source, saved, tmp_path, assert_same):
    model, folder = saved()
    plan, target, partial = by_layers(source.names, GROUPS), tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        write_staged(Interrupted(folder), plan, target)
    assert not target.exists() and not list(partial.rglob(".*"))
    before = times(partial)
    assert len(before) == 4
    with (partial / LOG).open("a") as log:
        log.write('{"name": "layer 01", "fi')
    (partial / "1-A" / "003-head.safetensors").write_bytes(b"altered")
    write_staged(source, plan, target)
    after = times(target)
    kept = {name for name in before if after[name] == before[name]}
    assert kept == before.keys() - {"1-A/003-head.safetensors"}
    assert_same(model, target)
    assert not partial.exists()


def test_a_partial_folder_of_another_plan_is_begun_again(source, saved, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_staged(Interrupted(saved()[1]), coarse_first(source.names, 4), tmp_path / "out")
    assert (tmp_path / "out.partial" / "1-coarse").is_dir()
    write_staged(source, by_layers(source.names, GROUPS), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"1-A", "2-B", "3-C"}


KILLED = """
import sys, time
from pathlib import Path
from firsttoken.progressiveserve.checkpoint import writer
from firsttoken.progressiveserve.checkpoint.plan import by_layers
from firsttoken.progressiveserve.checkpoint.sources import FolderSource

def stuck(tensors, path, save=writer.save_file, **options):
    if any(name.startswith("model.layers.1.") for name in tensors):
        Path(path).write_bytes(b"half a file")
        print("stuck", flush=True)
        time.sleep(60)
    save(tensors, path, **options)

writer.save_file = stuck
source = FolderSource(Path(sys.argv[1]))
writer.write_staged(source, by_layers(source.names, [(0, 3), (1,), (2,)]), Path(sys.argv[2]))
"""


def test_a_killed_staging_is_continued(source, saved, tmp_path, assert_same):
    model, folder = saved()
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGKILL)
    partial = tmp_path / "out.partial"
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    (leftover,) = [path for path in partial.rglob(".*")]
    before = {name: time for name, time in times(partial).items() if "/." not in name}
    assert len(before) == 4
    write_staged(source, by_layers(source.names, GROUPS), tmp_path / "out")
    after = times(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert len(after) == 6 and not (tmp_path / "out" / leftover.relative_to(partial)).exists()
    assert_same(model, tmp_path / "out")


def fill(disk: Path, leave: int = 0) -> Path:
    """Somebody else's file, which leaves ``leave`` bytes free."""
    stat = os.statvfs(disk)
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(stat.f_bavail * stat.f_frsize - leave))
    return disk / "ballast"


class Crowded(FolderSource):
    """Somebody else fills the disk while layer 1 is read."""

    disk: Path

    def get(self, name: str) -> torch.Tensor:
        if name == "model.layers.1.self_attn.q_proj.weight":
            fill(self.disk)
        return super().get(name)


def test_a_disk_that_fills_up(saved, small_disk, assert_same):
    model, folder = saved()
    crowded = Crowded(folder)
    crowded.disk = small_disk
    plan, target = by_layers(crowded.names, GROUPS), small_disk / "out"
    left = sum(4 * model.get_parameter(name).numel() for name in crowded.names if name.split(".")[2] in ("1", "2"))
    refused(
        rf"disk of .*out is full: {left:,} bytes are still needed; free some and stage again", crowded, plan, target
    )
    assert not target.exists()
    before = times(small_disk / "out.partial")
    assert len(before) == 4
    (small_disk / "ballast").unlink()
    write_staged(FolderSource(folder), plan, target)
    assert {name: times(target)[name] for name in before} == before
    assert_same(model, target)


def test_a_disk_that_is_too_small_is_said_before_a_shard_is_written(source, small_disk):
    fill(small_disk, leave=100_000)
    total = sum(tensor.numel() * 4 for tensor in map(source.get, source.names))
    refused(rf"full: {total:,} bytes are still needed", source, single_stage(source.names, 4), small_disk / "out")
    assert times(small_disk) == {}


def test_a_place_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    refused("cannot stage to .*out: .*; mend that", source, single_stage(source.names, 4), tmp_path / "file" / "out")
