"""Files of tensors: staged checkpoints, adapters, foreign folders, KV caches."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from services import CHAT, byte_level

from firsttoken.assets.adapter_files import WEIGHTS
from firsttoken.droidspeak.identity import ModelIdentity
from firsttoken.droidspeak.prefix import LayerKV, PrefixCache
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.lora import parse_adapter
from firsttoken.link.shaped import Link
from firsttoken.petals.checkpoint_blocks import load_span, write_8_bits
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG, MANIFEST, read_manifest
from firsttoken.progressiveserve.checkpoint.plan import by_layers, single_stage
from firsttoken.progressiveserve.checkpoint.sources import FolderSource, Origin, RandomSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.stage_adapters import check_fit
from firsttoken.study.canonical_json import sha256_of
from firsttoken.study.errors import CacheError, RequestError
from firsttoken_serve.chat.text import read_vocabulary
from firsttoken_studies.progressiveserve.coldstart.checkpoints import write_stock
from fuzzing import mutators
from fuzzing.property import Format, from_json

BASE, GROUPS, RANK = "ba5e" * 16, [(0, 1), (2,)], 2
CONTEXTS = list(range(20)), list(range(100, 120))
MODEL = ModelIdentity("aa", "", "float32", "LlamaForCausalLM", 3, 2, 2, 5, "{}", "cc", "{}")


def source() -> RandomSource:
    """Three layers, drawn by name, with a sum as real weights have one."""
    drawn = RandomSource("tiny-3", torch.bfloat16)
    drawn.provenance = Origin("tiny", BASE, "real")
    return drawn


def make_adapter(folder: Path) -> None:
    """A PEFT folder for layers 0 and 1."""
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (RANK, 32), "B": (32, RANK)}
    halves = {name.format(i, half): torch.randn(shapes[half], generator=draw) for i in (0, 1) for half in "AB"}
    save_file(halves, folder / WEIGHTS, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "bias": "none", "use_dora": False, "rank_pattern": {}}
    config["target_modules"] = ["q_proj"]
    recipe = {"layers": [0, 1], "base_sha256": BASE, "recipe": {"rank": RANK, "alpha": 4.0}, "curve": [], "seed": 0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "recipe.json").write_text(json.dumps(recipe))


def make_staged(folder: Path) -> None:
    """Two stages, the first with an adapter."""
    made = source()
    make_adapter(folder / "made")
    write_staged(made, by_layers(made.names, GROUPS), folder / "staged", {1: folder / "made"})
    for path in (folder / "staged").glob("*.index.json"):
        path.unlink()  # for other people's loaders


@torch.inference_mode()
def answers(folder: Path) -> list[bytes]:
    """Logits after each stage."""
    staged = folder / "staged"
    manifest, ids = read_manifest(staged), torch.arange(1, 9)[None]
    meta_model = MetaModel(staged, manifest)
    view, found = meta_model.empty_view(), []
    for stage in range(1, len(manifest.stages) + 1):
        view = StageLoad(staged, manifest, [stage], [Link()], meta_model, view, threads=1).wait()
        view.activate(meta_model.model)
        found.append(meta_model.model(ids, use_cache=False).logits.float().numpy().tobytes())
    return found


def sealed(text: str, before: bytes) -> bytes:
    """A manifest or a result as somebody leaves it who knows of its sum; as it is where it cannot be summed."""
    try:
        content = json.loads(text)
        head = {key: content.pop(key) for key in ("format", "sha256") if key in content}
        if len(text) % 4:
            head["sha256"] = sha256_of(content)
        return json.dumps(head | content).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return text.encode("utf-8", "surrogatepass")


def header(data: bytes) -> Any:
    """The JSON at the head of a safetensors file, with what of it is JSON in text again."""
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    kept = table.get("__metadata__", {})
    return table | {"__metadata__": {k: json.loads(v) if v[:1] in "{[" else v for k, v in kept.items()}}


def with_header(text: str, before: bytes) -> bytes:
    """The file again with another header, and the same data."""
    try:
        table = json.loads(text)
        kept = table.get("__metadata__", {})
        table["__metadata__"] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in kept.items()}
        text = json.dumps(table)
    except (ValueError, RecursionError, AttributeError):
        pass
    head = text.encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + before[8 + int.from_bytes(before[:8], "little") :]


def make_kv(folder: Path) -> None:
    """Two entries; the first name in the folder is the one that is damaged."""
    store = KVStore(folder / "kv", memory_bytes=0, disk_bytes=1 << 20)
    draw = torch.Generator().manual_seed(0)
    for context in CONTEXTS:
        kv = tuple(LayerKV(*(torch.randn(1, 2, 20, 2, generator=draw) for _ in "kv")) for _ in range(3))
        store.store(context, MODEL, PrefixCache(kv, {1: torch.randn(1, 20, 5, generator=draw)}))


def fetched(folder: Path) -> list[bytes | None]:
    """Every piece of both contexts, None where it is refused. The store itself must open."""
    try:
        store = KVStore(folder / "kv", memory_bytes=0, disk_bytes=1 << 20)
    except CacheError as error:
        raise AssertionError("one bad file has closed the store") from error
    found: list[bytes | None] = []
    for context in CONTEXTS:
        for layer in range(3):
            try:
                kv = store.fetch(context, MODEL, layer)
                found.append(torch.stack(list(kv)).numpy().tobytes() if kv.keys.shape[2] == 20 else None)
            except CacheError:
                found.append(None)
        try:
            found.append(store.fetch_e_cache(context, MODEL, 1).numpy().tobytes())
        except CacheError:
            found.append(None)
    return found


@functools.cache
def kv_file() -> str:
    """The name of the first context's file."""
    from firsttoken.droidspeak.entry import Entry
    from firsttoken.droidspeak.kvfile import file_name
    from firsttoken.droidspeak.prefix_index import token_bytes

    return f"kv/{file_name(Entry(MODEL, token_bytes(CONTEXTS[0]), (1,)).key)}"


