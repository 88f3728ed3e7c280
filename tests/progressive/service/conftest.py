"""A staged checkpoint of a tiny model that never ends an answer by itself, and both kinds of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from firsttoken.assets.shapes import shape_config
from firsttoken.progressive.checkpoint.plan import staged
from firsttoken.progressive.checkpoint.sources import ModelSource, Origin
from firsttoken.progressive.checkpoint.writer import write_staged
from firsttoken.progressive.stages import StagePlan

MERGES = [("t", "h"), ("th", "e"), ("i", "n")]
MERGED = ["".join(pair) for pair in MERGES]


def byte_level() -> Tokenizer:
    """As in Llama 3, Qwen and SmolLM: a token is some bytes, of which some tokens are no character."""
    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *MERGED]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As in Llama 2: a token is some characters, what has none is spelt in bytes, and the first space is dropped."""
    letters = ["▁", *"abcdefghinot"]
    symbols = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *MERGED]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.fixture
def tokenizers() -> dict[str, Tokenizer]:
    """Both kinds of tokenizer, by name."""
    return TOKENIZERS


@pytest.fixture(params=TOKENIZERS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer."""
    return TOKENIZERS[request.param]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers; 1 and 2 wait for stage 2, 3 and 4 for stage 3. 109, 76 and 76 kB."""
    config = shape_config("tiny-6")
    config.update({"vocab_size": 260, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None})
    config.max_position_embeddings = 32768  # room for an answer that a client does not wait for
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), clean_up_tokenization_spaces=False)
    source = ModelSource(model, tokenizer, Origin("tiny", "5e12" * 16, "real"))
    folder = tmp_path_factory.mktemp("service") / "tiny"
    write_staged(source, staged(source.names, StagePlan.from_block(6, range(1, 5))), folder)
    return folder
