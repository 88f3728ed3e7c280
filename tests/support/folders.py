"""Model folders as people have them, drawn from a seed, and what each way into the program makes of them.

A folder is one combination of family, sharding, what lies beside the weights, tying, dtype, rotary kind, end of turn
and chat template. Each way in either answers as transformers does or ends with one line.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from edited import set_keys
from plain_tokens import check_greedy, judged
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config

from firsttoken.assets.checkpoint import EMBEDDING, HEAD, INDEX, SINGLE
from firsttoken.assets.models import load_model
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.assets.servable import check_servable
from firsttoken.engine.accelerator import build_model
from firsttoken.engine.engine import Engine
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.link.shaped import Link
from firsttoken.petals.checkpoint_blocks import load_ends, load_span, model_sha256
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import FirstTokenError
from firsttoken_serve.chat.text import read_vocabulary
from firsttoken_serve.served_model import load_plain

VOCABULARY, LAYERS, ANSWER = 300, 3, 8
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 257,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama with biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama with wide heads": lambda: LlamaConfig(**SMALL, head_dim=16),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None),
    "mistral with a window": lambda: MistralConfig(**SMALL, sliding_window=4),
    "qwen2 with a window": lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1),
}
SHARDS = ("one", "shards")
BESIDE = (
    *("nothing", "other shards", "a .bin", "consolidated", "a variant", "a GGUF", "a manifest", "links", "own index"),
    *("no total_size", "another total_size", "old frequencies"),
    *("another model", "an adapter", "another index", "no index", "a tensor too many", "a tensor twice"),
    *("another shard", "a file too few", "a path out", "one tensor more", "quantised", "another file named"),
)
HARMLESS = BESIDE[: BESIDE.index("another model")]
SHARDED = ("no index", "a tensor twice", "another shard", "a file too few", "no total_size", "another total_size")
TYING = {  # tie_word_embeddings as config.json has it, and what is stored: the embedding, the head
    "untied": (False, True, True),
    "by default": (None, True, True),
    "tied": (True, True, False),
    "head only": (True, False, True),
    "both": (True, True, True),
    "two that differ": (True, True, True),
    "head missing": (False, True, False),
    "by default, head missing": (None, True, False),
    "embedding missing": (False, False, True),
}
TIED_AS_SAID = ("untied", "by default", "tied", "head only", "both")
DTYPES = {
    "F32": [torch.float32],
    "F16": [torch.float16],
    "BF16": [torch.bfloat16],
    "F32 norms": [torch.bfloat16, torch.float32],
    "F64": [torch.float64],
    "F16 and BF16": [torch.float16, torch.bfloat16],
}
ROTARY = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "old base": {"rope_theta": 5000.0},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "old linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "old dynamic": {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "old yarn": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama3": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        }
    },
    "old llama3": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            **{"original_max_position_embeddings": 32},
        },
    },
    "longrope": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32},
            "factor": 4.0,
        }
    },
}
ENDS = ("config", "a list", "generation_config", "none", "tokenizer")
TEMPLATES = ("none", "a file", "settings", "named", "generation tag")
WAITING = {"rotary": ("longrope",), "end": ("tokenizer",), "template": ("named", "generation tag")}
"""Values that are drawn only when they are asked for."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "the wind"}]
PROMPTS = ("the wind is", "a")
WAYS = ("serve", "stage", "measure", "swarm")


@dataclass(frozen=True)
class DrawnResult:
    """One folder: a value of each axis."""

    family: str = "llama"
    shards: str = "one"
    beside: str = "nothing"
    tying: str = "untied"
    dtype: str = "F32"
    rotary: str = "default"
    end: str = "config"
    template: str = "none"

    @property
    def served(self) -> bool:
        """Whether every way in must answer, and none may refuse."""
        windowed = self.family.endswith("a window")
        return not windowed and self.beside in HARMLESS and self.tying in TIED_AS_SAID

    @property
    def staged(self) -> bool:
        """Whether it must be staged, too: what is stored must be of one dtype that is served."""
        return self.served and self.dtype not in ("F64", "F16 and BF16")

    def __str__(self) -> str:
        said = (
            f"{one.name} {getattr(self, one.name)}" for one in fields(self) if getattr(self, one.name) != one.default
        )
        return ", ".join(said) or "plain"


