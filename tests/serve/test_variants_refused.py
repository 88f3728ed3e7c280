"""Variants that cannot be served, as a user meets them: the command ends with one line that says how to mend it; and
what a variant has stored that is served no more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from edited import set_keys
from services import TIMEOUT_S, free_port, restored, said, serving, tiny_model, with_prefixes, write_endless

from firsttoken.__main__ import main
from firsttoken.assets.checkpoint import combined_sha256, weight_files
from firsttoken.study.errors import StageError
from firsttoken_serve.served_model import check_model
from firsttoken_serve.service_config import ServiceConfig

pytest.importorskip("starlette")
pytest.importorskip("peft")

from fine_tunes import tuned, written

TEXT = "the inn in the hat is a long way from here, and thin is the other one. "
PROMPT = TEXT + "in the end"


def write_adapter(folder: Path, seed: int = 1) -> Path:
    return written(tuned(tiny_model(), seed, ["q_proj", "v_proj"]), folder)


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


def test_an_adapter_of_another_base(base, tmp_path) -> None:
    """It has the model's shape, and its recipe says that it was trained on other weights."""
    folder = write_adapter(tmp_path / "qa")
    (folder / "recipe.json").write_text(json.dumps({"base_sha256": "5e12" * 16, "tasks": ["qa"]}))
    found = combined_sha256(weight_files(base))[:12]
    line = told(str(base), "--variant", f"qa={folder}")
    assert line == (
        "firsttoken: --variant qa: its adapter was trained on the base 5e125e125e12, and base is "
        f"{found}; name an adapter of this model"
    )


def test_an_adapter_of_another_kind_is_refused_before_anybody_is_served(base, tmp_path) -> None:
    folder = write_adapter(tmp_path / "qa")
    config = ServiceConfig(base, variants=(("qa", folder),))
    check_model(config)
    set_keys(folder / "adapter_config.json", init_lora_weights="pissa")
    with pytest.raises(StageError, match=r"^adapter of the variant qa: its init_lora_weights 'pissa' is none of plain"):
        check_model(config)


# Names.


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("qa", "qa"), "two models would be called 'qa'; give each --variant a name of its own"),
        (("base", "base"), "two models would be called 'base'; give each --variant a name of its own"),
        (("qa", "chat", "qa"), "two models would be called 'qa'; give each --variant a name of its own"),
        (("a b",), "'a b' is no name; take up to 64 letters, digits, dots, dashes"),
        (("x" * 65,), "is no name"),
    ],
)
def test_names_that_cannot_be(base, tmp_path, capsys, names: tuple[str, ...], why: str) -> None:
    """Also the model's own, whose requests would be answered by a variant."""
    variants = [word for name in names for word in ("--variant", f"{name}={tmp_path / name}")]
    assert main(["serve", str(base), *variants, "--port", str(free_port())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("firsttoken: ") and why in line


# A variant that is served no more, of which a store still has what it computed.


def test_a_prefix_of_a_variant_that_was_removed(base, tmp_path, capsys) -> None:
    """The model and the other variant compute the prompt; once the variant is back, it takes what it had stored."""
    qa, chat = (write_adapter(tmp_path / name, seed) for seed, name in enumerate(("qa", "chat")))
    store = tmp_path / "store"
    with serving(base, variants=(("qa", qa), ("chat", chat))) as url:
        own = {name: said(url, PROMPT, name) for name in ("base", "qa", "chat")}
    assert len(set(own.values())) == 3, "else a prefix of another would not show"
    assert main(["prefix", "put", str(store), TEXT, "--model", str(base), "--adapter", str(qa)]) == 0
    with with_prefixes(base, store, variants=(("chat", chat),)) as url:
        assert said(url, PROMPT) == own["base"] and said(url, PROMPT, "chat") == own["chat"] and not restored(url)
        body = {"prompt": TEXT, "model": "qa", "max_tokens": 1}
        gone = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        message = "model: 'qa' is not served here; 'base' and 'chat' are"
        assert gone.status_code == 404 and gone.json()["error"]["message"] == message
    with with_prefixes(base, store, variants=(("qa", chat),)) as url:
        assert said(url, PROMPT, "qa") == own["chat"] and not restored(url), "another adapter has its name now"
    with with_prefixes(base, store, variants=(("qa", qa),)) as url:
        assert said(url, PROMPT, "qa") == own["qa"] and restored(url) == 1
    capsys.readouterr()
    (file,) = store.iterdir()
    key = file.name.partition(".")[0]
    assert main(["prefix", "drop", str(store), key]) == 0 and capsys.readouterr().out == f"{key}: dropped\n"
