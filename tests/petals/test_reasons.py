"""Members that do not see each other say why: servers on their terminals, clients in the error, at once."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import replace

import pytest
import torch
from certificates import certificate
from services import free_port
from strangers import keyed, said
from swarms import says
from waiting import TIMEOUT_S, until

from firsttoken.__main__ import main
from firsttoken.petals import announcer, server
from firsttoken.petals.access import Access
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.keys import public_hex
from firsttoken.petals.records import steady_s
from firsttoken.petals.tuning.remote_training import RemoteTraining
from firsttoken.study.errors import SwarmError


def nobody() -> str:
    """An address at which nobody listens."""
    return f"127.0.0.1:{free_port()}"


def warned(capsys, words: str) -> str:
    """What is said on the terminal, as soon as it holds ``words``."""
    parts: list[str] = []
    until(lambda: parts.append(capsys.readouterr().err) or re.search(words, "".join(parts)), words)
    return "".join(parts)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_clocks_that_differ_by_an_hour_part_nobody(ahead_s, here, client, asked, monkeypatch):
    (door,) = here.serve((0, 3))
    door.announcer._renew = lambda _: None  # its clock is right
    with monkeypatch.context() as patched:
        for module in (announcer, server):
            patched.setattr(module, "steady_s", lambda: steady_s() + ahead_s)
        (other,) = here.serve((3, 6), peers=[door.record.address])
    assert abs(other.record.issued - steady_s() - ahead_s) < 30
    says(client(other.record.address), asked(5, 4))
    assert door.registry.live(steady_s()) and not other.failed.done()


def test_a_wall_clock_that_is_set_ends_no_server_and_keeps_no_client_out(here, client, asked, monkeypatch):
    """Forwards by a minute, right again, and back by half a minute, each for longer than a record lives."""
    ups, true = here.serve((0, 3), (3, 6), limits={"expiry_s": 0.6}), time.time
    for off_s in (60.0, 0.0, -30.0, -1e9):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: true() + off_s)
        issued = [up.record.issued for up in ups]
        time.sleep(1.0)
        until(lambda old=issued: all(up.record.issued > one for up, one in zip(ups, old, strict=True)), "it is renewed")
        assert not any(up.failed.done() for up in ups)
        says(client(ups[0].record.address), asked(5, 4))


def test_a_server_says_who_does_not_know_it_and_says_it_again_when_the_reason_changes(here, capsys):
    wrong = nobody()
    (up,) = here.serve((0, 6), peers=[wrong])
    assert f"not known to others; {wrong}: nobody listens there" in warned(capsys, "not known")
    with socket.create_server(("127.0.0.1", int(wrong.rpartition(":")[2]))) as listening:
        listening.settimeout(0.2)
        closed, end = 0, time.monotonic() + TIMEOUT_S
        while not closed or "ends connections" not in capsys.readouterr().err:
            assert time.monotonic() < end
            try:
                listening.accept()[0].close()
                closed += 1
            except TimeoutError:
                pass
    assert not up.failed.done()


def test_a_server_whose_address_leads_nowhere_says_so(here, client, capsys):
    (door,) = here.serve((0, 3))
    wrong = nobody()
    here.serve((3, 6), peers=[door.record.address], address=wrong)
    text = warned(capsys, "not known to others")
    assert f"does not reach itself at {wrong}, the address that it gives others: nobody listens there" in text
    assert f"{door.record.address}: {wrong} does not answer when it is called back: nobody listens there" in text
    with pytest.raises(SwarmError, match=f"refuses {wrong}: .*nobody listens there"):
        client(door.record.address, timeouts={"find_s": 0.1}).generate(torch.tensor([[1]]), 1)


def test_another_model_is_named(here, client, folder, capsys):
    (up,) = here.serve((0, 6), model="c" * 64)
    with pytest.raises(SwarmError, match=f"blocks 0 to 5: .*seen: 1 of another model, as at {up.record.address}"):
        client(up.record.address, timeouts={"find_s": 0.1}).generate(torch.tensor([[1]]), 1)
    assert main(["swarm", "list", "--model", str(folder), "--registry", up.record.address]) == 0
    assert "0 servers have blocks of the model; seen beside: 1 of another model" in capsys.readouterr().err


def test_a_server_that_is_silent_or_was_shunned_is_named(here, client):
    (up,) = here.serve((0, 3))
    model = client(up.record.address, timeouts={"find_s": 0.1})
    gone = replace(up.record, server=public_hex(keyed(9)), address=nobody(), blocks=(3, 6)).signed(keyed(9))
    model.swarm.registry.accept(gone, time.time())
    model.swarm.conduct.failed(up.record.server)
    with pytest.raises(SwarmError, match=f"blocks 3 to 5: .*{gone.address}: nobody listens there.*failed lately"):
        model.generate(torch.tensor([[1]]), 1)


def test_a_wrong_registry_is_known_at_once_to_every_command(here, client, folder, capsys):
    wrong, begun = nobody(), time.monotonic()
    said_so = f"no server of a swarm answers at {wrong}: name HOST:PORT of one that runs"
    with pytest.raises(SwarmError, match=rf"{said_so} \({wrong}: nobody listens there\)"):
        client(wrong)
    with pytest.raises(SwarmError, match=said_so):
        RemoteTraining(folder, [wrong])
    assert main(["swarm", "list", "--model", str(folder), "--registry", wrong]) == 2
    assert said_so in capsys.readouterr().err
    assert time.monotonic() - begun < 25


def test_a_token_or_a_certificate_that_does_not_fit_is_named(here, client, capsys, tmp_path):
    public, private = certificate()
    (up,) = here.serve((0, 3), access=Access("secret", public, public, private))
    for access, why in ((Access("other", public), "asks for a token"), (Access("secret"), "TLS needs --tls-ca")):
        here.serve((3, 6), peers=[up.record.address], access=access)
        assert f"{up.record.address}: " in (text := warned(capsys, why)) and "not known to others" in text


def test_members_of_another_version_are_named(here, client):
    (up,) = here.serve((0, 6))
    up.announcer.answer = lambda *_: b'{"server": null, "records": []}'  # as the first version answered
    with pytest.raises(SwarmError, match="speaks version 1 of records, not 3: have one version on all members"):
        client(up.record.address)


def test_a_server_is_told_why_it_is_refused(here):
    (up,), now = here.serve((0, 6)), time.time()
    made = replace(up.record, server=public_hex(keyed(3)), address="192.0.2.1:5", issued=now, expires=now + 30)
    told = wait_for(said(up.record.address, made.signed(keyed(3))))
    assert (
        told.refused == "192.0.2.1:5 is on another machine, and this swarm has no TLS: give --tls-ca and --token-file"
    )
    assert told.others == (f"192.0.2.1:5: {told.refused}",)
