"""Weights files that are overwritten or cut while a service starts or runs: nothing else is answered, and no process
ends by a signal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from gated import KEY, gated
from services import GREEDY, TIMEOUT_S, serving
from small_models import small_model
from starts import draw, soak
from waiting import until

from firsttoken.assets.checkpoint import weight_files
from firsttoken.assets.weight_files import unchanged
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.study.errors import ModelError
from firsttoken_cpu.native.library import kernels

Damage = Callable[[Path], None]


def overwritten(file: Path) -> None:
    """In place, as `cp` over it does."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 8)
        opened.write(os.urandom(size - size // 8))


def cut(file: Path) -> None:
    os.truncate(file, 5000)


def ask(url: str) -> httpx.Response:
    body = {"prompt": "the inn", "max_tokens": 12} | GREEDY
    return httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)


@pytest.fixture(params=["lean", "transformers"])
def folder(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> Path:
    """A plain folder, read by lean layers or by transformers' own."""
    at = Path(shutil.copytree(plain, tmp_path / "model"))
    if request.param == "transformers":
        config = (at / "config.json").read_text()
        (at / "config.json").write_text(config.replace("{", '{"partial_rotary_factor": 1.0,', 1))
    return at


@pytest.mark.parametrize("damage", [overwritten, cut])
def test_answers_stay(folder: Path, damage: Damage) -> None:
    """No page of the file is mapped once the model is there."""
    with serving(folder) as url:
        before = ask(url).json()["choices"]
        assert str(folder) not in Path("/proc/self/maps").read_text()
        damage(folder / "model.safetensors")
        assert ask(url).json()["choices"] == before


def test_a_file_that_changes_while_it_is_read_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    with pytest.raises(ModelError, match="were changed"), unchanged(weight_files(folder)):
        overwritten(folder / "model.safetensors")


def test_a_change_is_told_in_the_place_of_what_it_led_to(plain: Path, tmp_path: Path) -> None:
    """Whoever tries again then reads what is there by then."""
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    with pytest.raises(ModelError, match="were changed"), unchanged(weight_files(folder)):
        cut(folder / "model.safetensors")
        raise ValueError


READ = """
import os, shutil, sys
from pathlib import Path
import torch
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weights import read_tensor, tensors_of
from firsttoken_cpu.native.library import kernels
from firsttoken_cpu.before_torch.numpy_model import NumpyModel
from firsttoken_cpu.before_torch.numpy_weights import FolderWeights
from firsttoken.petals import checkpoint_blocks
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.study.errors import ModelError

def span(folder, files):
    checkpoint_blocks.check_servable = lambda *_, **__: files
    checkpoint_blocks.load_span(folder, range(1, 3), torch.float32)

READERS = {
    "numpy": lambda folder, files, source: NumpyModel(FolderWeights(files)).logits([1, 2]),
    "torch": lambda folder, files, source: dict(tensors_of(files)),
    "tensors": lambda folder, files, source: [read_tensor(stored) for stored in files.tensors.values()],
    "stages": lambda folder, files, source: [source.get(name) for name in source.names],
    "swarm": lambda folder, files, source: span(folder, files),
}
for name, read in READERS.items():
    folder = Path(shutil.copytree(sys.argv[1], Path(sys.argv[1]).with_name(name)))
    listed = check_servable(folder), FolderSource(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 3)
    try:
        if name != "numpy" or kernels() is not None:
            read(folder, *listed)
            print(name, "read it")
    except ModelError as error:
        assert str(error) == f"{folder}/model.safetensors was cut while it was read; copy it again", error
"""


def test_a_file_that_is_cut_once_it_is_listed_is_an_error(tmp_path: Path) -> None:
    """Whoever reads it: a mapping of it would end the process by SIGBUS."""
    small_model("Llama", vocab_size=4096).save_pretrained(tmp_path / "model")  # of many pages
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path / "model")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_swarms_server_moves_to_blocks_of_the_same_files_only(plain: Path, tmp_path: Path) -> None:
    """The swarm knows them by the sha256 of the files that were there at its start."""
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    backend = BlockBackend(folder, range(1), torch.float32, 64)
    overwritten(folder / "model.safetensors")
    with pytest.raises(ModelError, match="were changed"):
        backend.move(range(1, 2))


@pytest.mark.parametrize("damage", [overwritten, cut])
def test_answers_before_torch_are_of_files_that_stayed(damage: Damage, plain: Path, tmp_path: Path) -> None:
    """Nothing is said of others. What was overwritten is read again; after a cut the process ends with a line."""
    if kernels() is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path / "model"
    small_model("Llama", vocab_size=4096, bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(plain / name, folder / name)
    body = {"prompt": "the inn", "max_tokens": 12} | GREEDY
    with gated(folder, tmp_path / "gate") as service, httpx.Client(timeout=TIMEOUT_S) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        assert client.post(f"{service.url}/v1/completions", json=body).status_code == 200
        damage(folder / "model.safetensors")
        service.open()
        assert client.post(f"{service.url}/v1/completions", json=body).status_code >= 500
        if damage is cut:
            assert service.process.wait(TIMEOUT_S) == 2
            assert "Traceback" not in (service.place / "errors").read_text()
        else:
            until(lambda: client.get(f"{service.url}/stage").json()["error"] is None, "it is read again")


def test_starts_that_something_befalls() -> None:
    """A few of them: `starts_soak.py` runs a thousand."""
    for start in soak(draw(5, 3, ("cut", "replace", "interrupt"), ("plain",))):
        assert not start.fault, start
