"""``firsttoken prefix``: what one model has computed, another of its shape takes, in a service."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from edited import set_keys, set_numbers
from services import (
    TIMEOUT_S,
    restored,
    said,
    serving,
    tiny_model,
    tiny_tokenizer,
    with_prefixes,
    write_endless,
    write_staged_endless,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from firsttoken.__main__ import main
from firsttoken.assets.checkpoint import combined_sha256, weight_files
from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study.errors import CacheError, StageError
from firsttoken_serve.prefixes.pair_profile import PairProfile, read_profiles, write_profile
from firsttoken_serve.service_config import ServiceConfig

TEXT = "the inn in the hat is a long way from here, and thin is the other one. "
MORE = "in the end"
GROUP = Group(2, 4)


def profile(group: Group, layers: int = 6) -> PairProfile:
    return PairProfile(layers, group.lo, group.hi, 0.0, 0.5, 0.05, 4, 32)


def stock(folder: Path) -> tuple[Any, Any]:
    """The model, and who it is."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    return model, identify(model, tokenizer, combined_sha256(weight_files(folder)))


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "base"
    write_endless(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base) -> Path:
    """The base after some training, as far as anybody can tell."""
    folder, model = base.parent / "tuned", tiny_model()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def put(store: Path, model: Path, *more: str, text: str = TEXT) -> str:
    """The key of what the command has stored."""
    before = set(store.glob("*.kv.safetensors")) if store.exists() else set()
    assert main(["prefix", "put", str(store), text, "--model", str(model), *more]) == 0
    (file,) = set(store.glob("*.kv.safetensors")) - before
    return file.name.partition(".")[0]


def answered(url: str, model: str | None = None) -> str:
    return said(url, TEXT + MORE, model)


def alone(folder: Path, **settings: Any) -> str:
    with serving(folder, **settings) as url:
        return answered(url)


@pytest.fixture(scope="module")
def expected_alone(base) -> str:
    return alone(base)


@torch.inference_mode()
def expected(sender: Path, receiver: Any, group: Group) -> str:
    """What ``receiver`` says to the prompt over what ``sender`` computed of its first tokens, ``group`` its own."""
    (one, _), prompt = stock(sender), ids(TEXT + MORE)
    whole = len(ids(TEXT)) // 16 * 16  # a block that is not full is of a prompt that ends in it
    prefix, new, out = Prefix.of([prompt[:whole]]), prompt[whole:], []
    sent = full_prefill(one, prefix, {group.lo} if group.needs_e_cache else ())
    for _ in range(12):
        cache = partial_prefill(receiver, prefix, sent, group)
        logits = suffix_logits(receiver, prefix, torch.tensor([[*new, *out]]), cache, keep=1)
        out.append(int(logits[0, -1].argmax()))
    return tiny_tokenizer().decode(out)


def test_a_model_takes_its_own(base, expected_alone, store, capsys) -> None:
    key = put(store, base)
    told = capsys.readouterr().out
    assert f"{key}: {len(ids(TEXT))} tokens, " in told and "only this model will take it" in told
    with with_prefixes(base, store) as url:
        assert answered(url) == expected_alone and restored(url) == 1
        assert said(url, "quite another") and restored(url) == 1


def test_another_model_takes_it_with_the_profiled_group(base, tuned, store, capsys) -> None:
    receiver, reader = stock(tuned)
    mixed, own = expected(base, receiver, GROUP), alone(tuned)
    assert mixed != own, "else the test says nothing"
    key = put(store, base)
    with with_prefixes(tuned, store) as url:
        assert answered(url) == own and restored(url) == 0, "a pair that nobody profiled"
    assert main(["prefix", "drop", str(store), key]) == 0
    write_profile(store, stock(base)[1], reader, profile(GROUP))
    capsys.readouterr()
    put(store, base)
    assert "only this model" not in capsys.readouterr().out
    with with_prefixes(tuned, store) as url:
        assert answered(url) == mixed and restored(url) == 1
        again = put(store, tuned)
        assert answered(url) == own and restored(url) == 2, "its own goes before another's, and is seen while it serves"
        assert main(["prefix", "drop", str(store), again]) == 0
        assert answered(url) == mixed and restored(url) == 3
    write_profile(store, stock(base)[1], reader, profile(Group(0, 6)))
    with with_prefixes(tuned, store) as url:
        assert answered(url) == own and restored(url) == 0, "all of it computed again is a prefill of its own"


