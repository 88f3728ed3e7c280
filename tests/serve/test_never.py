"""A folder that can never be served ends the command with 2 and one line that names the thing; what may pass is said on
the terminal and tried again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dying_link import DyingLink
from edited import config, tensors
from services import free_port
from waiting import until

from firsttoken.__main__ import main
from firsttoken.engine.request_limits import RequestLimits
from firsttoken_serve.retrying_server import StagedService

Change = Callable[[Path], None]


def written(name: str, content: str) -> Change:
    """Another content of a file."""
    return lambda folder: (folder / name).write_text(content)


NEVER: dict[str, tuple[Change, str]] = {
    "a window": (
        config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16),
        "only models of full_attention are served",
    ),
    "a tensor too many": (
        tensors(lambda held: held.update({"model.extra.weight": torch.ones(2)})),
        "holds 'model.extra.weight', which the model of its config.json does not have",
    ),
    "an unknown dtype": (config(dtype="float12"), "dtype: 'float12' is none of weights"),
    "an unknown architecture": (
        config(model_type="odd", architectures=["OddForCausalLM"]),
        "OddForCausalLM was not compared with transformers, and is not served",
    ),
    "torn weights": (lambda folder: os.truncate(folder / "model.safetensors", 1000), "model.safetensors"),
    "ends that are none": (written("generation_config.json", "[]"), "generation_config.json"),
    "a tokenizer that is none": (written("tokenizer.json", "{}"), "tokenizer.json"),
}


@pytest.mark.parametrize("name", NEVER)
def test_it_ends_with_one_line(name: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, whose torch is there already."""
    change, line = NEVER[name]
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    change(folder)
    assert main(["serve", str(folder), "--port", str(free_port())]) == 2
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert last.startswith("firsttoken: ") and line in last
    assert "Traceback" not in told.err and "staged" not in last and "it is tried again" not in told.err


@pytest.mark.parametrize("options", [["--replicas", "2"], ["--swarm", "127.0.0.1:9"]], ids=" ".join)
@pytest.mark.parametrize("name", ["a window", "an unknown dtype"])
def test_however_it_is_served(name: str, options: list[str], plain: Path, tmp_path: Path, capsys) -> None:
    """Before a replica or a swarm is asked."""
    change, line = NEVER[name]
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    change(folder)
    assert main(["serve", str(folder), "--port", str(free_port()), *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err.splitlines()[-1]


@pytest.mark.parametrize("options", [[], ["--replicas", "2"]], ids=["here", "replicas"])
@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_here(device: str, options: list[str], plain: Path, capsys) -> None:
    """One line, no traceback."""
    assert main(["serve", str(plain), "--port", str(free_port()), "--device", device, *options]) == 2
    assert f"no device '{device}'" in capsys.readouterr().err.splitlines()[-1]


def test_what_may_pass_is_tried_again_and_said(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that dies."""
    limits = RequestLimits(max_prompt_tokens=64, max_new_tokens=64)
    server = StagedService(tiny, [DyingLink(120_000)], limits, retry_s=0.01)
    server.start()
    until(lambda: "stage 2" in (server.status()["error"] or ""), "the failure is told")
    server.close()  # what is read while a thread writes may lose a line
    assert "it is tried again in 0.01 s" in capsys.readouterr().err
