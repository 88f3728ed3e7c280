"""Cross-Point Scheduling on a real vLLM, with a tiny random Llama: `tests/run.sh --vllm` runs this."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs the environment that env/vllm/setup.sh makes")

import torch  # noqa: E402
from transformers import (  # noqa: E402
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from vllm.v1.kv_cache_interface import KVCacheConfig  # noqa: E402

from firsttoken.engine.preemption.victims import VICTIMS  # noqa: E402
from firsttoken.engine.swap.host_pool import Span  # noqa: E402
from firsttoken.study.errors import ProfileError  # noqa: E402
from firsttoken_extras.vllm_cross_point.connector import KVBlocksOnHost  # noqa: E402
from firsttoken_extras.vllm_cross_point.scheduler import CrossPointScheduler, RunningRequest  # noqa: E402
from firsttoken_extras.vllm_cross_point.settings import supported_cache  # noqa: E402

BLOCK_TOKENS = 32
CONTEXT = 256
FEW_BLOCKS = 20  # two and a half contexts for ten requests
NEW_TOKENS = 80
HOST_BYTES = 64 << 20
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 10, "scheduler_reserve_full_isl": False}
SHUFFLED = random.Random(0)
PROMPTS = [[SHUFFLED.randrange(512) for _ in range(SHUFFLED.randrange(10, 150))] for _ in range(10)]

SCHEDULER = "firsttoken_extras.vllm_cross_point.scheduler.CrossPointScheduler"
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",  # in bfloat16 another batch can already mean another token
    "block_size": BLOCK_TOKENS,
    "max_model_len": CONTEXT,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}


def connector(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "CrossPointConnector",
        "kv_connector_module_path": "firsttoken_extras.vllm_cross_point.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(scope="module", autouse=True)
def engine_in_this_process() -> Iterator[None]:
    """So that a test can look into the scheduler, and an error arrives as it was raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    # a wide initializer, so that every token depends on all before it
    config = LlamaConfig(num_hidden_layers=3, initializer_range=0.3, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def started(model: Path, **options: Any) -> Iterator[vllm.LLM]:
    llm = vllm.LLM(model=str(model), **ENGINE | {"enable_prefix_caching": False} | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def with_cross_point(model: Path, threshold: int, host_bytes: int = HOST_BYTES, rules: Any = (), **options: Any):
    transfer = connector(threshold_tokens=threshold, host_bytes=host_bytes, **dict(rules))
    few = {"num_gpu_blocks_override": FEW_BLOCKS, "scheduler_cls": SCHEDULER, "kv_transfer_config": transfer}
    return started(model, **few | options)


def sampling(new_tokens: int = NEW_TOKENS) -> vllm.SamplingParams:
    return vllm.SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)


def generate(llm: vllm.LLM, tokens: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
    outputs = llm.generate(prompts, sampling(new_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def finish(engine: Any) -> dict[str, list[int]]:
    """Step until nothing is left; each finished request's tokens."""
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return done


def scheduler_of(llm: vllm.LLM):
    return llm.llm_engine.engine_core.engine_core.scheduler


def counts_of(llm: vllm.LLM) -> Counter[str]:
    return scheduler_of(llm).connector.counts


@pytest.fixture(scope="module")
def unconstrained(model: Path) -> list[list[int]]:
    """The tokens of a stock vLLM that never preempts."""
    with started(model) as llm:
        return generate(llm)


@pytest.mark.parametrize("caching", [False, True], ids=["no-prefix-cache", "prefix-cache"])
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(10**6, {"swapped"}), (0, {"over_threshold"}), (130, {"swapped", "over_threshold"})],
    ids=["all-swapped", "all-recomputed", "mixed"],
)
def test_tokens_are_those_without_preemption(
    model: Path, unconstrained: list, threshold: int, expected: set, caching: bool
) -> None:
    with with_cross_point(model, threshold, enable_prefix_caching=caching) as llm:
        assert generate(llm) == unconstrained
        counts = counts_of(llm)
        assert {way for way in counts if counts[way]} - {"restored"} == expected
        assert bool(counts["restored"]) == bool(counts["swapped"])
        if not caching:  # a prefix cache may still hold all of a swapped request, and nothing is copied back
            assert counts["restored"] == counts["swapped"]
        assert scheduler_of(llm).connector.held == {}


def by_arrival(request: Any) -> float:
    return request.arrival_time


def by_tokens(request: Any) -> tuple[int, float]:
    return request.num_computed_tokens, request.arrival_time


def by_rest(request: Any) -> tuple[int, float]:
    return request.max_tokens - request.num_output_tokens, request.arrival_time


RULES = {  # written once more, for vLLM's own requests
    "last_arrived": partial(max, key=by_arrival),
    "first_arrived": partial(min, key=by_arrival),
    "longest": partial(max, key=by_tokens),
    "shortest": partial(min, key=by_tokens),
    "most_remaining": partial(max, key=by_rest),
    "least_remaining": partial(min, key=by_rest),
}


@pytest.fixture
def victims(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of the preempted requests. Each is held against ``RULES``, and must wait where the order says."""
    prompts, preempt = [], CrossPointScheduler._preempt_request

    def check(scheduler: CrossPointScheduler, request: Any, *args: Any, **options: Any) -> None:
        settings = scheduler.connector.settings
        if rule := RULES.get(settings.victim):
            assert rule([*scheduler.running, request]) is request
        if settings.victim:
            for running in scheduler.running:
                times_s = RunningRequest(running, []).times_s
                assert times_s == sorted(times_s) and len(times_s) == running.num_output_tokens
        preempt(scheduler, request, *args, **options)
        prompts.append(list(request.prompt_token_ids))
        if settings.resume == "in_order":
            back = [by_arrival(waiting) for waiting in scheduler.waiting if waiting.num_preemptions]
            assert back == sorted(back)
        else:
            assert scheduler.waiting[0] is request

    monkeypatch.setattr(CrossPointScheduler, "_preempt_request", check)
    return prompts


@pytest.mark.parametrize("resume", ["last_preempted_first", "in_order"])
@pytest.mark.parametrize("victim", sorted(VICTIMS))
def test_each_rule_picks_its_victim_and_changes_no_token(
    model: Path, unconstrained: list, victims: list, victim: str, resume: str
) -> None:
    options = CHUNKS | {"enable_prefix_caching": True} if resume == "in_order" else {}
    with with_cross_point(model, 130, rules={"victim": victim, "resume": resume}, **options) as llm:
        assert generate(llm) == unconstrained
        assert scheduler_of(llm).connector.held == {}
    assert victims


def test_a_block_that_a_victim_did_not_compute_is_not_in_the_prefix_cache(model: Path) -> None:
    """The first is taken out of a step that was to compute two of its blocks, and the second needs only one of them."""
    prompts = [SHUFFLED.choices(range(512), k=tokens) for tokens in (160, 2 * BLOCK_TOKENS, 40)]
    with started(model) as llm:
        expected = generate(llm, prompts, 20)
    options = {"long_prefill_token_threshold": 2 * BLOCK_TOKENS, "scheduler_reserve_full_isl": False}
    options |= {"num_gpu_blocks_override": 9, "enable_prefix_caching": True}
    with with_cross_point(model, 0, rules={"victim": "first_arrived"}, **options) as llm:
        assert generate(llm, prompts, 20) == expected
        assert counts_of(llm)["partial_prefill"] == 1


def test_without_a_rule_vllm_preempts_the_last_admitted(model: Path, unconstrained: list, victims: list) -> None:
    for rules in ({}, {"victim": "last_admitted", "resume": "last_preempted_first"}):
        with with_cross_point(model, 130, rules=rules) as llm:
            assert generate(llm) == unconstrained
    half = len(victims) // 2
    assert half and victims[:half] == victims[half:]


def test_restoring_anything_else_gives_other_tokens(
    model: Path, unconstrained: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_in = KVBlocksOnHost.copy_in

    def zeros(pool: KVBlocksOnHost, held: Span, blocks: list[int]) -> None:
        pool.rows[:, held.start : held.end] = 0
        copy_in(pool, held, blocks)

    monkeypatch.setattr(KVBlocksOnHost, "copy_in", zeros)
    with with_cross_point(model, 10**6) as llm:
        assert generate(llm) != unconstrained
        assert counts_of(llm)["restored"] > 0


def test_a_full_host_pool_means_recompute(model: Path, unconstrained: list) -> None:
    with with_cross_point(model, 10**6, host_bytes=HOST_BYTES // 256) as llm:
        assert generate(llm) == unconstrained
        assert counts_of(llm)["host_full"] > 0
        assert counts_of(llm)["swapped"] > 0
        assert counts_of(llm)["over_threshold"] == 0


def test_a_victim_in_the_middle_of_its_prefill_is_recomputed(model: Path, unconstrained: list) -> None:
    with with_cross_point(model, 10**6, **CHUNKS) as llm:
        assert generate(llm) == unconstrained
        assert counts_of(llm)["partial_prefill"] > 0


def test_an_aborted_request_leaves_the_host_pool(model: Path, unconstrained: list) -> None:
    with with_cross_point(model, 10**6) as llm:
        engine, cross_point = llm.llm_engine, scheduler_of(llm).connector
        room = cross_point.host.free
        ids = [engine.add_request(f"{at}", {"prompt_token_ids": ids}, sampling()) for at, ids in enumerate(PROMPTS)]
        while not cross_point.held:
            engine.step()
        (swapped, *_) = cross_point.held
        assert cross_point.host.free < room
        engine.abort_request([swapped], internal=True)
        assert swapped not in cross_point.held
        done = {}
        while engine.has_unfinished_requests():
            done |= {
                output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished
            }
        assert len(done) == len(ids) - 1
        assert all(tokens == unconstrained[int(at)] for at, tokens in done.items())
        assert cross_point.held == {} and cross_point.host.free == room


def test_a_reset_forgets_what_is_swapped(model: Path, unconstrained: list) -> None:
    """A reset means new weights: what was computed with the old ones must not come back."""
    with with_cross_point(model, 10**6) as llm:
        engine, scheduler = llm.llm_engine, scheduler_of(llm)
        for at, ids in enumerate(PROMPTS):
            engine.add_request(f"{at}", {"prompt_token_ids": ids}, sampling())
        while not scheduler.connector.held:
            engine.step()
        before = scheduler.connector.counts.copy()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        assert scheduler.connector.held == {} and scheduler.connector.counts == before
        done = {}
        while engine.has_unfinished_requests():
            done |= {
                output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished
            }
        assert [done[str(at)] for at in range(len(PROMPTS))] == unconstrained


def test_layers_with_and_without_a_window(tmp_path: Path) -> None:
    """With a KV connector vLLM keeps all tokens for every layer, in one kind of cache."""
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=4, layer_types=layers, sliding_window=48, initializer_range=0.3, **SIZES
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with started(tmp_path) as llm:
        expected = generate(llm)
    with with_cross_point(tmp_path, 10**6) as llm:
        assert generate(llm) == expected
        assert counts_of(llm)["restored"] > 0


def test_a_window_in_every_layer_is_refused(tmp_path: Path) -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=48, **SIZES)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ProfileError, match="a KV cache of SlidingWindowSpec"), with_cross_point(tmp_path, 8):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_transfer_config": connector(threshold=8, host_bytes=1 << 20)}, "unknown key 'threshold'"),
        ({"kv_transfer_config": connector(threshold_tokens=-1, host_bytes=1 << 20)}, "must be 0 or more, not -1"),
        ({"kv_transfer_config": connector(threshold_tokens=8, host_bytes=8)}, "host_bytes is 8, a KV block"),
        ({"scheduling_policy": "priority", "rules": {"victim": "longest"}}, "go without --scheduling-policy priority"),
        ({"kv_transfer_config": None}, "CrossPointScheduler needs --kv-transfer-config"),
        ({"scheduler_cls": None}, "vLLM's own scheduler; add --scheduler-cls"),
        # last: it imports numba, and with that loaded vLLM 0.32.0 starts no further engine in the same process
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_at_the_start(model: Path, options: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message), with_cross_point(model, 8, **options):
        pass


@pytest.mark.parametrize(
    ("section", "setting", "message"),
    [
        ("parallel_config", {"world_size": 2}, "more than one worker"),
        ("scheduler_config", {"async_scheduling": True}, "asynchronous scheduling; add --no-async-scheduling"),
    ],
)
def test_what_needs_another_machine_is_refused(model: Path, section: str, setting: dict, message: str) -> None:
    """A CPU with one NUMA node starts one worker, and vLLM switches asynchronous scheduling off on any CPU."""
    config = vllm.EngineArgs(model=str(model), scheduler_cls=SCHEDULER, **ENGINE).create_engine_config()
    for name, value in setting.items():
        setattr(getattr(config, section), name, value)
    with pytest.raises(ProfileError, match=message):
        supported_cache(config, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))


def measured(model: Path, prompts: list[list[int]], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "prompts.json"
    file.write_text(json.dumps(prompts), encoding="utf-8")
    options = f"--model {model} --prompts {file} --new-tokens {NEW_TOKENS} --dtype float32".split()
    command = [sys.executable, "-m", "firsttoken_studies.nb20_the_engine.vllm_throughput", *options]
    return subprocess.run(command, input="\n\n", capture_output=True, text=True, check=False)


def test_throughput_answers_each_line_with_a_run(model: Path, unconstrained: list, tmp_path: Path) -> None:
    lines = [line for line in measured(model, PROMPTS, tmp_path).stdout.splitlines() if line.startswith("{")]
    ready, *runs = map(json.loads, lines)
    assert ready["vllm"] == vllm.__version__
    assert [run["tokens"] for run in runs] == [unconstrained] * 2
    assert all(run["seconds"] > 0 for run in runs)


def test_throughput_without_prompts_says_so(model: Path, tmp_path: Path) -> None:
    done = measured(model, [[]], tmp_path)
    assert done.returncode and "prompts.json: expected a list of prompts" in done.stderr.splitlines()[-1]


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The OpenAI server as a user starts it, on a free port; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rules = {"victim": "shortest", "resume": "in_order"}
    transfer = json.dumps(connector(threshold_tokens=130, host_bytes=HOST_BYTES, **rules))
    options = {"model": str(model), "host": "127.0.0.1", "port": port, "num-gpu-blocks-override": FEW_BLOCKS}
    options |= {"scheduler-cls": SCHEDULER, "kv-transfer-config": transfer}
    for name, value in ENGINE.items():
        options[name.replace("_", "-")] = "" if value is True else value
    words = [word for name, value in options.items() for word in (f"--{name}", str(value)) if word]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # what it says of itself goes to its log, and is read there
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with log.open("w") as lines:
        server = subprocess.Popen(command, stdout=lines, stderr=lines, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 300
        while time.monotonic() < until and server.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"the server did not come up:\n{log.read_text()[-3000:]}")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_the_server_answers_as_without_preemption(model: Path, unconstrained: list, tmp_path: Path) -> None:
    def complete(prompt: list[int]) -> tuple[int, list[int]]:
        asked = {"model": str(model), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)["choices"][0]["token_ids"]

    log = tmp_path / "server.log"
    with serving(model, log) as address:
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            assert list(clients.map(complete, PROMPTS)) == [(200, tokens) for tokens in unconstrained]
        until = time.monotonic() + 20
        while "KV Transfer metrics" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.5)
    assert "swapped=" in log.read_text()