def draw(seed: int, number: int, waiting: bool = False) -> list[DrawnResult]:
    """``number`` folders; each value of each axis comes again and again, so do pairs of faults."""
    dice, made = random.Random(seed), []
    axes = {
        "family": list(FAMILIES),
        "shards": list(SHARDS),
        "beside": list(BESIDE),
        "tying": list(TYING),
        "dtype": list(DTYPES),
        "rotary": list(ROTARY),
        "end": list(ENDS),
        "template": list(TEMPLATES),
    }
    for name, values in WAITING.items() if not waiting else ():
        axes[name] = [value for value in axes[name] if value not in values]
    usual = {"family": list(FAMILIES)[:5], "beside": list(HARMLESS), "tying": list(TIED_AS_SAID)}
    for index in count():
        if len(made) == number:
            return made
        sound = index % 3 != 0  # most folders have no fault, and are answered
        chosen = {name: dice.choice(usual.get(name, values) if sound else values) for name, values in axes.items()}
        if chosen["beside"] in SHARDED:
            chosen["shards"] = "shards"
        if chosen["beside"] in ("own index", "other shards"):
            chosen["shards"] = "one"
        one = DrawnResult(**chosen)
        if one not in made:
            made.append(one)
    return made


def write(drawn: DrawnResult, folder: Path, seed: int = 0) -> Path:
    """The folder of ``drawn``."""
    torch.manual_seed(seed)
    config = FAMILIES[drawn.family]()
    tied, *_ = TYING[drawn.tying]
    config.tie_word_embeddings = bool(tied)
    model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    tensors = _stored(drawn, dict(model.state_dict()))
    told = config.to_dict() | {"architectures": [type(model).__name__], "dtype": str(DTYPES[drawn.dtype][0])[6:]}
    told = {key: value for key, value in told.items() if key not in ("rope_parameters", "rope_theta", "rope_scaling")}
    told |= copy.deepcopy(ROTARY[drawn.rotary]) | {"tie_word_embeddings": tied}
    if drawn.rotary == "longrope":  # a factor for each pair of a head's values
        pairs = (
            told["head_dim"] // 2 if told.get("head_dim") else told["hidden_size"] // told["num_attention_heads"] // 2
        )
        told["rope_parameters"] |= {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    if tied is None:
        del told["tie_word_embeddings"]
    _write_ends(drawn, folder, told)
    (folder / "config.json").write_text(json.dumps(told))
    _write_weights(folder, tensors, drawn.shards == "shards")
    tokenizer().save(str(folder / "tokenizer.json"))
    _write_template(drawn, folder)
    _BESIDE_WRITERS.get(drawn.beside, lambda folder, tensors: None)(folder, tensors)
    return folder


def _stored(drawn: DrawnResult, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    _, embedding, head = TYING[drawn.tying]
    if drawn.tying == "two that differ":
        tensors[HEAD] = tensors[EMBEDDING] + 1
    absent = {name for name, there in ((EMBEDDING, embedding), (HEAD, head)) if not there}
    kinds, made = DTYPES[drawn.dtype], {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if name not in absent:
            of = kinds[-1] if (name.endswith("norm.weight") if drawn.dtype == "F32 norms" else index % 2) else kinds[0]
            made[name] = tensor.detach().to(of if name not in (EMBEDDING, HEAD) else kinds[0]).clone()
    return made


def _write_weights(folder: Path, tensors: dict[str, Tensor], sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / SINGLE, {"format": "pt"})
        return
    parts, names = 3, list(tensors)
    where: dict[str, str] = {}
    for part in range(parts):
        shard = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = names[part::parts]
        save_file({name: tensors[name] for name in mine}, folder / shard, {"format": "pt"})
        where |= dict.fromkeys(mine, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))


def _write_ends(drawn: DrawnResult, folder: Path, told: dict[str, Any]) -> None:
    end = told.pop("eos_token_id")
    if drawn.end == "config":
        told["eos_token_id"] = end
    elif drawn.end == "a list":
        told["eos_token_id"] = [end, end + 1]
    elif drawn.end == "generation_config":
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


def _write_template(drawn: DrawnResult, folder: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if drawn.template == "a file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    texts = {
        "settings": TEMPLATE,
        "named": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}],
        "generation tag": TAGGED,
    }
    if drawn.template in texts:
        settings["chat_template"] = texts[drawn.template]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _other_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model-00001-of-00001.safetensors")


def _another_model(folder: Path, tensors: dict[str, Tensor]) -> None:
    """What ``save_pretrained`` over an older folder leaves: one file, and shards with their index."""
    other = {name: tensor.clone().flip(0) for name, tensor in tensors.items()}
    if (folder / SINGLE).exists():
        single = (folder / SINGLE).read_bytes()
        (folder / SINGLE).unlink()
        _write_weights(folder, other, True)
        (folder / SINGLE).write_bytes(single)
    else:
        _write_weights(folder, other, False)


