"""The files of a model folder, listed once: who hashes, loads, stages or serves a model takes them from this list.

What disagrees is refused: two files that each claim to hold the weights, an index that says otherwise than the headers.
What nobody reads (.bin or GGUF beside safetensors, variants, shards that no index names) is left alone. Standard
library only: a service looks at its folder before it imports torch.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from firsttoken.assets.lock import file_sha256
from firsttoken.assets.model_config import CONFIG, ModelConfig, check_folder, hub_name, hub_snapshot, read_config
from firsttoken.study.errors import ModelError, first_line
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import ParseError, errors_as, shown
from firsttoken.study.parsing.safetensors_header import Header, TensorEntry, read_header
from firsttoken.study.parsing.schema import parse_as

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STORED = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
}
"""What a weight may be stored in: safetensors' name of a dtype, and torch's."""

CODES = "codes"  # what a linear layer has in the place of a weight where it rests in 8 bits
_POSITIONS = ".rotary_emb.inv_freq"  # which old checkpoints hold, and transformers passes over
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_SHARD = re.compile(r"(\d+-[\w.-]+/)?[\w-][\w.-]*\.safetensors")  # a staged checkpoint's lie one folder below


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``name`` is the file's for it, ``entry`` says dtype, shape and bytes."""

    file: Path
    name: str
    entry: TensorEntry


@dataclass(frozen=True)
class ModelFiles:
    """The weight files of a checkpoint folder, and where in them the tensors of its model lie.

    ``tensors`` are by the model's name, each once. Where the head is tied to the embedding there is none of it: either
    of the two stands for both, and where both are stored ``second`` is the head, which must equal the embedding.
    """

    folder: Path
    config: ModelConfig
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    second: StoredTensor | None

    @cached_property
    def sha256(self) -> str:
        """The :func:`combined_sha256` of the files. Raises OSError for one that has gone."""
        return combined_sha256(list(self.files))

    @property
    def bytes(self) -> int:
        """Return the bytes of all files together."""
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def _places(self) -> dict[str, str]:
        return {stored.name: name for name, stored in self.tensors.items()}

    def place(self, stored: str) -> str | None:
        """The model's name for a tensor that a file calls ``stored``; None for one that the model has no use for."""
        return self._places.get(stored)


def model_files(folder: Path, *, in_8_bits: bool = False) -> ModelFiles:
    """The weights of a checkpoint folder, each file checked to be whole and to hold what the index says.

    Raises ModelError when the folder has no usable config.json, no safetensors (pickled .bin weights are refused,
    because loading them runs code) or an adapter beside its weights; when its weights are quantised; when a shard is
    missing or truncated; when ``model.safetensors`` and the index are of different files, or the index and the headers
    say different things; and when a file holds layers beyond those of config.json: a model of fewer layers would
    answer, and answer something else. Weights ``in_8_bits`` are refused unless they are asked for.
    """
    check_folder(folder)
    config = read_config(folder)
    _check_claims(folder, config)
    headers, index = _listed(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard, header in headers.items():
        if not in_8_bits and any(name.endswith(f".{CODES}") for name in header.tensors):
            raise ModelError(f"{folder} is in 8 bits, which only `firsttoken swarm` serves; name the original")
        deepest = max((int(match[1]) for match in map(_LAYER.match, header.tensors) if match), default=-1)
        if deepest >= config.num_hidden_layers:
            raise ModelError(
                f"{shard} holds layer {deepest}, counted from 0, and config.json says {config.num_hidden_layers}; copy "
                "config.json and weights of one model"
            )
        for name, entry in header.tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{folder} holds {name} twice, in {tensors[name].file.name} and in {shard.name}; copy the shards "
                    "of one model"
                )
            tensors[name] = StoredTensor(shard, name, entry)
    if index is not None:
        _check_index(folder, index, tensors)
    weights = {name: stored for name, stored in tensors.items() if not name.endswith(_POSITIONS)}
    second = None
    if (EMBEDDING in weights or HEAD in weights) and is_tied(folder, config):
        head = weights.pop(HEAD, None)
        if head is not None and EMBEDDING in weights:
            second = head
        elif head is not None:  # which of two shared tensors a writer keeps is its own affair
            weights = {EMBEDDING: head} | weights
    return ModelFiles(folder, config, tuple(headers), weights, second)


def weight_files(folder: Path) -> list[Path]:
    """The files of :func:`model_files`, in name order. Raises ModelError as it does."""
    return list(model_files(folder).files)


def hub_folder(folder: Path) -> Path:
    """``folder``, or where that is not there and the Hub's cache on this machine has the model of that name, the folder
    there. No network is asked. Raises ModelError for a model that is there in part."""
    if os.path.isdir(folder) or not (snapshot := hub_snapshot(name := hub_name(folder))):
        return folder
    try:
        weight_files(snapshot)
    except ModelError as error:
        message = f"the Hub's cache has {name} in part: {first_line(error)}; `hf download {name}` brings the rest"
        raise ModelError(message) from error
    return snapshot