def kept_or_refused(intact: list[Any], found: list[Any]) -> bool:
    """The other entry is whole, and of the damaged one nothing else came out than what went in."""
    half = len(intact) // 2
    return found[half:] == intact[half:] and all(b in (None, a) for a, b in zip(intact, found, strict=True))


def fitted(folder: Path) -> tuple[Any, ...]:
    """What an adapter adds, by layer."""
    at = folder / "adapter"
    check_fit(at, [0, 1], BASE)
    adapter = parse_adapter("A", (at / "adapter_config.json").read_bytes(), (at / WEIGHTS).read_bytes(), "cpu")
    pairs = [(i, path, *pair) for i, slices in sorted(adapter.layers.items()) for path, pair in sorted(slices.items())]
    shapes = [(i, path, tuple(a.shape), tuple(b.shape)) for i, path, a, b in pairs]
    return shapes, [bool(half.isfinite().all()) for *_, a, b in pairs for half in (a, b)], str(pairs)


def make_stock(folder: Path) -> None:
    """A folder as models are published."""
    write_stock(source(), folder / "stock")


def stock(folder: Path) -> tuple[Any, ...]:
    """What staging makes of it."""
    made = FolderSource(folder / "stock")
    single_stage(made.names, made.config.num_hidden_layers)
    sums = [hashlib.sha256(made.get(name).view(torch.uint8).numpy().tobytes()).hexdigest() for name in made.names]
    return made.shapes, [str(made.dtype(name)) for name in made.names], sums


def make_int8(folder: Path) -> None:
    """The same with its blocks in 8 bits."""
    make_stock(folder)
    write_8_bits(folder / "stock", folder / "int8")


