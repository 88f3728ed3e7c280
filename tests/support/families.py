"""Every decoder of transformers as a tiny folder of random weights, and what serve, stage and swarm make of it.

Eight layers, of which a swarm's second server has the last five: what hangs on a layer's number shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from folders import Outcome, tokenizer
from plain_tokens import check_greedy, judged
from swarms import Here
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_servable
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken.petals.remote_model import RemoteModel
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import FirstTokenError
from firsttoken_serve.retrying_server import StagedService
from firsttoken_serve.served_model import PlainServer

LAYERS, ANSWER, MOST_WEIGHTS = 8, 8, 3_000_000
PROMPT = [1, 100, 200, 30, 40, 50, 60, 70, 80, 90, 11, 12, 13, 14, 15, 16, 17]
TINY = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
_EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_EXPERTS |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"first_k_dense_replace": 2, "num_key_value_heads": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.4},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "jetmoe": {"kv_channels": 8},
    "gemma3_text": {"sliding_window": 4},
    "deepseek_v2": {"q_lora_rank": None},
}
"""What a family needs beside :data:`TINY`, by its model_type."""


def architectures() -> dict[str, str]:
    """The class of each model_type that transformers has a causal language model of, each class once."""
    by_class: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        by_class.setdefault(name, kind)
    by_class |= {"LlamaForCausalLM": "llama"}
    return {kind: name for name, kind in by_class.items()}


def write_family(kind: str, folder: Path) -> Path:
    """A tiny folder of the family ``kind``. Raises whatever transformers raises where it cannot be made so small."""
    config_class = CONFIG_MAPPING[kind]
    known = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "__annotations__", {})}
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    more = {
        key: value
        for key, value in (
            _EXPERTS | _LATENT | {"head_dim": 8, "sliding_window": None, "num_nextn_predict_layers": 0}
        ).items()
        if key in known
    }
    if "kv_lora_rank" in known:
        more.pop("head_dim", None)
    else:
        more.pop("num_key_value_heads", None)
    torch.manual_seed(3)
    with quiet_transformers():
        try:
            config = _checked(config_class(**(TINY | more | SPECIAL.get(kind, {}))))
        except Exception:  # some want a window
            config = _checked(config_class(**(TINY | more | {"sliding_window": 4})))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.3)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def _checked(config: PreTrainedConfig) -> PreTrainedConfig:
    """``config``, of which a model can be built. Raises ValueError for one that is not tiny."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights are not tiny")
    return config


def _told(server: PlainServer | StagedService, faults: list[FirstTokenError]) -> list[int]:
    """Its answer to the prompt, once it is complete. Raises what ended it."""
    with closing(server):
        server.start()
        while server.status()["state"] not in ("complete", "failed", "degraded"):
            torch.nn.functional.relu(torch.zeros(1))
        if faults:
            raise faults[0]
        try:
            return list(server.submit(PROMPT, ANSWER))
        except FirstTokenError as error:
            raise RuntimeError(f"it was served: {error}") from error


def _serve(folder: Path) -> list[int]:
    faults: list[FirstTokenError] = []
    check_servable(folder, way="alone")
    return _told(PlainServer(folder, RequestLimits(max_model_len=64), device="cpu", broken=faults.append), faults)


def _stage(folder: Path) -> list[int]:
    out, faults = folder.with_name(f"{folder.name}-staged"), list[FirstTokenError]()
    source = FolderSource(folder)
    write_staged(source, staged(source.names, StagePlan.from_block(LAYERS, (2, 3))), out)
    return _told(StagedService(out, [Link()], RequestLimits(max_model_len=64), broken=faults.append), faults)


def _swarm(folder: Path) -> list[int]:
    with closing(Here(folder)) as here:
        (first,) = here.serve((0, 3))
        here.serve((3, LAYERS), peers=[first.record.address])
        with RemoteModel(folder, [first.record.address], tokens=256) as model:
            return model.generate(torch.tensor([PROMPT]), ANSWER)[0, len(PROMPT) :].tolist()


WAYS: dict[str, Callable[[Path], list[int]]] = {"serve": _serve, "stage": _stage, "swarm": _swarm}


def examine(folder: Path, ways: Sequence[str] = tuple(WAYS)) -> Iterator[tuple[str, Outcome]]:
    """Each way in with ``folder``: the tokens of transformers, or one line, or what is wrong with what came."""
    with quiet_transformers():
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for way in ways:
        try:
            answer = WAYS[way](folder)
        except FirstTokenError as error:
            several = "\n" in str(error) or len(str(error)) > 500
            yield way, Outcome(line=str(error), wrong=f"no single line: {error}" if several else "")
        except Exception as error:
            yield way, Outcome(wrong=f"{type(error).__name__}: {error}")
        else:
            try:
                yield way, Outcome(equal=check_greedy(answer, judged(stock, PROMPT, answer)))
            except AssertionError as error:
                yield way, Outcome(wrong=str(error))
