"""Adapter folders of each kind that PEFT has, and some that somebody changed."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from edited import set_keys, set_tensors
from fine_tunes import MODULES, greedy
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from firsttoken.assets.checkpoint import model_files
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import FirstTokenError
from firsttoken_serve.variants import host_variants

PROMPT = [5, 7, 9, 11, 30, 31, 40, 41]
Tensors = dict[str, torch.Tensor]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"

# LoraConfig's options, from which PEFT itself makes and loads a folder
LORA: dict[str, dict[str, Any]] = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "drawn": {"init_lora_weights": False},
    "eva": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "qalora": {"use_qalora": True, "qalora_group_size": 8},
    "alora, called": {"alora_invocation_tokens": [30, 31], "task_type": "CAUSAL_LM"},
    "alora, not called": {"alora_invocation_tokens": [31, 30], "task_type": "CAUSAL_LM"},
    "rank_pattern": {"rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2}},
    "rank_pattern, expressions": {"rank_pattern": {r"^model\.layers\.[01]\..*_proj": 6, "v_proj": 3}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 40, "down_proj": 1}},
    "both patterns, rslora": {"rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True},
    "layers_to_transform": {"layers_to_transform": [0, 2]},
    "one layer": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "two patterns of layers": {"layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    "all-linear": {"target_modules": "all-linear"},
    "an expression": {"target_modules": r".*\.(self_attn|mlp)\.(q|up)_proj"},
    "whole names": {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"]},
    "exclude_modules": {"exclude_modules": ["model.layers.1.self_attn.q_proj", "up_proj"]},
    "exclude_modules, an expression": {"exclude_modules": r".*\.1\..*"},
    "dropout": {"lora_dropout": 0.4},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "a norm saved": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [5, 7]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    "kasa": {"kasa_config": peft.KasaConfig()} if hasattr(peft, "KasaConfig") else {"use_dora": True},
    "classifier": {"task_type": "SEQ_CLS"},
}
# other methods of PEFT
OTHERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "adalora": lambda: peft.AdaLoraConfig(target_modules=MODULES, total_step=9),
    "loha": lambda: peft.LoHaConfig(target_modules=MODULES),
    "lokr": lambda: peft.LoKrConfig(target_modules=MODULES),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def _tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    return lambda folder: set_tensors(folder / WEIGHTS, change)


def _cast(dtype: torch.dtype) -> Callable[[Path], None]:
    return _tensors(lambda all_: all_.update({name: tensor.to(dtype) for name, tensor in all_.items()}))


def _options(**options: Any) -> Callable[[Path], None]:
    return lambda folder: set_keys(folder / CONFIG, **options)


def _only(*keys: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({key: content[key] for key in keys}))

    return edit


def _doubled(folder: Path) -> None:
    """The first tensor's name stands twice in the header, as a reader of JSON lets it."""
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].decode().rstrip()
    name, entry = next(item for item in json.loads(header).items() if item[0] != "__metadata__")
    header = f"{header[:-1]},{json.dumps(name)}:{json.dumps(entry)}}}"
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + size :])


_FIRST_KEYS = (
    *("auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r"),
    *("revision", "target_modules", "task_type"),
)
# what somebody did to a plain folder
EDITS: dict[str, Callable[[Path], None]] = {
    "float16": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "keys of 0.5": _only(*_FIRST_KEYS),
    "keys of torchtune": _only("peft_type", "r", "lora_alpha", "target_modules"),
    "loftq": _options(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}),
    "corda": _options(init_lora_weights="corda"),
    "another start": _options(init_lora_weights="hadamard"),
    "bdlora": _options(use_bdlora={"target_modules_bd_a": ["q_proj"]}),
    "arrow": _options(arrow_config={"top_k": 3}),
    "monteclora": _options(monteclora_config={"num_samples": 2}),
    "a key of the future": _options(use_squares=True),
    "an empty key of the future": _options(use_squares=False, squares={}),
    "no kind": _options(peft_type=None),
    "a kind of the future": _options(peft_type="SQUARES"),
    "no targets": _options(target_modules=...),
    "fewer targets": _options(target_modules=["q_proj", "v_proj"]),
    "a slow expression": _options(target_modules="(.*a)*_proj"),
    "no expression": _options(target_modules="(q_proj"),
    "a pattern of layers alone": _options(layers_pattern="layers"),
    "layers and an expression": _options(layers_to_transform=[0, 1, 2], target_modules=".*_proj"),
    "another rank": _options(r=8),
    "a module away": _tensors(lambda all_: [all_.pop(Q.format(half)) for half in "AB"]),
    "half a module away": _tensors(lambda all_: all_.pop(Q.format("B"))),
    "a module too many": _tensors(
        lambda all_: all_.update(
            {Q.format(half).replace("q_proj", "z_proj"): all_[Q.format(half)] + 0 for half in "AB"}
        )
    ),
    "a layer too many": _tensors(
        lambda all_: all_.update({Q.format(half).replace("s.1", "s.9"): all_[Q.format(half)] + 0 for half in "AB"})
    ),
    "not a number": _tensors(lambda all_: all_[Q.format("A")].fill_(torch.nan)),
    "infinite": _tensors(lambda all_: all_[Q.format("B")].fill_(torch.inf)),
    "whole numbers": _cast(torch.int32),
    "8 bits": _cast(torch.float8_e4m3fn),
    "a name twice": _doubled,
}
KINDS = [*LORA, *OTHERS, *EDITS]


@dataclass(frozen=True)
class Outcome:
    """What came of a folder: tokens here and of PEFT (None where it ended with an error), or the line that refused."""

    ours: list[int] | None
    theirs: list[int] | None
    line: str = ""

    @property
    def wrong(self) -> str:
        if self.line:
            return "" if "\n" not in self.line else "more than a line"
        return "" if self.ours == self.theirs else f"{self.ours}, PEFT {self.theirs}"


def write(kind: str, base: nn.Module, folder: Path) -> bool:
    """Write a folder of ``kind``; False where this PEFT cannot make one."""
    torch.manual_seed(1)
    shutil.rmtree(folder, ignore_errors=True)
    options = {"r": 4, "lora_alpha": 24, "target_modules": MODULES} | LORA.get(kind, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(base), OTHERS[kind]() if kind in OTHERS else LoraConfig(**options))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name and "magnitude" not in name:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError):
        return False
    EDITS.get(kind, lambda _: None)(folder)
    return True


def examine(base: nn.Module, folder: Path) -> Outcome:
    """Answer one prompt with the adapter in ``folder`` here and with PEFT, each on a copy of ``base``, which is written
    beside it."""
    if not (folder.parent / "base").is_dir():
        base.save_pretrained(folder.parent / "base")
    theirs = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
            torch.manual_seed(2)
            theirs = greedy(model, PROMPT, 8)
        except Exception:  # whatever PEFT makes of it
            theirs = None
    model = copy.deepcopy(base)
    executor = LiveExecutor(model, 16)
    try:
        version = host_variants(executor, {"a": folder}, model_files(folder.parent / "base"), "cpu")["a"]
        engine = Engine(executor)
        request = engine.submit(PROMPT, Sampling(8), version=version)
        engine.run()
        return Outcome(request.output, theirs)
    except FirstTokenError as error:
        return Outcome(None, theirs, str(error))
    finally:
        executor.close()
