"""Converting a GGUF, with a tiny one written here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import yaml
from transformers.convert_slow_tokenizer import bytes_to_unicode

from firsttoken.assets import gguf as conversion
from firsttoken.assets.models import load_model
from firsttoken.study import paths
from firsttoken.study.errors import AssetError, ModelError

HIDDEN, MLP, VOCABULARY = 32, 64, 260
KINDS = (gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.Q8_0)


def write_gguf(path: Path, family: str = "llama") -> dict[str, np.ndarray]:
    """A model of two layers, 4 heads and 2 KV heads, with a byte-level tokenizer. Returns its tensors by GGUF name.

    A Llama's are float32; a Qwen2 has biases and a head of its own, and its matrices have 5 and 8 bits in blocks of 32.
    """
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", *bytes_to_unicode().values(), "ab", "cd", "<|start|>"])
    writer.add_token_types([3] + [1] * 258 + [3])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        attention = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        mlp = {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP)}
        norms = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (attention | mlp | norms).items()}
        if family == "qwen2":
            shapes |= {f"blk.{layer}.{name}.bias": shape[:1] for name, shape in list(attention.items())[:3]}
    if family == "qwen2":
        shapes["output"] = (VOCABULARY, HIDDEN)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}
    for number, (name, tensor) in enumerate(tensors.items()):
        full, kind = name if name.endswith("bias") else f"{name}.weight", KINDS[number % 2]
        if family == "qwen2" and tensor.ndim == 2:
            coded = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(full, coded, raw_dtype=kind)
            tensors[name] = gguf.quants.dequantize(coded, kind)
        else:
            writer.add_tensor(full, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def pinned_gguf(lock_with) -> dict[str, np.ndarray]:
    """The tensors of a tiny GGUF that is pinned as "tiny" and lies in the cache."""
    (paths.CACHE / "assets").mkdir(parents=True)
    path = paths.CACHE / "assets" / "tiny.gguf"
    tensors = write_gguf(path)
    content = path.read_bytes()
    member = {"path": "tiny.gguf", "saved_as": "tiny.gguf", "bytes": len(content)}
    member["sha256"] = hashlib.sha256(content).hexdigest()
    texts = dict.fromkeys(("package", "version", "file", "licence"), "-") | {"sha256": "0" * 64}
    lock_with({"name": "tiny", "bytes": 1, "members": [member], **texts})
    return tensors


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Grows by one for every conversion."""
    seen: list[Path] = []
    plain = conversion._convert

    def counted(parts, gguf_sha256, folder):
        seen.append(folder)
        plain(parts, gguf_sha256, folder)

    monkeypatch.setattr(conversion, "_convert", counted)
    return seen


def test_the_converted_folder_holds_the_tensors_and_the_tokenizer(pinned_gguf):
    folder = conversion.converted("tiny")
    loaded = load_model(str(folder))
    weights = loaded.model.state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], torch.from_numpy(pinned_gguf["token_embd"]))
    assert torch.equal(weights["model.layers.1.mlp.down_proj.weight"], torch.from_numpy(pinned_gguf["blk.1.ffn_down"]))
    assert loaded.tokenizer.decode(loaded.tokenizer("abcd x")["input_ids"]) == "abcd x"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "nothing temporary is left"


def test_an_intact_folder_is_converted_once_and_a_damaged_one_again(pinned_gguf, conversions):
    folder = conversion.converted("tiny")
    assert conversion.converted("tiny") == folder
    assert len(conversions) == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    conversion.converted("tiny")
    assert len(conversions) == 2
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "gguf_sha256": "another"}))
    conversion.converted("tiny")
    assert len(conversions) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("the converted weights do not reload")])
def test_an_interrupted_conversion_leaves_nothing(pinned_gguf, monkeypatch, error):
    def broken(model, folder):
        assert any(folder.iterdir())
        raise error

    monkeypatch.setattr(conversion, "_check_reload", broken)
    with pytest.raises((KeyboardInterrupt, ModelError)):
        conversion.converted("tiny")
    assert list((paths.CACHE / "models").iterdir()) == []


def test_a_reload_that_differs_is_refused(tmp_path):
    model = load_model("random:tiny").model
    model.save_pretrained(tmp_path / "saved")
    conversion._check_reload(model, tmp_path / "saved")
    model.model.norm.weight.data += 1
    with pytest.raises(ModelError, match=r"do not reload bit-equal \(1 tensors\)"):
        conversion._check_reload(model, tmp_path / "saved")


