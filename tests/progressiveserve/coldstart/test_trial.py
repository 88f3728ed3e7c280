"""Real cold starts of a tiny model, each a process of its own, and what the parent makes of them."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.study.errors import FirstTokenError
from firsttoken_cpu.native.library import kernels
from firsttoken_studies.probes.kernel_link import available
from firsttoken_studies.probes.pagecache import evict, resident_fraction
from firsttoken_studies.progressiveserve.coldstart.checkpoints import write_stock
from firsttoken_studies.progressiveserve.coldstart.harness import (
    BUCKET,
    KERNEL,
    NONE,
    SERVER,
    TrialLink,
    data_server,
    link_key,
    make_cold,
    make_warm,
    one_trial,
    run_trials,
    touch_memory,
    warm_libraries,
    wire_for,
)
from firsttoken_studies.progressiveserve.coldstart.spec import PhaseClock, TrialSpec
from firsttoken_studies.progressiveserve.coldstart.trial import main

pytestmark = pytest.mark.long(seconds=30)
PROMPT = "in the wind the house"
COLD = TrialLink(0.0, NONE)
PHASES = {"interpreter", "imports", "config_and_tokenizer", "load", "prefill"}


@pytest.fixture
def staged(stage):
    return stage(adapters=(1, 2))


@pytest.fixture
def spec(staged, tokenizer, tmp_path) -> TrialSpec:
    source = ModelSource(staged.served.model, tokenizer, Origin("tiny", staged.served.sha256, "real"))
    stock = write_stock(source, tmp_path / "stock")
    return TrialSpec("read", str(staged.folder), str(stock), PROMPT, threads=1, readers=2)


@torch.inference_mode()
def next_token(model, tokenizer) -> int:
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    return int(model(ids, use_cache=False).logits[0, -1].argmax())


def phases_of(row: dict) -> dict[str, float]:
    return {key[len("phase_") : -len("_s")]: value for key, value in row.items() if key.startswith("phase_")}


def add_up(row: dict) -> None:
    phases = phases_of(row)
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(row["ttft_process_s"], abs=0.005)
    early = phases["interpreter"] + phases["imports"]
    assert row["ttft_request_s"] == pytest.approx(row["ttft_process_s"] - early, abs=0.005)
    assert row["cpu_s"] > 0 and row["prefill_warm_s"] > 0 and (row["growth_bytes"] is None or row["growth_bytes"] >= 0)
    assert row["link"] == "unshaped" and row["shaped_by"] == NONE and row["resident_before_pct"] in (None, 0.0)


def test_a_progressive_start(staged, spec, tokenizer):
    row = one_trial(replace(spec, variant="progressive", recover=True), COLD)
    add_up(row)
    assert phases_of(row).keys() == PHASES | {"build", "adapter"}
    with at_stage(staged.served, 1, staged.adapters[1]) as model:
        assert row["token_id"] == next_token(model, tokenizer)
    assert row["full_token_id"] == next_token(staged.served.model, tokenizer)
    stages = [s.bytes for s in staged.manifest.stages]
    assert 0 <= row["bytes"] - stages[0] < 2000 and 0 <= row["full_bytes"] - sum(stages) < 4000
    assert row["load_s"] > 0 and row["place_s"] > 0 and row["stage2_s"] > 0 and row["stage3_s"] > 0
    assert row["cpu_full_s"] >= row["cpu_s"]


def test_a_start_from_a_data_server(staged, spec, tokenizer):
    """Its weights cross a socket at the server's rate, the stages after the first token too."""
    row = one_trial(replace(spec, variant="progressive", recover=True), TrialLink(0.05, SERVER))
    assert row["full_token_id"] == next_token(staged.served.model, tokenizer)
    assert (row["link"], link_key(row), row["shaped_by"]) == ("0.05 Gbit/s, data server", "0.05gbit_server", SERVER)
    assert row["load_s"] > 0.7 * row["bytes"] / (0.05e9 / 8)
    stages = [s.bytes for s in staged.manifest.stages]
    assert 0 <= row["full_bytes"] - sum(stages) < 4000


