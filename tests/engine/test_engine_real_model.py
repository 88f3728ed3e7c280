"""The pinned model on real conversations: the engine says what ``generate`` says, whatever is done to its requests."""

from __future__ import annotations

import re

import pytest
import torch
from plain_tokens import check_greedy, generated

from firsttoken.assets.models import load_model
from firsttoken.cps.policies import make_policy
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.trace import Trace
from firsttoken.simulation.workload.sharegpt import threshold_mix
from firsttoken.study import paths

NEW = 12
LARGER = "qwen2.5-coder-0.5b"
pytestmark = [pytest.mark.assets, pytest.mark.long(seconds=40)]


@pytest.fixture(scope="module")
def told():
    """The model in fp32, six ShareGPT prompts, and what plain generation of one at a time answers."""
    loaded = load_model("smollm2-135m", dtype=torch.float32)
    items = threshold_mix(loaded.tokenizer, 3, 3, scale=0.1, seed=3)
    prompts = [list(item.prompt) for item in items]
    loaded.model.generation_config.eos_token_id = None  # the engine ends where it is told to, and nowhere else
    return loaded.model, prompts, [generated(loaded.model, prompt, NEW) for prompt in prompts]


def check_answers(requests, answers) -> None:
    """Hold the outputs to ``answers``, most of them to the end."""
    compared = [check_greedy(request.output, plain) for request, plain in zip(requests, answers, strict=True)]
    assert sum(compared) > 0.8 * NEW * len(answers)


@pytest.mark.parametrize("policy", ["swap", "recompute", "cross_point"])
def test_real_conversations_are_answered_as_by_generate(told, policy: str) -> None:
    model, prompts, answers = told
    room = sum(-(-len(prompt) // 16) for prompt in prompts)  # for all of them, and for no answer
    executor = LiveExecutor(model, room, host_blocks=64)
    trace = Trace()
    made = make_policy(policy, threshold=100) if policy == "cross_point" else make_policy(policy)
    try:
        engine = Engine(executor, EngineConfig(watermark=0.0), policy=made, trace=trace)
        requests = engine.serve([(prompt, Sampling(NEW), 0.0) for prompt in prompts])
    finally:
        executor.close()
    check_answers(requests, answers)
    assert trace.recoveries, "nobody was preempted: the test shows nothing"
    assert engine.pool.free == engine.pool.count


def test_fused_layers_answer_the_same(told) -> None:
    """Last of those that ask for the model, as it is fused in place."""
    model, prompts, answers = told
    executor = LiveExecutor(fuse(model), sum(map(len, prompts)) // 16 + 4 * len(prompts))
    try:
        requests = Engine(executor).serve([(prompt, Sampling(NEW), 0.0) for prompt in prompts])
    finally:
        executor.close()
    check_answers(requests, answers)


def test_the_larger_model_answers_as_transformers_does() -> None:
    """Qwen2.5-Coder-0.5B where somebody has fetched it: biases, 14 heads over 2, and widths of 7 and 38 times 128."""
    if not (paths.CACHE / "models" / LARGER).is_dir():
        pytest.skip(f"`firsttoken fetch {LARGER}` brings it, and its first use converts it")
    loaded = load_model(LARGER, dtype=torch.float32)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Question: who sang it\nAnswer:"]
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    config = loaded.model.config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (896, 14, 2)
    sizes = sum(weight.numel() for weight in loaded.model.parameters())
    assert sizes == 494_032_768 + config.vocab_size * config.hidden_size, "its head is a matrix of its own"
    answers = [generated(loaded.model, prompt, 8) for prompt in prompts]
    executor = LiveExecutor(fuse(loaded.model), 16)
    try:
        requests = Engine(executor).serve([(prompt, Sampling(8), 0.0) for prompt in prompts])
    finally:
        executor.close()
    for request, plain in zip(requests, answers, strict=True):
        check_greedy(request.output, plain)


def test_the_lines_in_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (paths.ROOT / "lib" / "firsttoken" / "engine" / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert sum("LiveExecutor" in block for block in blocks) == 2
    exec("\n".join(blocks), {})
    assert re.search(r" after \d+\.\d\d s$", capsys.readouterr().out.strip())
