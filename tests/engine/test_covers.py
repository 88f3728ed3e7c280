"""What is composed covers what it must: a view its layers, a stored prefix its tokens, whatever part is lost."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from firsttoken.engine import decoder
from firsttoken.engine.decoder import Decoder, LocalSegment, check_cover
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Request, Sampling, ScheduledChunk
from firsttoken.engine.scheduler_state import PendingPrefix
from firsttoken.study.errors import ModelError, RequestError

ANSWER = 24


def covered(segments: list[range], layers: range) -> bool:
    try:
        check_cover([LocalSegment([nn.Identity()] * len(one), one.start) for one in segments], layers)
    except ModelError:
        return False
    return True


def test_only_each_layer_once_and_in_order_covers() -> None:
    """Of any cuts of any layers: whole they cover, without a part, with one twice, out of turn or moved they do not."""
    draw = random.Random(0)
    for _ in range(500):
        depth = draw.randint(1, 12)
        cuts = sorted({0, depth, *(draw.randint(0, depth) for _ in range(draw.randint(0, 4)))})
        parts = [range(low, high) for low, high in pairwise(cuts)]
        lo = draw.randrange(depth)
        some = range(lo, draw.randint(lo, depth))
        assert covered(parts, range(depth)) and covered(parts, some)
        one = draw.randrange(len(parts))
        assert not covered(parts[:one] + parts[one + 1 :], range(depth))
        assert not covered(parts[: one + 1] + parts[one:], range(depth))
        assert len(parts) == 1 or not covered(parts[::-1], range(depth))
        shorter = range(parts[one].start, parts[one].stop - 1)
        assert not covered([*parts[:one], shorter, *parts[one + 1 :]], range(depth))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_models_parts_give_the_logits_of_its_own_code(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the engine calls embedding, layers, norm and head by themselves where the model does no more."""
    model = request.getfixturevalue(name).model
    executor = LiveExecutor(model, 8)
    one = Request(0, tuple(range(5, 25)), Sampling(1), 0.0)
    one.blocks = [3, 1]
    step = executor.plan(executor.version, [ScheduledChunk(one, 0, 20, 0)])
    with closing(executor), torch.inference_mode():
        by_parts = executor.version.decoder.logits(step)
        monkeypatch.setattr(decoder, "_PLAIN", ())
        assert torch.equal(by_parts, executor.version.decoder.logits(step))


def test_a_view_that_loses_a_layer_computes_nothing(lab, llama) -> None:
    """At any moment: an error until the layer is back, then the tokens that it would have said."""
    run = lab.live(llama.model, 60)
    executor: LiveExecutor = run.engine.executor
    segment = LocalSegment(executor.version.decoder.segments[0].modules)
    executor.version = ModelVersion(Decoder(llama.model, [segment]))
    one = llama.known[-1]
    request = run.submit(one.prompt, Sampling(ANSWER))
    for lost in (0, 5, 11):
        run.until(lambda lost=lost: len(request.output) >= lost)
        layer = segment.modules.pop()
        for _ in range(2):
            with pytest.raises(ModelError, match=r"the segments \[0, 1\) are not the model's layers \[0, 2\) in order"):
                run.engine.step()
        segment.modules.append(layer)
    assert run.finish() == [list(one.answer)]


class Stored:
    """The keys and values of a prompt's first ``tokens``, by ``model`` itself; ``spoil`` changes what comes."""

    redo = range(0)

    def __init__(self, model: nn.Module, prompt: tuple[int, ...], tokens: int, spoil: Callable[[list], Any]) -> None:
        self.tokens, cache = tokens, DynamicCache()
        model = copy.deepcopy(model)  # which an engine may run
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            model(torch.tensor([prompt[:tokens]]), past_key_values=cache, use_cache=True)
        came = [(i, torch.stack([layer.keys, layer.values])) for i, layer in enumerate(cache.layers)]
        spoil(came)
        self._came, self.closed = came, False

    @property
    def complete(self) -> bool:
        return not self._came

    def begin(self) -> None:
        pass

    def edge(self) -> Tensor | None:
        return None

    def arrived(self) -> list[tuple[int, Tensor]]:
        return [self._came.pop(0)] if self._came else []

    def close(self) -> None:
        self.closed = True


def shortened(came: list) -> None:
    layer, kv = came[-1]
    came[-1] = layer, kv[..., :-1, :]


SPOILS: dict[str, tuple[Callable[[list], Any], str]] = {
    "whole": (lambda came: None, ""),
    "a layer lost": (lambda came: came.pop(), "ended without layer 1"),
    "the first lost": (lambda came: came.pop(0), "ended without layer 0"),
    "a layer twice": (lambda came: came.insert(0, came[0]), "brought layer 0 twice"),
    "a layer of another model": (lambda came: came.append((2, came[0][1])), "brought layer 2"),
    "a token short": (shortened, r"brought \[2, 1, 2, 19, \d+\] of 20 tokens for layer 1"),
}


@pytest.mark.parametrize("case", SPOILS)
def test_a_stored_prefix_that_lacks_a_part_is_computed(lab, llama, case: str) -> None:
    one, (spoil, why) = llama.known[-1], SPOILS[case]
    source = Stored(llama.model, one.prompt, 20, spoil)
    run = lab.live(llama.model, 60)
    request = run.engine.submit(one.prompt, Sampling(ANSWER), source=source)
    run.engine.run()
    assert request.output == list(one.answer) and source.closed
    assert (request.fell_back == "") == (not why)
    assert re.search(why, request.fell_back)


@pytest.mark.parametrize("redo", [range(1, 3), range(-1, 1), range(2, 1), range(0, 2, 2)])
def test_layers_that_the_model_does_not_have_are_not_computed_again(llama, redo: range) -> None:
    source = Stored(llama.model, llama.known[-1].prompt, 20, lambda came: None)
    source.redo = redo
    with pytest.raises(RequestError, match=r"recomputes layers range\(.*\), and the model has \[0, 2\)"):
        PendingPrefix(Request(0, [1], Sampling(), 0.0), source, 2)