def stored_dtype(folder: Path) -> str:
    """Torch's name of the dtype that config.json says the weights have; where it says nothing or "auto", that of the
    first weight which has one, as transformers takes it.

    Raises ModelError as :func:`model_files`, and for a dtype that is unknown.
    """
    files = model_files(folder)
    if files.config.stored is not None:
        return files.config.stored
    dtypes = (stored.entry.dtype for stored in files.tensors.values())
    return next((STORED[dtype] for dtype in dtypes if dtype in STORED), STORED["F32"])


def check_shard(path: Path) -> Header:
    """The header of the safetensors file at ``path``. Raises ModelError unless it and the file fit each other."""
    if not path.is_file():
        raise ModelError(f"the shard {path.name} is missing in {path.parent}; copy it there again")
    with errors_as(f"the shard {path}", ModelError, "copy it again"):
        return read_header(path)


def is_tied(folder: Path, config: ModelConfig) -> bool:
    """Return whether the model's head is its embedding: as config.json says, or by default as transformers' class has
    it.

    Raises ModelError for a class that transformers does not know.
    """
    if config.tie_word_embeddings is not None:
        return config.tie_word_embeddings
    from firsttoken.assets.empty_model import stock_config

    return bool(stock_config(folder)[1].tie_word_embeddings)


def combined_sha256(files: list[Path]) -> str:
    """One hex sha256 for a list of files: that of their own sha256 sums and names, in name order."""
    return sum_of_sums({file: file_sha256(file) for file in files})


def sum_of_sums(sums: Mapping[Path, str]) -> str:
    """Return the :func:`combined_sha256` of files whose sha256 ``sums`` are known."""
    lines = "".join(f"{sums[file]}  {file.name}\n" for file in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest() if len(sums) > 1 else next(iter(sums.values()))


def _check_claims(folder: Path, config: ModelConfig) -> None:
    """Refuse what would make transformers load other weights than the list says, or compute with them otherwise."""
    if os.path.lexists(folder / ADAPTER):
        raise ModelError(
            f"{folder} holds {ADAPTER} beside a model, and transformers would add that adapter to it; move the adapter "
            "into a folder of its own, or merge it"
        )
    if config.quantization_config is not None:
        raise ModelError(
            f"{folder}: its weights are quantised (quantization_config in {CONFIG}), and only plain ones are read; "
            "take the model in bfloat16, float16 or float32"
        )
    if config.transformers_weights is not None:
        raise ModelError(
            f"{folder}: transformers_weights in {CONFIG} names the file {shown(config.transformers_weights)}; remove "
            f"the key, and let the weights be {SINGLE} or the shards of {INDEX}"
        )


def _listed(folder: Path) -> tuple[dict[Path, Header], dict[str, str] | None]:
    """The headers of the weight files, in name order, and by tensor the file that an index names."""
    single, index = folder / SINGLE, folder / INDEX
    if not index.is_file():
        if os.path.lexists(single):
            return {single: check_shard(single)}, None
        if any(folder.glob("*.bin")):
            raise ModelError(f"{folder} has only .bin weights; loading those runs code: convert them to safetensors")
        raise ModelError(f"{folder} has no {SINGLE} and no {INDEX}; copy the weights there")
    with errors_as(index, ModelError, "copy it again"):
        weight_map = parse_as(_Index, read_json(index), others=True).weight_map
        names = set(weight_map.values())
        if bad_name := next((name for name in sorted(names) if not _SHARD.fullmatch(name)), ""):
            raise ParseError(f"{shown(bad_name)} is no name of a shard beside it")
        if not names:
            raise ParseError("it names no file")
    if single.is_file() and names != {SINGLE}:
        raise ModelError(
            f"{folder} holds two models: {SINGLE}, which transformers reads, and {INDEX}, which names "
            f"{min(names - {SINGLE})}; remove the older of the two"
        )
    return {folder / name: check_shard(folder / name) for name in sorted(names)}, weight_map


def _check_index(folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError unless the index says of each tensor in which file it is. ``metadata`` is passed over: published
    folders have a ``total_size`` of another dtype, and nobody loads by it."""
    for name in sorted(weight_map.keys() | tensors.keys()):
        if name.endswith(_POSITIONS):
            continue
        listed = weight_map.get(name)
        actual = tensors[name].file.relative_to(folder).as_posix() if name in tensors else None
        if listed != actual:
            raise ModelError(
                f"{folder}: {INDEX} and the shards disagree: by the index {shown(name, 80)} is in "
                f"{listed or 'no file'}, by the headers in {actual or 'none'}; copy index and shards of one model"
            )
