"""Variants that cannot be served, as a user meets them: the command ends with one line that says how to mend it; and
what a variant has stored that is served no more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from services import TIMEOUT_S, free_port, serving, tiny_model, until, write_endless
from torch import nn

from firsttoken.__main__ import main
from firsttoken.assets.checkpoint import combined_sha256, weight_files

pytest.importorskip("starlette")
pytest.importorskip("peft")

TEXT = "the inn in the hat is a long way from here, and thin is the other one. "


def write_adapter(folder: Path, model: nn.Module, seed: int, base_sha256: str = "") -> Path:
    """An adapter on ``model`` that changes its answers, with a recipe that names ``base_sha256`` if that is given."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    peft.save_pretrained(folder)
    if base_sha256:
        (folder / "recipe.json").write_text(json.dumps({"base_sha256": base_sha256, "tasks": ["qa"]}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused") / "base"
    write_endless(folder)
    return folder


def told(*arguments: str) -> str:
    """The one line with which ``firsttoken serve`` ends."""
    command = [sys.executable, "-m", "firsttoken", "serve", *arguments, "--port", str(free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    return line


# Another base.


@pytest.mark.parametrize("worker", [False, True], ids=["here", "in a worker"])
def test_an_adapter_of_another_base(base, tmp_path, worker: bool) -> None:
    """It has the model's shape, and its recipe says that it was trained on other weights."""
    folder = write_adapter(tmp_path / "qa", tiny_model(), 1, "5e12" * 16)
    found = combined_sha256(weight_files(base))[:12]
    line = told(str(base), "--variant", f"qa={folder}", *(["--worker"] if worker else []))
    assert line == (
        "firsttoken: --variant qa: its adapter was trained on the base 5e125e125e12, and base is "
        f"{found}; name an adapter of this model"
    )


def test_an_adapter_of_another_base_of_another_shape(base, tmp_path) -> None:
    """It has no recipe, and is for more layers than there are."""
    shallow = write_shallow(tmp_path / "shallow")
    folder = write_adapter(tmp_path / "qa", tiny_model(), 1)
    assert told(str(shallow), "--variant", f"qa={folder}") == (
        "firsttoken: adapter of the variant qa is for layer 5, and this model has 3; name one that was trained on it"
    )


def write_shallow(folder: Path) -> Path:
    write_endless(folder)
    model = tiny_model()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.config.layer_types = None
    model.save_pretrained(folder)
    return folder


# One name twice.


@pytest.mark.parametrize("names", [("qa", "qa"), ("base", "base"), ("qa", "chat", "qa")], ids=" ".join)
def test_the_name_of_a_variant_twice(base, tmp_path, capsys, names: tuple[str, ...]) -> None:
    """Also the model's own name, whose requests would be answered by a variant."""
    variants = [word for name in names for word in ("--variant", f"{name}={tmp_path / name}")]
    assert main(["serve", str(base), *variants, "--port", str(free_port())]) == 2
    assert capsys.readouterr().err == (
        f"firsttoken: serve: two models would be called {names[0]!r}; give each --variant a name of its own\n"
    )


# A variant that is served no more, of which a store still has what it computed.


@contextmanager
def with_prefixes(base: Path, store: Path, **settings: Any) -> Iterator[str]:
    with serving(base, prefix_store=store, **settings) as url:
        until(lambda: "stored prefixes are used" in httpx.get(f"{url}/stage").text, "the store is open")
        yield url


def said(url: str, model: str | None = None) -> tuple[str, int]:
    """What is said to a prompt that begins as the stored one, and how many requests began with a stored prefix."""
    body = {"prompt": TEXT + "in the end", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | ({"model": model} if model else {}), timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], httpx.get(f"{url}/stage").json()["restored"]


@pytest.mark.parametrize("worker", [False, True], ids=["here", "in a worker"])
def test_a_prefix_of_a_variant_that_was_removed(base, tmp_path, capsys, worker: bool) -> None:
    """The model and the other variant compute the prompt; once the variant is back, it takes what it had stored."""
    qa, chat = (write_adapter(tmp_path / name, tiny_model(), seed) for seed, name in enumerate(("qa", "chat")))
    store = tmp_path / "store"
    with serving(base, variants=(("qa", qa), ("chat", chat)), worker=worker) as url:
        own = {name: said(url, name)[0] for name in ("base", "qa", "chat")}
    assert len(set(own.values())) == 3, "else a prefix of another would not show"
    assert main(["prefix", "put", str(store), TEXT, "--model", str(base), "--adapter", str(qa)]) == 0
    with with_prefixes(base, store, variants=(("chat", chat),), worker=worker) as url:
        assert said(url) == (own["base"], 0) and said(url, "chat") == (own["chat"], 0)
        body = {"prompt": TEXT, "model": "qa", "max_tokens": 1}
        gone = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        message = "model: 'qa' is not served here; 'base' and 'chat' are"
        assert gone.status_code == 404 and gone.json()["error"]["message"] == message
    with with_prefixes(base, store, variants=(("qa", chat),), worker=worker) as url:
        assert said(url, "qa") == (own["chat"], 0), "another adapter has its name now"
    with with_prefixes(base, store, variants=(("qa", qa),), worker=worker) as url:
        assert said(url, "qa") == (own["qa"], 1)
    capsys.readouterr()
    (file,) = store.iterdir()
    key = file.name.partition(".")[0]
    assert main(["prefix", "drop", str(store), key]) == 0 and capsys.readouterr().out == f"{key}: dropped\n"
