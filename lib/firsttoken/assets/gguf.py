"""Turn a pinned GGUF into a safetensors folder, once: reloading takes a fraction of a second instead of seven."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from firsttoken.assets.lock import asset_path, file_sha256, pinned
from firsttoken.assets.manual_downloads import downloaded, sums
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.study import paths
from firsttoken.study.errors import ModelError, first_line
from firsttoken.study.files import new_folder
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import errors_as
from firsttoken.study.parsing.schema import non_empty, parse_as
from firsttoken.study.system.alone import alone

if TYPE_CHECKING:
    import torch

PINNED = "smollm2-135m"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _File:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Converted:
    gguf_sha256: str
    files: Annotated[dict[str, _File], non_empty]


def converted(name: str, *, hashed: bool = True) -> Path:
    """The folder CACHE/models/<name> with the fp32 weights of a pinned GGUF asset, converted when it is not there.

    The file is an asset's, or the parts that are downloaded as ``name``, joined. An intact folder (sizes on every call,
    sha256 once per process, against its manifest) is used as it is; a damaged one, or one made from another GGUF, is
    made again. Where it is not ``hashed``, which takes seconds, sizes have to do. Raises AssetError when the GGUF or a
    part of it is absent or damaged, and ModelError when it cannot be read, or its weights reload as others.
    """
    folder = paths.CACHE / "models" / name
    of_parts = sums(name)
    gguf_sha256 = hashlib.sha256("".join(of_parts.values()).encode()).hexdigest() if of_parts else pinned(name).sha256
    if not _intact(folder, gguf_sha256, hashed):
        parts = [downloaded(name) / part for part in of_parts] or [asset_path(name)]
        with alone(folder.with_name(f".{name}.lock"), f"converts {name}"):
            if not _intact(folder, gguf_sha256, hashed):  # else somebody else has converted it meanwhile
                _convert(parts, gguf_sha256, folder)
    return folder


def _intact(folder: Path, gguf_sha256: str, hashed: bool) -> bool:
    try:
        with errors_as(folder / _MANIFEST, ModelError, "it is made again"):
            manifest = parse_as(_Converted, read_json(folder / _MANIFEST))
            return manifest.gguf_sha256 == gguf_sha256 and all(
                (folder / file).stat().st_size == entry.bytes
                and (not hashed or file_sha256(folder / file) == entry.sha256)
                for file, entry in manifest.files.items()
            )
    except ModelError:
        return False


def _convert(parts: Sequence[Path], gguf_sha256: str, folder: Path) -> None:
    print(f"converting {folder.name} to safetensors, once", file=sys.stderr, flush=True)
    try:
        with new_folder(folder, over_older=True) as made:
            with quiet_transformers(), _read_once(), _joined(parts) as gguf:
                _check_readable(gguf, folder.name)
                _save_dequantised(gguf, made)
            sizes = {path: path.stat().st_size for path in sorted(made.iterdir())}
            files = {path.name: {"bytes": size, "sha256": file_sha256(path)} for path, size in sizes.items()}
            manifest = json.dumps({"gguf_sha256": gguf_sha256, "files": files}, indent=2)
            (made / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
    except NotImplementedError as error:  # gguf's own, which names the quantisation
        raise ModelError(
            f"the GGUF of {folder.name} cannot be read ({first_line(error)}); take one in another quantisation"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {folder}: {error}; set FIRSTTOKEN_CACHE") from error


@contextmanager
def _joined(parts: Sequence[Path]) -> Iterator[Path]:
    """The one file that ``parts`` are, for as long as it is read."""
    if len(parts) == 1:
        yield parts[0]
        return
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=parts[0].parent) as folder:
        joined = Path(folder) / "joined.gguf"
        with joined.open("wb") as sink:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, sink)
        yield joined


def _check_readable(gguf: Path, name: str) -> None:
    """Raise ModelError unless ``gguf`` is one that is as long as its header says, and its quantisations are known."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf))
    except (ValueError, IndexError, KeyError) as error:  # no magic, a type that has no name, or bytes of another file
        raise ModelError(f"the GGUF of {name} cannot be read ({first_line(error)}); fetch its parts again") from error
    end, size = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), gguf.stat().st_size
    if not end <= size < end + reader.alignment:
        raise ModelError(
            f"the GGUF of {name} has {size:,} bytes, and by its header {end:,}; a part is of another model: fetch all"
        )


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the file for the tokenizer, the configuration and the weights each, and makes the table of
    names for each of 400 modules: with all made once 16 s became 7."""
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, made in before.items():
            setattr(gguf, name, lru_cache(made))
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)


def _save_dequantised(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers marks the model as quantised and then refuses to save it, although its tensors are plain fp32
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_reload(model, folder)


def _check_reload(model: torch.nn.Module, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    ours, theirs = model.state_dict(), reloaded.state_dict()
    different = [key for key in ours if key not in theirs or not torch.equal(ours[key], theirs[key])]
    if different or len(ours) != len(theirs):
        raise ModelError(f"the converted weights do not reload bit-equal ({len(different)} tensors); report this")
