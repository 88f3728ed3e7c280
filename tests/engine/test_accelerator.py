"""The library without its accelerator: by the environment's word, and where the package is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from plain_tokens import generated
from small_models import small_model
from transformers import LlamaForCausalLM

from firsttoken.engine.accelerator import Accelerator, accelerator, build_model, fuse
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.engine.sdpa_attention import PaddedAttend

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_torch_alone_computes(accelerated, tmp_path) -> None:
    """Stock modules, fused by nobody, say what ``generate`` says."""
    accelerated("none")
    assert type(accelerator()) is Accelerator
    model = small_model("Llama")
    plain = generated(model, PROMPT, 12).exact()
    model.save_pretrained(tmp_path)
    assert type(build_model(tmp_path, torch.float32)) is LlamaForCausalLM
    executor = LiveExecutor(fuse(model), 8)
    list(executor.version.fuse())
    assert executor._attend is PaddedAttend and type(executor.model.lm_head) is torch.nn.Linear
    engine = Engine(executor)
    request = engine.submit(PROMPT, Sampling(12))
    engine.run()
    executor.close()
    assert request.output == plain


@pytest.mark.long(seconds=20)
def test_every_module_is_imported_where_the_package_is_not() -> None:
    code = (
        "import sys; sys.modules['firsttoken_cpu'] = None\n"  # as if nobody had installed it
        "import importlib, pkgutil\n"
        "for room in ('engine', 'progressiveserve', 'petals', 'droidspeak'):\n"
        "    package = importlib.import_module(f'firsttoken.{room}')\n"
        "    for found in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):\n"
        "        importlib.import_module(found.name)\n"
        "from firsttoken.engine.accelerator import accelerator; print(type(accelerator()).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "Accelerator", done.stderr