@pytest.mark.parametrize(
    ("variant", "at", "wire"),
    [("lean", 3, COLD), ("lean_folder", 3, COLD), ("lean_progressive", 1, TrialLink(0.05, SERVER))],
)
def test_a_lean_start(staged, spec, tokenizer, variant, at, wire):
    """The same token, and a process that never imported transformers nor PEFT."""
    row = one_trial(replace(spec, variant=variant), wire)
    with at_stage(staged.served, at, staged.adapters.get(at)) as model:
        assert row["token_id"] == next_token(model, tokenizer)
    assert row["lean"] is True


@pytest.mark.skipif(kernels() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("variant", "first"), [("progressive_behind", "progressive"), ("whole_behind", "lean")])
def test_stages_before_torch(stage, tokenizer, tmp_path, variant, first):
    """Their first token is that of a start with torch first, and so are all weights in the end; nothing comes twice."""
    staged = stage(adapters=(1, 2), wide=True)
    source = ModelSource(staged.served.model, tokenizer, Origin("tiny", staged.served.sha256, "real"))
    stock = write_stock(source, tmp_path / "stock")
    spec = TrialSpec(variant, str(staged.folder), str(stock), PROMPT, threads=1, readers=2, digest=True, lean=True)
    spec = replace(spec, recover=variant.startswith("progressive"))
    row, other = (one_trial(replace(spec, variant=name), COLD) for name in (variant, first))
    assert row["torch_at_first_token"] is False and row["lean"] is other["lean"] is True
    same = ("token_id", "weights_sha256", "bytes", *(("full_token_id", "full_bytes") if spec.recover else ()))
    assert [row[key] for key in same] == [other[key] for key in same]
    phases = phases_of(row)
    assert phases.keys() == PHASES - {"load"}
    assert sum(phases.values()) == pytest.approx(row["ttft_process_s"], abs=0.005)
    if spec.recover:
        assert row["stage2_s"] > row["torch_s"], "the import of torch is in it"


def test_a_start_before_torch_that_needs_it_after_all(spec, capsys):
    """Its heads are narrower than those that the kernels know."""
    row = main(replace(spec, variant="progressive_behind"))
    assert "torch_at_first_token" not in row and row["load_s"] > 0
    assert capsys.readouterr().err.count("staged-llama starts with torch: its head_dim is 8\n") == 1


def test_a_lean_start_of_another_architecture(staged, spec, tokenizer, capsys):
    """It is the stock model's, and says so."""
    config = Path(staged.folder, "config.json")
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10_000.0}
    text = json.dumps(json.loads(config.read_text()) | {"rope_parameters": yarn})
    config.write_text(text)
    manifest = read_manifest(staged.folder)
    entry = FileEntry(len(text), hashlib.sha256(text.encode()).hexdigest())
    write_manifest(staged.folder, replace(manifest, side=manifest.side | {"config.json": entry}))
    row = main(replace(spec, variant="lean"))
    assert row["lean"] is False and "its rope_type is 'yarn'" in capsys.readouterr().err


def test_a_lean_start_without_its_tokenizer(spec):
    Path(spec.stock, "tokenizer.json").unlink()
    with pytest.raises(FirstTokenError, match=r"failed: .*ModelError: .*has no tokenizer\.json"):
        one_trial(replace(spec, variant="lean"), COLD)


def test_a_data_server_that_cannot_start(tmp_path):
    with (
        pytest.raises(FirstTokenError, match=r"the data server did not start: .*gone is no folder; name one to serve"),
        data_server(tmp_path / "gone", 1.0),
    ):
        raise AssertionError("it served")


def test_a_stock_start(spec, tokenizer):
    row = one_trial(replace(spec, variant="from_pretrained"), COLD)
    add_up(row)
    assert phases_of(row).keys() == PHASES
    stock = AutoModelForCausalLM.from_pretrained(spec.stock).eval()
    assert row["token_id"] == next_token(stock, tokenizer)


