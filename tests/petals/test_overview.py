"""The map of a swarm: who is asked, who is not and why, who took over, and what strangers may write on it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarms import spoil

from firsttoken.engine.request import Sampling
from firsttoken.petals.keys import public_hex
from firsttoken_serve.swarm.over_swarm import MOST_SERVERS, MOST_TEXT, swarm_status


def told(model) -> dict:
    return json.loads(json.dumps(swarm_status(model.chain, time.time()), allow_nan=False))


def test_it_shows_who_is_asked_and_who_took_over(here, client):
    ups = {up.record.server: up for up in here.serve((0, 3), (3, 6), (3, 6))}
    model = client(next(iter(ups.values())).record.address)
    before = told(model)
    assert {one["key"]: one["blocks"] for one in before["servers"]} == {
        key: list(up.record.blocks) for key, up in ups.items()
    }
    assert all(one["state"] == "serves" and 0 < one["expires_s"] <= 30 for one in before["servers"])
    assert (before["layers"], before["unserved"], before["replaced"]) == (6, [], [])
    request = model.engine.submit([1, 2, 3, 4, 5], Sampling(4))
    model.engine.step()
    first, second, spare = told(model)["servers"]
    assert [(one["asked"], one["requests"], one["served"]) for one in (first, second, spare)] == [
        ([[0, 3]], 1, 15),
        ([[3, 6]], 1, 15),
        ([], 0, 0),
    ]
    spoil(ups[second["key"]])
    model.engine.run()
    assert len(request.output) == 4
    now = told(model)
    (fault,) = now["replaced"]
    assert fault["key"] == second["key"] and "hold NaN" in fault["why"]
    assert fault["by"] == [{"key": spare["key"], "address": spare["address"], "blocks": [3, 6]}]
    assert [(one["key"], one["state"]) for one in now["servers"]] == [
        (first["key"], "serves"),
        (spare["key"], "serves"),
        (second["key"], "shunned"),
    ]


def test_strangers_write_little_on_it_and_serve_nothing(here, client):
    """Records that anybody may sign: of the model or another, of blocks that nobody else has, of any address."""
    (up,) = here.serve((0, 3))
    model, now = client(up.record.address), time.time()
    for number in range(MOST_SERVERS + 6):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32)
        name = f"<img src=x onerror=alert({number})>".ljust(250, "x")
        changed = {"address": f"{name}:80", "blocks": (0, 1000), "model": "a" * 64 if number % 2 else up.record.model}
        stranger = replace(up.record, server=public_hex(key), issued=now, expires=now + 300, **changed)
        model.swarm.registry.accept(stranger.signed(key), now)
    found = told(model)
    assert found["unserved"] == [3, 4, 5]  # as nobody who says so has answered
    assert (found["servers"][0]["key"], len(found["servers"]), found["more"]) == (up.record.server, MOST_SERVERS, 7)
    assert {one["state"] for one in found["servers"][1:]} == {"silent", "another version"}
    assert all(len(one["address"]) <= MOST_TEXT for one in found["servers"])
