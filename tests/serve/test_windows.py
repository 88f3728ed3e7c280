"""Gemma-3 over HTTP: layers that see a window beside layers that see all tokens, from a plain folder."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from plain_tokens import generated
from services import COMPLETIONS, GREEDY, LIMITS, byte_level, free_port, serving, tiny_tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from firsttoken.__main__ import main

PROMPT, TOKENS = "the inn in the hint of the thin ten", 24  # more than the window on both sides


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of random weights, every third of which sees all tokens, and the others the last eight."""
    config = Gemma3TextConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
        tie_word_embeddings=False,  # a tied head of random weights repeats the last token
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    at = tmp_path_factory.mktemp("gemma3")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(at)
    tiny_tokenizer().save_pretrained(at)
    return at


def said(folder: Path, **changes: int) -> str:
    """By transformers, with ``changes`` of the config."""
    model = AutoModelForCausalLM.from_pretrained(folder, **changes).eval()
    return byte_level().decode(generated(model, byte_level().encode(PROMPT).ids, TOKENS).exact())


def test_it_says_what_transformers_says(folder: Path) -> None:
    """With a window as long as the context, another answer would be right."""
    with serving(folder, **LIMITS) as url:
        asked = {"prompt": PROMPT, "max_tokens": TOKENS, **GREEDY}
        (choice,) = httpx.post(f"{url}{COMPLETIONS}", json=asked, timeout=60).json()["choices"]
    assert choice["text"] == said(folder) != said(folder, sliding_window=1000)


@pytest.mark.parametrize("option", ["--prefix-store", "--swarm"])
def test_what_has_no_windows_says_so(option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    values = {"--prefix-store": [str(tmp_path)], "--swarm": ["127.0.0.1:9"]}
    assert main(["serve", str(folder), "--port", str(free_port()), option, *values[option]]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "is served from its own folder alone, and neither by a swarm nor with variants or stored prefixes" in last
