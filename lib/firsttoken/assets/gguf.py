"""Turn the pinned GGUF into a safetensors folder, once: reloading takes a fraction of a second instead of seven."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from firsttoken.assets.lock import asset_path, file_sha256, pinned
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.study import paths
from firsttoken.study.errors import ModelError
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.parse_errors import blaming
from firsttoken.study.parsing.schema import shaped, some
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
    files: Annotated[dict[str, _File], some]


def converted(name: str, *, sums: bool = True) -> Path:
    """The folder CACHE/models/<name> with the fp32 weights of a pinned GGUF asset, converted when it is not there.

    An intact folder (sizes on every call, sha256 once per process, against its manifest) is used as it is; a damaged
    one, or one made from another GGUF, is made again. Without ``sums``, which take seconds, sizes have to do. Raises
    AssetError when the GGUF itself is absent or damaged, and ModelError when the reloaded weights differ from the
    converted ones.
    """
    folder = paths.CACHE / "models" / name
    gguf_sha256 = pinned(name).sha256
    if not _intact(folder, gguf_sha256, sums):
        gguf = asset_path(name)
        with alone(folder.with_name(f".{name}.lock"), f"converts {name}"):
            if not _intact(folder, gguf_sha256, sums):  # else somebody else has converted it meanwhile
                _convert(gguf, gguf_sha256, folder)
    return folder


def _intact(folder: Path, gguf_sha256: str, sums: bool = True) -> bool:
    try:
        with blaming(folder / _MANIFEST, ModelError, "it is made again"):
            manifest = shaped(_Converted, read_json(folder / _MANIFEST))
            return manifest.gguf_sha256 == gguf_sha256 and all(
                (folder / file).stat().st_size == entry.bytes
                and (not sums or file_sha256(folder / file) == entry.sha256)
                for file, entry in manifest.files.items()
            )
    except ModelError:
        return False


def _convert(gguf: Path, gguf_sha256: str, folder: Path) -> None:
    print(f"converting {gguf.name} to safetensors, once", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        with quiet_transformers(), _read_once():
            _save_dequantised(gguf, partial)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(partial.iterdir())
        }
        manifest = json.dumps({"gguf_sha256": gguf_sha256, "files": files}, indent=2)
        (partial / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        partial.chmod(0o755)  # a private folder would hide the model from the other users of a shared cache
        for path in partial.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {folder}: {error}; set FIRSTTOKEN_CACHE") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    odd = [key for key in ours if key not in theirs or not torch.equal(ours[key], theirs[key])]
    if odd or len(ours) != len(theirs):
        raise ModelError(f"the converted weights do not reload bit-equal ({len(odd)} tensors); report this")