def test_a_variant_takes_what_its_base_has_computed(base, store, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("peft")
    from fine_tunes import tuned, written

    peft = tuned(tiny_model(), 1, ["q_proj", "v_proj"])
    written(peft, tmp_path / "qa")
    merged = peft.merge_and_unload().eval()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{TEXT} number {n}, and {7 * n}. " for n in range(40)))
    command = ["prefix", "profile", str(store), "--model", str(base), "--receiver", str(base)]
    command += ["--receiver-adapter", str(tmp_path / "qa"), "--file", str(corpus), "--tokens", "48", "--items", "6"]
    monkeypatch.setattr("firsttoken.study.progress.QUIET_S", 0.0)
    assert main([*command, "--most-lost", "0.4"]) == 0
    assert "firsttoken: 6 texts of 56 tokens: 22 of 22 layer groups in " in capsys.readouterr().err
    ((_, found),) = read_profiles(store).items()
    put(store, base)
    with with_prefixes(base, store, variants=(("qa", tmp_path / "qa"),)) as url:
        taken = answered(url, "qa")
        assert restored(url) == (len(found.group) < 6)
        if len(found.group) < 6:
            assert taken == expected(base, merged, found.group)
        own = put(store, base, "--adapter", str(tmp_path / "qa"))
        before = restored(url)
        with serving(base, variants=(("qa", tmp_path / "qa"),)) as other:
            assert answered(url, "qa") == answered(other, "qa")
        assert restored(url) == before + 1 and len(own) == 32


def test_the_last_stage_takes_what_the_whole_model_has_computed(tmp_path, base, expected_alone, store) -> None:
    write_staged_endless(tmp_path / "staged", base)
    put(store, base)
    with with_prefixes(tmp_path / "staged", store) as url:
        assert answered(url) == expected_alone and restored(url) == 1


def test_a_chat_takes_what_was_stored_of_its_system_message(base, store, capsys) -> None:
    put(store, base, "--system", text="thin hats")
    with with_prefixes(base, store) as url:
        messages = [{"role": "system", "content": "thin hats"}, {"role": "user", "content": "the inn"}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).status_code == 200
        assert restored(url) == 1


# Whose it is.


def test_only_the_owner_reads_it(base, store, capsys) -> None:
    put(store, base, "--owner", "alice")
    assert main(["prefix", "list", str(store)]) == 0 and ", of alice" in capsys.readouterr().out
    for owner, reads in (("", 0), ("bob", 0), ("alice", 1)):
        with with_prefixes(base, store, prefix_owner=owner) as url:
            assert answered(url) and restored(url) == reads


def test_an_owner_needs_a_store() -> None:
    with pytest.raises(StageError, match="--prefix-owner is for --prefix-store; add that, or leave it out"):
        ServiceConfig(Path("model"), prefix_owner="alice")


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["put", "S", "--model", "BASE"], "prefix put: give the text, or --file FILE"),
        (["put", "S", "a", "--file", "f", "--model", "BASE"], "give the text or --file FILE, not both"),
        (["put", "S", "--file", "nowhere", "--model", "BASE"], "nowhere cannot be read: No such file"),
        (["put", "S", "", "--model", "BASE"], "prompt: it is empty"),
        (["put", "S", "a", "--model", "nowhere"], "no model folder nowhere"),
        (
            ["put", "S", "a", "--model", "BASE", "--adapter", "nowhere"],
            "nowhere cannot be read: No such file or directory; name a folder with",
        ),
        (["put", "S", "a", "--model", "BASE", "--edge", "9"], "no E-caches at layers [9] of 6"),
        (["put", "S", "a", "--model", "BASE", "--most-gb", "1e-6"], "takes"),
        (["list", "S"], "there is no folder"),
        (["drop", "S", "k"], "there is no folder"),
        (["profile", "S", "--model", "BASE", "--receiver", "BASE", "--file", "TEXT"], "are one model"),
        (["profile", "S", "--model", "BASE", "--receiver", "OTHER", "--file", "TEXT"], "another number of layers"),
        (["profile", "S", "--model", "BASE", "--receiver", "BASE", "--file", "SHORT"], "a pair needs a text of 264"),
    ],
)
def test_what_cannot_be_is_one_line(base, tmp_path, arguments, message: str, capsys) -> None:
    (tmp_path / "text").write_text("a number of words, " * 100)
    (tmp_path / "short").write_text("a few")
    shallow = tiny_model()
    shallow.model.layers = shallow.model.layers[:3]
    shallow.config.num_hidden_layers = 3
    shallow.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    places = {"S": "store", "TEXT": "text", "SHORT": "short", "OTHER": "other"}
    named = {short: str(tmp_path / name) for short, name in places.items()} | {"BASE": str(base)}
    assert main(["prefix", *(named.get(one, one) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert message in told.splitlines()[-1] and told.splitlines()[-1].startswith("firsttoken: ")
    assert not list((tmp_path / "store").glob("*")) if (tmp_path / "store").exists() else True


def test_a_full_disk_leaves_nothing_half_written(base, small_disk, capsys) -> None:
    (small_disk / "others").write_bytes(bytes((1 << 20) - 100_000))
    command = ["prefix", "put", str(small_disk), TEXT * 6, "--model", str(base)]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "No space left on device; mend that or use another folder" in told and told.count("\n") == 1
    assert [file.name for file in small_disk.iterdir()] == ["others"]


def test_ctrl_c_leaves_nothing_half_written(base, store) -> None:
    """It comes while the file is being written, under its temporary name."""
    script = f"""
import signal, sys, time
from contextlib import contextmanager
from firsttoken.droidspeak import kvfile

signal.signal(signal.SIGINT, signal.default_int_handler)
replacing = kvfile.replacing

@contextmanager
def slowly(path):
    with replacing(path) as temporary:
        temporary.write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(600)
        yield temporary

kvfile.replacing = slowly
from firsttoken.__main__ import main
sys.exit(main(["prefix", "put", {str(store)!r}, {TEXT!r}, "--model", {str(base)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout.readline() == b"writing\n"
        assert len(list(store.iterdir())) == 1
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130 and b"interrupted; nothing half-written was left" in told and b"Tr" not in told
    assert list(store.iterdir()) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100:] = bytes(100)  # of the last layer: only its sha256 can tell
    file.write_bytes(content)


no_number, infinite, beyond = (partial(set_numbers, value=value) for value in (math.nan, -math.inf, 1e38))


@pytest.mark.parametrize("spoil", [cut, altered, Path.unlink, no_number, infinite, beyond])
def test_what_is_spoilt_while_it_is_served_is_computed(base, expected_alone, store, spoil, capsys) -> None:
    """A file that is at fault is named once."""
    put(store, base)
    with with_prefixes(base, store) as url:
        (file,) = store.iterdir()
        spoil(file)
        assert answered(url) == expected_alone and answered(url) == expected_alone
    lines = [line for line in capsys.readouterr().err.splitlines() if str(file) in line]
    assert len(lines) == (spoil is not Path.unlink) and all("remove" in line for line in lines)


# Another config.json beside the same weights.


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({"rms_norm_eps": 0.3}, 0),
        ({"hidden_act": "gelu"}, 0),
        ({"max_position_embeddings": 16_384}, 0),
        ({"transformers_version": "5.0.0", "_name_or_path": "elsewhere", "torch_dtype": "float32", "dtype": ...}, 1),
        ({"attention_bias": ..., "rope_parameters": ..., "rope_theta": 10000}, 1),
    ],
)
def test_a_prefix_is_of_one_config_json(base, store, tmp_path, values: dict[str, Any], taken: int) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(base, folder)
    put(store, folder)
    set_keys(folder / "config.json", **values)
    with with_prefixes(folder, store) as url:
        assert answered(url) == alone(folder) and restored(url) == taken


# What is known of a pair.


def test_what_is_no_profile_says_nothing(base, tuned, store) -> None:
    whose, reader = stock(base)[1], stock(tuned)[1]
    file = write_profile(store, whose, reader, profile(GROUP))
    assert read_profiles(store) == {(whose.key, reader.key): profile(GROUP)}
    right = json.loads(file.read_text())
    for wrong in (
        "{",
        "[]",
        json.dumps(right | {"lo": 5, "hi": 3}),
        json.dumps(right | {"hi": 7}),
        json.dumps(right | {"more": 1}),
        json.dumps(right | {"format": "firsttoken-pair-2"}),
    ):
        file.write_text(wrong)
        assert read_profiles(store) == {}


def test_a_model_that_cannot_use_it_is_told(base, tuned) -> None:
    one, other = stock(base)[1], stock(tuned)[1]
    wide = replace(other, kv_heads=8)
    with pytest.raises(CacheError, match="another number of KV heads"):
        write_profile(Path("nowhere"), one, wide, profile(GROUP))