def int8(folder: Path) -> tuple[Any, ...]:
    """What a server makes of it."""
    held = load_span(folder / "int8", range(3), torch.float32).model.layers.state_dict()
    sums = [hashlib.sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest() for one in held.values()]
    return [(name, list(one.shape)) for name, one in held.items()], [str(one.dtype) for one in held.values()], sums


SIDE = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def make_side_files(folder: Path) -> None:
    """A folder whose tokenizer, ends and templates are said by several files, without weights."""
    at = folder / "side"
    at.mkdir()
    byte_level().save(str(at / "tokenizer.json"))
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32}
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 99}
    token = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "T"}]
    files = (
        shape | sizes | {"dtype": "float32", "eos_token_id": 2},
        {"eos_token_id": [1, 2], "bos_token_id": 1},
        {"bos_token": token, "eos_token": "</s>", "chat_template": named, "model_max_length": 99},
        {"bos_token": token, "eos_token": "</s>", "pad_token": "<pad>"},
    )
    for name, content in zip(SIDE, files, strict=True):
        (at / name).write_text(json.dumps(content))


def side_files(folder: Path) -> tuple[Any, ...]:
    """What a service makes of them, and the prompt of a conversation."""
    read = read_vocabulary(folder / "side", 64)
    try:
        prompt = read.chat_ids([{"role": "user", "content": "the inn"}])
    except RequestError:
        prompt = None
    return read.size, read.context, read.stop_ids, read.chat_stop_ids, prompt


def served(intact: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    """Any size, length, template and end may be meant that a model can have."""
    size, context, *ends, prompt = found
    whole = all(type(one) is int and 0 <= one < size for ids in ends for one in ids)
    return whole and type(size) is type(context) is int and context > 0 and (prompt is None or bool(prompt))


PARTS = tuple(f"staged/{name}.safetensors" for name in ("1-A/000-embedding", "1-A/001-layer-00", "2-B/000-layer-02"))
FORMATS = (
    # whoever sums the manifest again may leave the adapter out: another staging of the same model, whole in the end
    Format(
        "manifest",
        make_staged,
        (f"staged/{MANIFEST}",),
        answers,
        load=from_json,
        dump=sealed,
        legal=lambda intact, found: intact[1:] == found[1:],
    ),
    Format("part", make_staged, PARTS, answers, mutators.BYTES, header, with_header),
    Format("config.json", make_staged, (f"staged/{CONFIG}",), answers, load=from_json),
    Format("staged adapter", make_staged, (f"staged/adapters/A/{WEIGHTS}",), answers, mutators.BYTES),
    Format(
        "adapter",
        lambda folder: make_adapter(folder / "adapter"),
        ("adapter/adapter_config.json", "adapter/recipe.json"),
        fitted,
        load=from_json,
    ),
    # any finite number may be a weight
    Format(
        "adapter weights",
        lambda folder: make_adapter(folder / "adapter"),
        (f"adapter/{WEIGHTS}",),
        fitted,
        mutators.BYTES,
        header,
        with_header,
        legal=lambda intact, found: intact[:2] == found[:2],
    ),
    # the same, and a configuration says what no tensor shows (the angles, the activation)
    Format(
        "stock weights",
        make_stock,
        ("stock/model.safetensors",),
        stock,
        mutators.BYTES,
        header,
        with_header,
        legal=lambda intact, found: intact[:2] == found[:2],
    ),
    # any whole number may be a code
    Format(
        "int8 weights",
        make_int8,
        ("int8/model-00001-of-00001.safetensors",),
        int8,
        mutators.BYTES,
        header,
        with_header,
        legal=lambda intact, found: intact[:2] == found[:2],
    ),
    Format(
        "side files", make_side_files, tuple(f"side/{name}" for name in SIDE), side_files, load=from_json, legal=served
    ),
    Format("stock config", make_stock, ("stock/config.json",), stock, load=from_json),
    Format(
        "kv",
        make_kv,
        (kv_file(),),
        fetched,
        mutators.BYTES,
        header,
        with_header,
        same=kept_or_refused,
    ),
)