@pytest.fixture
def pinned_parts(lock_with, tmp_path):
    """Pins bytes as the parts of "tiny", and puts them into the cache; returns their paths."""
    lock_with()

    def pin(*contents: bytes) -> list[Path]:
        folder = paths.CACHE / "assets" / "tiny"
        folder.mkdir(parents=True, exist_ok=True)
        files, found = [], [folder / f"tiny.gguf.part{n}" for n in range(len(contents))]
        for path, content in zip(found, contents, strict=True):
            path.write_bytes(content)
            files.append(
                {"name": path.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "url": "-"}
            )
        entry = {"name": "tiny", "source": "-", "licence": "none", "files": files}
        (paths.ENV / "brought.yaml").write_text(yaml.safe_dump([entry]))
        return found

    return pin


@pytest.fixture
def whole(tmp_path) -> bytes:
    write_gguf(tmp_path / "whole.gguf")
    return (tmp_path / "whole.gguf").read_bytes()


def test_parts_are_joined_and_converted_once(pinned_parts, whole, conversions):
    parts = pinned_parts(whole[:5000], whole[5000:9000], whole[9000:])
    folder = conversion.converted("tiny")
    assert load_model(str(folder)).model.config.num_hidden_layers == 2
    assert sorted(path.name for path in parts[0].parent.iterdir()) == [path.name for path in parts], "no joined file"
    for part in parts:
        part.unlink()
    assert conversion.converted("tiny") == folder and len(conversions) == 1, "what is converted needs no parts"


def test_blocks_of_a_width_that_is_no_multiple_of_256_biases_and_a_head_of_its_own(pinned_parts, tmp_path):
    """As Qwen2.5-0.5B is quantised, whose rows of 896 numbers no block of 256 divides."""
    tensors = write_gguf(tmp_path / "qwen2.gguf", "qwen2")
    content = (tmp_path / "qwen2.gguf").read_bytes()
    pinned_parts(content[:9000], content[9000:])
    loaded = load_model(str(conversion.converted("tiny")))
    assert type(loaded.model).__name__ == "Qwen2ForCausalLM" and not loaded.model.config.tie_word_embeddings
    weights = loaded.model.state_dict()
    names = {
        "attn_q": "self_attn.q_proj.weight",
        "attn_k.bias": "self_attn.k_proj.bias",
        "ffn_down": "mlp.down_proj.weight",
    }
    for name, theirs in names.items():
        assert torch.equal(weights[f"model.layers.1.{theirs}"], torch.from_numpy(tensors[f"blk.1.{name}"]))
    assert torch.equal(weights["lm_head.weight"], torch.from_numpy(tensors["output"]))
    assert len(weights) == len(tensors)


def test_a_part_that_is_missing_out_of_order_or_of_another_model(pinned_parts, whole):
    first, second = pinned_parts(whole[:5000], whole[5000:])
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(AssetError, match=r"^tiny lacks tiny.gguf.part1: run `firsttoken fetch tiny`[^\n]*$"):
        conversion.converted("tiny")
    second.write_bytes(first.read_bytes())
    first.write_bytes(content)
    with pytest.raises(AssetError, match=r"^[^\n]*tiny.gguf.part0 was altered; run `firsttoken fetch tiny`[^\n]*$"):
        conversion.converted("tiny")
    first.write_bytes(whole[:5000])
    second.write_bytes(content[:-64] + b"0" * 64)
    with pytest.raises(AssetError, match=r"^[^\n]*tiny.gguf.part1 was altered; run `firsttoken fetch tiny`[^\n]*$"):
        conversion.converted("tiny")
    assert not (paths.CACHE / "models" / "tiny").exists()


def test_parts_that_are_pinned_and_not_of_one_model(pinned_parts, whole):
    """A lock that is wrong."""
    for contents, said in (
        (
            (whole[:5000], whole[5000:] + b"0" * 640),
            r"has [\d,]+ bytes, and by its header [\d,]+; a part is of another",
        ),
        ((whole[:5000], whole[9000:]), r"cannot be read \(.+\); fetch its parts again"),
        ((whole[5000:], whole[:5000]), r"cannot be read \(.+\); fetch its parts again"),
    ):
        pinned_parts(*contents)
        with pytest.raises(ModelError, match=rf"^the GGUF of tiny {said}[^\n]*$"):
            conversion.converted("tiny")
    assert list((paths.CACHE / "models").iterdir()) == []


@pytest.mark.parametrize("kind", [15, 99], ids=["one without a way back to numbers", "one that nobody knows"])
def test_a_quantisation_that_is_unknown(pinned_parts, whole, kind: int):
    name = b"blk.1.attn_k.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind its number of dimensions and their lengths
    assert whole[at : at + 4] == bytes(4), "it was float32"
    pinned_parts(whole[:at] + kind.to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ModelError, match=r"^the GGUF of tiny cannot be read \(.*(Q8_K|99).*\); [^\n]*$"):
        conversion.converted("tiny")
    assert list((paths.CACHE / "models").iterdir()) == []
