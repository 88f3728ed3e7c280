"""Weights that are no number, at a server or at the client: a request ends with an error of one line, whatever the
coding, and who does not read them is answered."""

from __future__ import annotations

import copy
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from swarms import Here

from firsttoken.engine.request import Sampling
from firsttoken.study.errors import OutputError, SwarmError

TOKENS = 4
PLACES = {"a server's layer": "model.layers.4.mlp.down_proj.weight", "the client's head": "lm_head.weight"}


def damaged(tiny, name: str, folder: Path, what: float) -> Path:
    model = copy.deepcopy(tiny)
    with torch.no_grad():
        model.get_parameter(name)[3, 2] = what
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("place", "coding", "what"),
    [
        ("a server's layer", "float32", torch.nan),
        ("a server's layer", "int8", torch.nan),
        ("a server's layer", "float32", torch.inf),
        ("the client's head", "float32", torch.nan),
    ],
)
def test_an_error_and_no_empty_answer(tiny, asked, client, tmp_path, place: str, coding: str, what: float) -> None:
    folder, one = damaged(tiny, PLACES[place], tmp_path / "damaged", what), asked(7, TOKENS)
    with closing(Here(folder)) as here:
        ups = here.serve((0, 3), (3, 6))
        model = client(ups[0].record.address, folder=folder, coding=coding, timeouts={"find_s": 0.5, "ban_s": 0.1})
        request, begun = model.engine.submit(one.prompt, Sampling(TOKENS)), time.monotonic()
        with pytest.raises((OutputError, SwarmError)) as met:
            model.engine.run()
        assert "\n" not in str(met.value) and re.search("no finite number|NaN or infinity", str(met.value))
        assert request.output == [] and time.monotonic() - begun < 30
        model.engine.cancel(request)
        assert not model.engine.busy and model.engine.pool.free == model.engine.pool.count
        assert all(not up.sessions.ends.get("INTERNAL") for up in ups)
