"""Batched answers over a cache are what `generate` says, row by row."""

from __future__ import annotations

import pytest
import torch
from plain_tokens import generated as plain
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from firsttoken.assets.models import load_model
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study.errors import RequestError
from firsttoken_studies.droidspeak.answer_decoding import greedy

# one character a token, all different, so that two answers read the same only if they are
SYMBOLS = [chr(0x4E00 + i) for i in range(256)]
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, SYMBOLS[0])),
    clean_up_tokenization_spaces=False,
)
TOKENIZER.backend_tokenizer.decoder = decoders.Fuse()
PREFIXES = [5, 40, 23, 40, 1, 31, 12, 8]
SUFFIXES = [4, 1, 9, 3, 7, 7, 2, 1]
NEW = 12


def rows(lengths: list[int], seed: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (length,), generator=drawn).tolist() for length in lengths]


@pytest.fixture
def model():
    """A model that says something else wherever it looks: heavy weights, an output of its own."""
    tiny = load_model("random:tiny-6", seed=1).model
    torch.manual_seed(7)
    for parameter in tiny.parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)
    tiny.lm_head.weight = torch.nn.Parameter(torch.randn(256, 32), requires_grad=False)
    tiny.generation_config.eos_token_id = None
    return tiny


def generated(model, prefix: list[int], suffix: list[int]) -> list[int]:
    return plain(model, prefix + suffix, NEW).exact()


def answers(model, prefixes, suffixes, new=NEW, **options) -> list[str]:
    prefix = Prefix.of(prefixes)
    return greedy(model, TOKENIZER, prefix, suffixes, cache_of(full_prefill(model, prefix).kv), new, **options)


def text(tokens: list[int]) -> str:
    return "".join(SYMBOLS[token] for token in tokens)


@pytest.mark.parametrize(("before", "after"), [(PREFIXES, SUFFIXES), ([20] * 4, [3] * 4)], ids=["padded", "equal"])
def test_answers_are_those_of_generate_row_by_row(model, before, after):
    prefixes, suffixes = rows(before, 1), rows(after, 2)
    alone = [generated(model, p, s) for p, s in zip(prefixes, suffixes, strict=True)]
    assert len({tuple(said) for said in alone}) == len(alone), "the model must look at its prompt"
    assert answers(model, prefixes, suffixes) == [text(said) for said in alone]


def test_the_cache_is_used(model):
    prefixes, suffixes = rows(PREFIXES, 1), rows(SUFFIXES, 2)
    other, prefix = full_prefill(model, Prefix.of(rows(PREFIXES, 3))), Prefix.of(prefixes)
    own = answers(model, prefixes, suffixes)
    mixed = greedy(model, TOKENIZER, prefix, suffixes, cache_of(other.kv), NEW)
    assert sum(a != b for a, b in zip(own, mixed, strict=True)) >= 6


@pytest.mark.parametrize("several", [False, True])
def test_answers_end_before_the_model_s_end_token(model, several):
    prefixes, suffixes = rows(PREFIXES, 1), rows(SUFFIXES, 2)
    full = [generated(model, p, s) for p, s in zip(prefixes, suffixes, strict=True)]
    ends = [full[0][3], full[1][0]] if several else full[0][3]
    model.generation_config.eos_token_id = ends
    cut = [generated(model, p, s) for p, s in zip(prefixes, suffixes, strict=True)]
    kept = [[token for token in said if token not in torch.tensor([ends]).flatten()] for said in cut]
    assert any(len(a) < len(b) for a, b in zip(kept, full, strict=True))
    assert answers(model, prefixes, suffixes) == [text(said) for said in kept]


def test_answers_end_before_the_stop_and_are_stripped(model):
    prefixes, suffixes = rows(PREFIXES, 1), rows(SUFFIXES, 2)
    full = answers(model, prefixes, suffixes)
    stop = full[2][4]
    assert answers(model, prefixes, suffixes, stop=stop) == [said.split(stop)[0] for said in full]
    assert answers(model, prefixes, suffixes, stop="") == full


def test_the_length_is_kept(model):
    full = answers(model, rows(PREFIXES, 1), rows(SUFFIXES, 2))
    assert answers(model, rows(PREFIXES, 1), rows(SUFFIXES, 2), new=1) == [said[0] for said in full]


@pytest.mark.parametrize(("suffixes", "new"), [([[3]], 1), ([[3], []], 1), ([[3], [4]], 0)])
def test_what_cannot_be_asked(model, suffixes, new):
    with pytest.raises(RequestError, match=rf"{len(suffixes)} suffixes for 2 prefixes and {new} new tokens"):
        answers(model, rows([4, 6], 1), suffixes, new)


def test_rows_that_have_ended_leave_the_cache(model):
    prefixes, suffixes = rows(PREFIXES, 1), rows(SUFFIXES, 2)
    full = [generated(model, p, s) for p, s in zip(prefixes, suffixes, strict=True)]
    model.generation_config.eos_token_id = ends = [*(said[1] for said in full[:5]), full[5][4], full[6][6]]
    kept = [said[: next((at for at, token in enumerate(said) if token in ends), NEW)] for said in full]
    assert max(map(len, kept)) > 4 and sorted(map(len, kept))[4] <= 1, "five end early, two later, one goes on"
    prefix = Prefix.of(prefixes)
    cache = cache_of(full_prefill(model, prefix).kv)
    assert greedy(model, TOKENIZER, prefix, suffixes, cache, NEW) == [text(said) for said in kept]
    assert cache.layers[0].keys.shape[0] == 1