def _reindex(folder: Path, change: Callable[[dict[str, Any]], None], tensors: dict[str, Tensor]) -> None:
    if not (folder / INDEX).exists():
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, SINGLE)}))
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def _indexed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda folder, tensors: _reindex(folder, change, tensors)


def _with(name: str, tensor: Tensor) -> Callable[[Path, dict[str, Tensor]], None]:
    def write(folder: Path, tensors: dict[str, Tensor]) -> None:
        _write_weights(folder, tensors | {name: tensor}, (folder / INDEX).exists())

    return write


def _links(folder: Path, tensors: dict[str, Tensor]) -> None:
    """A snapshot of the Hub's cache: every file is a link to a blob."""
    blobs = folder.with_name(f"{folder.name}-blobs")
    blobs.mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{index:040x}")
        file.symlink_to(Path("..") / blobs.name / f"{index:040x}")


def _shards(content: dict[str, Any]) -> list[str]:
    return sorted(set(content["weight_map"].values()))


def _swapped(content: dict[str, Any]) -> None:
    first, second = list(content["weight_map"])[:2]
    content["weight_map"][first] = content["weight_map"][second]


def _twice(folder: Path, tensors: dict[str, Tensor]) -> None:
    name, shard = "model.norm.weight", "model-00009-of-00009.safetensors"
    save_file({name: tensors[name] + 1, "extra": torch.ones(1)}, folder / shard, {"format": "pt"})
    _reindex(folder, lambda content: content["weight_map"].update({"extra": shard}), {})


_BESIDE_WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    "other shards": _other_shards,
    "a .bin": lambda folder, tensors: torch.save({n: -t for n, t in tensors.items()}, folder / "pytorch_model.bin"),
    "consolidated": lambda folder, tensors: save_file(
        {n: -t for n, t in tensors.items()}, folder / "consolidated.safetensors"
    ),
    "a variant": lambda folder, tensors: save_file(
        {n: (-t).clone() for n, t in tensors.items()}, folder / "model.fp16.safetensors"
    ),
    "a GGUF": lambda folder, tensors: (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60)),
    "a manifest": lambda folder, tensors: (folder / "manifest.json").write_text('{"format": "another"}'),
    "links": _links,
    "own index": lambda folder, tensors: _reindex(folder, lambda content: None, tensors),
    "no total_size": _indexed(lambda content: content.update(metadata={})),
    "another total_size": _indexed(lambda content: content.update(metadata={"total_size": 7})),
    "old frequencies": _with("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    "another model": _another_model,
    "an adapter": lambda folder, tensors: (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "x"})
    ),
    "another index": _indexed(
        lambda content: content["weight_map"].update({"model.other.weight": _shards(content)[0]})
    ),
    "no index": lambda folder, tensors: (folder / INDEX).unlink(),
    "a tensor too many": _with("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(2, 32)),
    "a tensor twice": _twice,
    "another shard": _indexed(_swapped),
    "a file too few": lambda folder, tensors: next(iter(sorted(folder.glob("model-*.safetensors")))).unlink(),
    "a path out": _indexed(lambda content: content["weight_map"].update({EMBEDDING: "../" + SINGLE})),
    "one tensor more": _with(f"model.layers.{LAYERS}.mlp.up_proj.weight", torch.ones(48, 32)),
    "quantised": lambda folder, tensors: set_keys(
        folder / "config.json", quantization_config={"quant_method": "compressed-tensors", "format": "dense"}
    ),
    "another file named": lambda folder, tensors: set_keys(
        folder / "config.json", transformers_weights="model-00002-of-00003.safetensors"
    ),
}


