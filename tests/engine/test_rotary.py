"""Every rotary kind that is accepted: a request says what transformers says to it alone, in any company and pieces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from edited import set_keys
from plain_tokens import generated
from rotary import CONTEXT, MOST, ROTARY
from schedules import draw_schedule, perform
from transformers import LlamaConfig

from firsttoken.assets.models import load_model
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import RequestError

pytestmark = pytest.mark.usefixtures("in_pieces")
EVENTFUL = (8, 9, 16, 20, 24, 34)  # seeds of schedules in which all happens that may turn a key twice
NEW_KEYS = [name for name in ROTARY if "," not in name]
ANSWER = 24  # tokens of a known answer; the longest prompt has 40
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": MOST,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def turned(make_subject) -> dict[str, Any]:
    """By kind: a model, and what plain ``generate`` says."""
    return {name: make_subject(LlamaConfig(**SHAPE, **ROTARY[name])) for name in NEW_KEYS}


@pytest.mark.parametrize("name", NEW_KEYS)
def test_every_schedule_gives_the_plain_tokens(lab, turned, name: str) -> None:
    """Alone and in company, whole and in pieces, swapped and computed again, with shared prefixes and without."""
    seen = Counter()
    for seed in EVENTFUL:
        seen.update(perform(lab, turned[name], draw_schedule(seed, len(turned[name].known), arrivals=seed % 2 == 0)))
    wanted = "mixed", "shared", "swap: policy", "recompute: policy", "recompute: host pool full"
    assert all(seen[what] for what in wanted), f"the schedules are too tame: {seen}"


@pytest.mark.parametrize("name", NEW_KEYS)
def test_a_long_neighbour_changes_nothing(lab, turned, name: str) -> None:
    """A prompt longer than the model was trained with is refused where it would turn the others' keys."""
    run = lab.live(turned[name].model, 400, scheduler="sarathi")
    mine = [run.submit(one.prompt, Sampling(ANSWER)) for one in turned[name].known]
    long = [3, 5, 7] * 40
    if CONTEXT[name] < len(long):
        with pytest.raises(RequestError, match=f"exceed the model's context of {CONTEXT[name]} tokens"):
            run.submit(long, Sampling(8))
    else:
        run.submit(long, Sampling(8))
    run.finish()
    assert [request.output for request in mine] == [list(one.answer) for one in turned[name].known]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_longest_request_that_is_taken(lab, turned, name: str) -> None:
    """Its last token stands where the angles are about to change."""
    model, most = turned[name].model, min(CONTEXT[name], MOST)
    prompt = [(7 * i + i * i) % 251 for i in range(most - 10)]
    alone = generated(model, prompt, 10)
    run = lab.live(model, 300, requests=16, token_budget=48, scheduler="sarathi")
    first = run.submit(prompt, Sampling(10))
    run.submit(turned[name].known[0].prompt, Sampling(ANSWER))
    with pytest.raises(RequestError, match="exceed the model's context"):
        run.submit(prompt, Sampling(11))
    run.finish()
    assert first.output == alone.exact()


@pytest.mark.parametrize("name", [name for name in ROTARY if "," in name])
def test_a_folder_with_the_older_keys(lab, turned, name: str, tmp_path: Path) -> None:
    """The same model, whichever keys its config.json has."""
    kind = name.partition(",")[0]
    turned[kind].model.save_pretrained(tmp_path)
    set_keys(tmp_path / "config.json", **{"rope_parameters": ...} | ROTARY[name])
    run = lab.live(load_model(str(tmp_path), with_tokenizer=False).model, 60)
    assert run.engine.executor.limits.context == CONTEXT[name]
    mine = [run.submit(one.prompt, Sampling(ANSWER)) for one in turned[kind].known]
    run.finish()
    assert [request.output for request in mine] == [list(one.answer) for one in turned[kind].known]
