"""Tokens per second of a stock vLLM on given prompts: the baseline beside this project's own engine.

``python -m firsttoken_studies.nb20_the_engine.vllm_throughput --model DIR --prompts FILE.json`` loads the model, runs
once to warm up, and says so in a line of JSON; then each line on its standard input asks for one timed run, answered by
a line of JSON, so that whoever measures can take turns with other systems. It runs in the environment that
``env/vllm/setup.sh`` makes, and with the settings that were fastest on CPU: all usable cores (vLLM leaves one to
itself), the engine in this process (one of its own polls, and takes a core from the model), and a compiled model where
there is a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from firsttoken.study.errors import RequestError
from firsttoken.study.system.cgroup_limits import cores

BLOCK_TOKENS = 128  # vLLM's own choice on CPU; 32 was no faster


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second of vLLM on given prompts: a timed run for each line on standard input"
    )
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of lists of token ids")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for every prompt, greedily")
    parser.add_argument("--dtype", required=True, choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    prompts = json.loads(options.prompts.read_text(encoding="utf-8"))
    if not prompts or not all(prompts):
        raise RequestError(f"{options.prompts.name}: expected a list of prompts, each a list of token ids")

    # read when torch and vLLM are imported, which is why that comes only now
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    for report in answers(options.model, prompts, options.new_tokens, options.dtype, sys.stdin):
        print(json.dumps(report), flush=True)


def answers(model: str, prompts: list[list[int]], new_tokens: int, dtype: str, wanted: Iterable[str]) -> Iterator[dict]:
    """First {vllm, threads, compiled} once it is warm, then {seconds, tokens} for each line ``wanted``.

    Every run generates ``new_tokens`` tokens for all ``prompts`` at once, and no request is ever preempted.
    """
    import torch
    import vllm
    from transformers import AutoConfig

    from firsttoken.engine.kv import KVShape
    from firsttoken.study.dtypes import named

    shape = KVShape.of(AutoConfig.from_pretrained(model), named(dtype), BLOCK_TOKENS)
    blocks = sum(shape.blocks(len(prompt) + new_tokens) for prompt in prompts)
    compiles = shutil.which(os.environ.get("CXX", "g++")) is not None
    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, prompts)) + new_tokens,
        max_num_seqs=len(prompts),
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=(blocks + 1) * shape.block_bytes,  # vLLM keeps one for itself
        enable_prefix_caching=False,
        enforce_eager=not compiles,
    )
    greedy = vllm.SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run() -> dict:
        start = time.perf_counter()
        outputs = llm.generate(batch, greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    run()
    yield {"vllm": vllm.__version__, "threads": torch.get_num_threads(), "compiled": compiles}
    for _ in wanted:
        yield run()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
