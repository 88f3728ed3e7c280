"""Turns of victim rules inside vLLM: ``python -m firsttoken_studies.nb24_who_is_preempted.vllm_turns JOB.json`` runs in
the environment of ``env/vllm`` and answers each turn of the job with a line of JSON.

One engine serves all turns, in this process, so that a rule can be replaced between two of them. vLLM computes as it
would, with chunks beside decodes; it has as many KV blocks as the job says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLUGIN = "firsttoken_extras.vllm_cross_point"
BLOCK_TOKENS = 32  # the smallest of vLLM's attention on a CPU


def main(job: Path) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    for report in turns(json.loads(job.read_text(encoding="utf-8"))):
        print(json.dumps(report), flush=True)


def turns(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """First {vllm}, once a turn that is not counted has ended; then, for each (load, victim) of ``turns``, the seconds
    of every token of every request of the load, and how often requests were preempted."""
    import vllm

    from firsttoken.engine.preemption.victims import victim_named

    loads = job["loads"]
    connector = {"threshold_tokens": 0, "host_bytes": 1 << 28, "victim": "last_admitted", "resume": "in_order"}
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        max_model_len=max(len(item["prompt"]) + item["output_tokens"] for load in loads for item in load),
        max_num_batched_tokens=job["token_budget"],
        max_num_seqs=max(map(len, loads)),
        kv_cache_memory_bytes=1 << 28,
        num_gpu_blocks_override=job["blocks"],
        enable_prefix_caching=False,
        enforce_eager=True,
        scheduler_cls=f"{PLUGIN}.scheduler.CrossPointScheduler",
        kv_transfer_config={
            "kv_connector": "CrossPointConnector",
            "kv_connector_module_path": f"{PLUGIN}.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        },
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler

    def turn(load: list[dict[str, Any]], victim: str) -> dict[str, Any]:
        scheduler._victim, before = victim_named(victim), scheduler.connector.counts.total()
        for number, item in enumerate(load):
            sampling = vllm.SamplingParams(max_tokens=item["output_tokens"], temperature=0, ignore_eos=True)
            sampling.detokenize = False
            # a microsecond apart, so that who came last is the last of the load
            prompt = {"prompt_token_ids": item["prompt"]}
            engine.add_request(f"{number:04}", prompt, sampling, arrival_time=number * 1e-6)
        start, times = time.perf_counter(), {f"{number:04}": [] for number in range(len(load))}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                times_s = times[output.request_id]
                times_s += [now] * (len(output.outputs[0].token_ids) - len(times_s))
        return {"times_s": list(times.values()), "preemptions": scheduler.connector.counts.total() - before}

    turn(loads[0][:4], "last_admitted")
    yield {"vllm": vllm.__version__}
    for load, victim in job["turns"]:
        yield turn(loads[load], victim)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
