"""Servers that lie, are wrong, share a key, or are cut off from the others; and who may listen where."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from certificates import certificate
from plain_tokens import check_greedy
from swarms import lose, says
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from waiting import TIMEOUT_S, until

from firsttoken.__main__ import main
from firsttoken.assets.models import load_model
from firsttoken.engine.engine import Engine
from firsttoken.engine.request import Sampling
from firsttoken.petals.access import Access
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.records import TwinError
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.petals.session import ServerLimits
from firsttoken.petals.timeouts import Timeouts
from firsttoken.study.errors import SwarmError
from firsttoken_studies.record import kernel_forkserver


async def cancel(up) -> None:
    """The server says nothing of itself any more."""
    up.failed.cancel()


def test_blocks_of_another_model_are_passed_by(here, client, asked):
    """They are not asked, though their server belongs to the same swarm."""
    good = here.serve((0, 6))[0]
    here.serve((0, 6), peers=[good.record.address], model="c" * 64)
    model, one = client(good.record.address), asked(8, 6)
    assert {record.server for record in model.swarm.servers()} == {good.record.server}
    says(model, one)


def test_a_server_that_has_lost_its_sequences_is_told_them_again(here, client, asked):
    """A session ends; the next step finds out, and the same server goes on."""
    up = here.serve((0, 6))[0]
    model, one = client(up.record.address), asked(8, 6)
    request = model.engine.submit(one.prompt, Sampling(6))
    while not request.finished:
        if len(request.output) == 3 and not model.chain.faults:
            wait_for(lose(up))
            until(lambda: not up.sessions.open, "the session has ended")
        model.engine.step()
    assert check_greedy(request.output, one.plain) == 6
    assert [server for server, _ in model.chain.faults] == [up.record.server]


def test_nobody_serves_a_block(here, client):
    up = here.serve((0, 4))[0]
    model = client(up.record.address, timeouts={"find_s": 0.2})
    with pytest.raises(SwarmError, match=r"no server that answers has blocks 4 to 5: start one .* \(waited 0.2 s"):
        model.generate(torch.tensor([[1, 2]]), 2)
    here.serve((4, 6), peers=[up.record.address])
    assert model.generate(torch.tensor([[1, 2]]), 2).shape == (1, 4)


def test_a_ghost_is_gone_within_one_expiry(here):
    """A server that ends without a word, and one that says that it leaves."""
    up, ghost = here.serve((0, 6), (0, 3), limits={"expiry_s": 0.8})

    def served() -> set[str]:
        return {one.server for one in up.registry.serving(here.model, time.time())}

    until(lambda: ghost.record.server in served(), "it is known")
    wait_for(cancel(ghost))
    until(lambda: ghost.record.server not in served(), "it is forgotten", 0.8 + 0.5)
    until(lambda: up.record.server in served(), "who is there is known")


def test_a_partition_heals(here):
    """Two halves that know nothing of each other become one when one member hears of another."""
    left, right = here.serve((0, 3))[0], here.serve((3, 6))[0]
    third = here.serve((0, 6), peers=[left.record.address, right.record.address], limits={"expiry_s": 1.0})[0]
    everyone = {one.record.server for one in (left, right, third)}
    for one in (left, right, third):
        until(lambda one=one: {r.server for r in one.registry.live(time.time())} == everyone, "it knows all")


def test_two_servers_with_one_key_are_not_two(here, tmp_path):
    """The later one ends with the reason, the earlier one goes on."""
    key, limits = tmp_path / "key", {"expiry_s": 0.6}
    door = here.serve((0, 6), limits=limits)[0]
    first = here.serve((0, 3), peers=[door.record.address], key=key, limits=limits)[0]
    second = here.serve((3, 6), peers=[door.record.address], key=key, limits=limits)[0]
    until(second.failed.done, "the later one ends")
    with pytest.raises(TwinError, match=f"is in use at {re.escape(first.record.address)}: give each server a key"):
        second.failed.result()
    assert not first.failed.done()
    until(lambda: door.registry.at(first.record.address, time.time()) is not None, "the earlier one is known")
    assert door.registry.at(second.record.address, time.time()) is None


def test_other_machines_need_tls_and_a_token(here, client, asked, tmp_path):
    public, private = certificate()
    for access in (Access(), Access(token="t"), Access(certificate=public, key=private)):
        with pytest.raises(SwarmError, match="can be reached from other machines: give --tls-cert, --tls-key and"):
            here.serve((0, 6), host="0.0.0.0", access=access)
    whole = Access("secret", public, public, private)
    ups = here.serve((0, 3), (3, 6), access=whole)
    one, door = asked(8, 6), ups[0].record.address
    says(client(door, access=Access("secret", public)), one)
    timeouts = {"find_s": 0.1}
    token, tls = "asks for a token: give --token-file", "one with TLS needs --tls-ca"
    for wrong, why in ((Access("other", public), token), (Access("", public), token), (Access("secret"), tls)):
        with pytest.raises(SwarmError, match=f"no server of a swarm answers at {door}: name .*{why}"):
            client(door, access=wrong, timeouts=timeouts).generate(torch.tensor([[1]]), 1)
    with pytest.raises(SwarmError, match=r"192\.0\.2\.1:5 is on another machine: give --tls-ca"):
        Access().channel("192.0.2.1:5", 32)


def test_the_command_serves_and_says_what_is_wrong(here, folder, imported, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("firsttoken.engine.kv.free_memory_bytes", lambda: 3 << 30)
    serve = ["swarm", "serve", "--model", str(folder), "--blocks"]
    for words, said in (
        ([*serve, "0:9"], "blocks '0:9' are not a:b with 0 <= a < b <= 6"),
        ([*serve, "all"], "blocks 'all' are not a:b"),
        ([*serve, "0:2", "--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        ([*serve, "0:2", "--token-file", str(tmp_path / "none")], "none cannot be read: No such file"),
        (["swarm", "serve", "--model", str(tmp_path), "--blocks", "0:1"], "config.json"),
        ([*serve, "0:2", "--kv-tokens", "100000000"], "GiB, and 3.0 GiB of memory are free; ask for fewer"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    up = here.serve((0, 3))[0]
    command = kernel_forkserver.command(
        "firsttoken", [*serve, "3:6", "--dtype", "float32", "--registry", up.record.address]
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert re.fullmatch(
            r"blocks \[3, 6\) of tiny are served at 127\.0\.0\.1:\d+ by process \d+; Ctrl-C ends it\n", line
        )
        until(lambda: len(up.registry.serving(here.model, time.time())) == 2, "both are known")
        assert main(["swarm", "list", "--model", str(folder), "--registry", up.record.address]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert [row[:13] for row in listed] == ["blocks [0, 3)", "blocks [3, 6)"]
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    words = [*serve, "auto", "--count", "2", "--dtype", "float32", "--registry", up.record.address]
    words += ["--address", "127.0.0.1:5"]
    with subprocess.Popen(kernel_forkserver.command("firsttoken", words), stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()  # blocks of those that nobody serves the first
        assert re.fullmatch(
            r"blocks \[3, 5\) of tiny are served at 127\.0\.0\.1:5 by process \d+, on port \d+ here; .*\n", line
        )
        process.terminate()
        process.wait(TIMEOUT_S)
    assert [one.blocks for one in up.registry.serving(here.model, time.time())] == [(0, 3)]  # it has told that it left


@pytest.mark.parametrize("end", [None, "</s>"])
def test_an_answer_of_a_folder_as_it_is_published(here, folder, imported, capsys, tmp_path, end, monkeypatch):
    """A tokenizer.json is all that is needed: neither the name of an end, nor that of a class of transformers."""
    up = here.serve((0, 6))[0]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    words = ["swarm", "generate", "--model", str(copy), "--registry", up.record.address, "--max-tokens", "3", "a b"]
    for there in ("nothing", "tokenizer.model", "torn"):
        if there == "tokenizer.model":
            (copy / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
            (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        elif there == "torn":
            (copy / "tokenizer.json").write_text('{"version": "1.0", "mod')
        assert main(words) == 2
        complaint = capsys.readouterr().err
        assert "tokenizer.json" in complaint and "; copy the model's own" in complaint and complaint.count("\n") == 1
    words_of = {"a": 1, "b": 2} | {f"t{number}": number for number in range(3, 256)}
    Tokenizer(WordLevel({"[unk]": 0} | words_of, unk_token="[unk]")).save(str(copy / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": end} if end else {})
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(words) == 0
    assert (text := capsys.readouterr().out.strip()).startswith("[unk] t")
    if end is None:  # what was generated before a fault is there
        steps, pieces, step = itertools.count(), [], Engine.step
        monkeypatch.setattr("builtins.print", lambda *said, **how: pieces.extend(said if how.get("end") == "" else ()))

        def fails(engine):
            if next(steps) == 2:
                raise SwarmError("nobody has block 3")
            return step(engine)

        monkeypatch.setattr(Engine, "step", fails)
        assert main(words) == 2
        assert len(pieces) > 1 and text.startswith("".join(pieces)) and len(text) > len("".join(pieces))


@pytest.mark.parametrize("kind", [ServerLimits, Timeouts])
def test_limits_and_times_are_checked(kind):
    name = "rebalance_s" if kind is ServerLimits else "step_s"
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(SwarmError, match=f"{name} must be seconds above 0, not"):
            kind(**{name: wrong})
    with pytest.raises(TypeError):
        kind(nosuch=1)


def test_only_its_blocks_are_in_memory(here, folder):
    """Two of six layers, whatever shards they lie in, and no ends."""
    stack = here.serve((2, 4))[0].sessions.batcher.backend
    assert len(stack._segment.modules) == 2 and stack.pool.shape.layers == 2
    whole = load_model(str(folder), with_tokenizer=False).model
    assert stack.width == whole.config.hidden_size


def test_a_client_without_a_swarm(folder):
    with pytest.raises(SwarmError, match="a swarm is found by one of its servers: name HOST:PORT"):
        RemoteModel(folder, [])
    with pytest.raises(SwarmError, match="no coding is called 'int4'"):
        RemoteModel(folder, ["127.0.0.1:1"], coding="int4")


@pytest.mark.skipif(sys.platform != "linux", reason="which OpenMP torch has is known on Linux only")
def test_the_loop_of_the_swarm_leaves_the_processors_to_who_computes():
    asked = """if True:
        import torch
        from firsttoken.petals.event_loop import wait_for

        async def threads():
            torch.ones(1 << 20).mul_(2)
            return torch.get_num_threads()

        torch.set_num_threads(2)
        print(wait_for(threads()), torch.get_num_threads())
    """
    assert subprocess.check_output([sys.executable, "-c", asked], text=True).split() == ["1", "2"]