@cache
def tokenizer() -> Tokenizer:
    """Bytes, a few merges, and two special tokens: 300 entries at most."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "w")]
    symbols = [*alphabet, "<|pad|>", "<|end|>", *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|pad|>", special=True), AddedToken("<|end|>", special=True)])
    return made


@dataclass(frozen=True)
class Outcome:
    """What one way in made of a folder: tokens compared, or the line that it ended with, or what it did wrong."""

    equal: int = 0
    line: str = ""
    wrong: str = ""


def examine(drawn: DrawnResult, folder: Path, ways: Sequence[str] = WAYS) -> Iterator[tuple[str, Outcome]]:
    """Every way into the program with ``folder``, each held to transformers."""
    stock = _transformers(folder)
    prompts = [tokenizer().encode(text).ids for text in PROMPTS]
    for way in ways:
        try:
            answer = _WAYS[way](folder)
            said = [answer(prompt) for prompt in prompts]
        except FirstTokenError as error:
            must = drawn.staged if way == "stage" else drawn.served
            several = "\n" in str(error) or len(str(error)) > 500
            fault = "refused what is sound: " if must else "no single line: " if several else ""
            yield way, Outcome(line=str(error), wrong=f"{fault}{error}" if fault else "")
            continue
        except Exception as error:
            yield way, Outcome(wrong=f"{type(error).__name__}: {error}")
            continue
        if stock is None:
            yield way, Outcome(wrong="answered where transformers does not")
            continue
        try:
            equal = sum(
                check_greedy(one, judged(stock, prompt, one)) for prompt, one in zip(prompts, said, strict=True)
            )
            yield way, Outcome(equal=equal)
        except AssertionError as error:
            yield way, Outcome(wrong=str(error))
    if drawn.served and stock is not None:
        yield "prompts", _prompts(folder, stock)


def _transformers(folder: Path) -> nn.Module | None:
    """What its users get of the folder; None where they get an error, or weights that no file holds."""
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception:
        return None
    return None if report["missing_keys"] else model.eval()


@torch.inference_mode()
def _greedy(model: nn.Module, prompt: Sequence[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(ANSWER):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _served(folder: Path) -> Callable[[Sequence[int]], list[int]]:
    """As a service does: the model as one stage, in the engine."""
    model = load_plain(check_servable(folder), torch.float32, "cpu")
    engine = Engine(LiveExecutor(model, blocks=16))

    def answer(prompt: Sequence[int]) -> list[int]:
        engine.submit(prompt, Sampling(max_tokens=ANSWER))
        said = []
        while engine.busy:
            said += [token for _, token in engine.step()]
        return said

    return answer


def _staged(folder: Path) -> Callable[[Sequence[int]], list[int]]:
    """As ``firsttoken stage`` and a start of what it wrote: three stages, one after another."""
    out = folder.with_name(f"{folder.name}-staged")
    shutil.rmtree(out, ignore_errors=True)
    source = FolderSource(folder)
    write_staged(source, staged(source.names, StagePlan.from_block(LAYERS, (1, 2))), out)
    manifest = read_manifest(out)
    meta_model = MetaModel(out, manifest, dtype=torch.float32, build=build_model)
    view = meta_model.empty_view()
    for stage in range(1, len(manifest.stages) + 1):
        view = StageLoad(out, manifest, [stage], [Link()], meta_model, view).wait()
    view.activate(meta_model.model)
    return lambda prompt: _greedy(meta_model.model, prompt)


def _measured(folder: Path) -> Callable[[Sequence[int]], list[int]]:
    loaded = load_model(str(folder), with_tokenizer=False)
    return lambda prompt: _greedy(loaded.model, prompt)


def _swarmed(folder: Path) -> Callable[[Sequence[int]], list[int]]:
    """The ends of a client with the blocks of two servers between them."""
    model_sha256(folder)
    model = load_ends(folder, torch.float32)
    spans = [load_span(folder, blocks, torch.float32) for blocks in (range(0, 1), range(1, LAYERS))]
    model.model.layers = nn.ModuleList(layer for span in spans for layer in span.model.layers)
    return lambda prompt: _greedy(model, prompt)


_WAYS = {"serve": _served, "stage": _staged, "measure": _measured, "swarm": _swarmed}


def _prompts(folder: Path, stock: nn.Module) -> Outcome:
    """Ids of texts and of a conversation, and what ends an answer, as transformers has them."""
    ours, theirs = read_vocabulary(folder, 64), AutoTokenizer.from_pretrained(folder)
    for text in PROMPTS:
        if ours.prompt_ids(text) != theirs(text)["input_ids"]:
            return Outcome(wrong=f"other ids of {text!r}")
    if theirs.chat_template:
        whole = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
        try:
            if ours.chat_ids(CHAT) != whole:
                return Outcome(wrong="another prompt of a conversation")
        except FirstTokenError as error:
            return Outcome(wrong=f"no prompt of a conversation: {error}")
    ends = stock.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return Outcome(equal=1) if ends <= set(ours.stop_ids) else Outcome(wrong=f"ends {ours.stop_ids}, not {ends}")