def test_reading_alone_and_many_rounds(staged, spec):
    specs = [spec, replace(spec, readers=1)]
    rows = run_trials([specs] * 2, TrialLink(0.05, BUCKET), seed=3)
    assert [(row["round"], row["seed"], row["variant"]) for row in rows] == [(i // 2, 3, "read") for i in range(4)]
    parts = [part for s in staged.manifest.stages for part in s.parts]
    assert {row["bytes"] for row in rows} == {sum(part.bytes for part in parts)}
    assert {(row["link"], row["gbit_per_s"], row["shaped_by"]) for row in rows} == {("0.05 Gbit/s", 0.05, BUCKET)}
    floor = rows[0]["bytes"] / (0.05e9 / 8)
    assert all(0.3 * floor < row["load_s"] < 100 * floor for row in rows)


def test_a_trial_that_fails_says_so_in_its_last_line(staged, spec):
    path = staged.folder / staged.manifest.stages[0].parts[2].file
    path.unlink()
    with pytest.raises(
        FirstTokenError, match=r"the cold start read failed: .*layer 01: 002-layer-01\.safetensors is m"
    ):
        one_trial(spec, COLD)
    with pytest.raises(FirstTokenError, match=r"the cold start none failed: .*no cold-start variant 'none'"):
        one_trial(replace(spec, variant="none"), COLD)


def key_of(wire: TrialLink) -> str:
    """What measures call the link of a trial over ``wire``."""
    return link_key({"link": wire.name, "gbit_per_s": wire.gbit_per_s})


def test_links_side_by_side_have_a_key_of_their_own():
    assert [key_of(TrialLink(2.5, BUCKET, parallel=several)) for several in (False, True)] == [
        "2.5gbit",
        "2.5gbit_each",
    ]


@pytest.mark.parametrize("disk", [0.5, 5.0, 100.0])
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0, 4.0, 10.0])
def test_the_wire_that_this_machine_has(tmp_path, rate, disk):
    wire = wire_for(rate, tmp_path, disk)
    if rate == 0:
        assert wire == TrialLink(0.0, NONE) and (wire.name, key_of(wire)) == ("unshaped", "unshaped")
        return
    assert wire.gbit_per_s == rate and (wire.name, key_of(wire)) == (f"{rate:g} Gbit/s", f"{rate:g}gbit")
    if rate > 0.8 * disk:
        assert (wire.shaped_by, wire.cold) == (BUCKET, False)
    else:
        assert wire.cold and wire.shaped_by == (KERNEL if available(tmp_path) is None else BUCKET)


def test_cold_is_cold_and_warm_is_warm(tmp_path):
    files = [tmp_path / f"{i}.bin" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(os.urandom(100_000 * i))
    if resident_fraction(files[2]) is None:
        pytest.skip("mincore is not there")
    assert make_warm(files) == 1.0 or make_warm(files[1:]) == 1.0
    if make_cold(files) != 0:
        pytest.skip("this file system keeps what it has read")
    assert [resident_fraction(file) for file in files] == [0, 0, 0]
    assert make_cold([]) == 0.0 and make_warm([]) == 1.0


def test_touching_memory_of_any_size():
    for size in (0, 1, 4096, 4097, 1 << 20):
        touch_memory(size)


def test_phases_follow_each_other():
    marks = PhaseClock(last=0.0)
    marks.phase("one")
    marks.phase("two")
    assert sum(marks.phases.values()) == pytest.approx(marks.last)
    before = dict(marks.phases)
    marks.move("one", "three", 0.25)
    assert marks.phases == before | {"one": before["one"] - 0.25, "three": 0.25}


def test_a_file_that_this_process_has_mapped_is_in_memory_before_a_start(tmp_path: Path) -> None:
    """A shared library is such a file; its pages that nobody has touched are dropped like any other's."""
    library = tmp_path / "library.so"
    library.write_bytes(bytes(1 << 20))
    with library.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ):
        evict(library)
        if resident_fraction(library) != 0:
            pytest.skip("the pages of a file cannot be dropped here")
        warm_libraries([])
        assert resident_fraction(library) == 1
