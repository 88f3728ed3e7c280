"""LoRA fine-tunes of the served model, each under a name of its own: the weights are there once, and a step takes the
requests of all (S-LoRA, arXiv:2311.03285, and Punica, arXiv:2310.18547, do this on GPUs)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from firsttoken.assets.adapter_files import CONFIG, MOST_BYTES, RECIPE, WEIGHTS, TunedFrom, made_from
from firsttoken.assets.checkpoint import ModelFiles, combined_sha256
from firsttoken.engine.compared_step import Comparison, check_rows, prompt_of, reference_rows
from firsttoken.engine.decoder import Decoder, LocalSegment
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import Adapter, parse_adapter, reference_lora
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.shared_base import SharedBase, adapted_layers, fuse_variants, replace_layer
from firsttoken.progressiveserve.checkpoint.manifest import CONFIG as MODEL_CONFIG
from firsttoken.progressiveserve.checkpoint.manifest import MANIFEST
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.parse_errors import errors_as, read_bytes, regular_size

if TYPE_CHECKING:
    from firsttoken.progressiveserve.staged_serving.stage_versions import Between, StagedModelVersion

ADAPTER_FILES = CONFIG, WEIGHTS


def read_variants(folders: Mapping[str, Path], files: Base | ModelFiles, device: str) -> dict[str, Adapter]:
    """The adapters in ``folders`` by the variant's name. Raises StageError as :func:`read_fitting`."""
    return {
        name: read_fitting(f"--variant {name}", f"of the variant {name}", folder, files, device)
        for name, folder in folders.items()
    }


class Base(NamedTuple):
    """The ``folder`` of a model and the ``sha256`` of its weights, "" where nobody knows it."""

    folder: Path
    sha256: str


def read_fitting(option: str, name: str, folder: Path, files: Base | ModelFiles, device: str) -> Adapter:
    """The adapter in ``folder``, as PEFT writes it, which ``option`` has named; ``name`` is for errors.

    Raises StageError for a folder that holds none, and for an adapter whose recipe.json names another base than the
    model of ``files``. An adapter without a recipe is held against the shapes of the model alone.
    """
    with errors_as(folder, StageError, _mend(option)):
        content = [read_bytes(folder / CONFIG, 2**20), read_bytes(folder / WEIGHTS, MOST_BYTES)]
    base = made_from(folder, TunedFrom).base_sha256 if (folder / RECIPE).is_file() else ""
    if base and files.sha256 and base != files.sha256:
        raise StageError(
            f"{option}: its adapter was trained on the base {base[:12]}, and {files.folder.name} is "
            f"{files.sha256[:12]}; name an adapter of this model"
        )
    return parse_adapter(name, *content, device)


def adapter_files(folders: Mapping[str, Path]) -> list[Path]:
    """The files of the adapters in ``folders`` by the variant's name. Raises StageError for one that is not there."""
    files = []
    for name, folder in folders.items():
        with errors_as(folder, StageError, _mend(f"--variant {name}")):
            files += [folder / file for file in ADAPTER_FILES if regular_size(folder / file)]
    return files


def _mend(option: str) -> str:
    return f"name a folder with {CONFIG} and {WEIGHTS} for {option}"


def host_variants(
    executor: LiveExecutor, folders: Mapping[str, Path], files: ModelFiles, device: str
) -> dict[str, ModelVersion]:
    """Let ``executor``, which runs the model of ``files`` and has no request, host the variants in ``folders`` too;
    return them by name.

    Raises StageError as :func:`read_variants`, and for an adapter that does not fit; ModelError for a variant of which
    a step is not what the model's own modules and plain LoRA compute.
    """
    adapters = read_variants(folders, files, device)
    executor.version = base = SharedBase(executor.version.decoder)
    versions = {name: base.variant(executor.model, adapter) for name, adapter in adapters.items()}
    for name, version in versions.items():
        _compare(executor, version, adapters[name], files.files, combined_sha256(adapter_files({name: folders[name]})))
    return versions


def _compare(
    executor: LiveExecutor, version: ModelVersion, adapter: Adapter, files: Sequence[Path], sha256: str
) -> None:
    """Hold a step of ``version``, of an adapter of this ``sha256``, to the own modules of the model of ``executor``
    with plain LoRA, unless it was before with these ``files`` of the model; no step runs meanwhile.

    Raises ModelError for a variant that is another.
    """
    dtype = executor.pool.shape.dtype
    code = [Path(__file__), *(Path(inspect.getfile(part)) for part in (Adapter, SharedBase))]
    comparison = Comparison([*files, *code], "variant", sha256, str(dtype), executor.pool.device.type)
    if comparison.due:
        prompt = prompt_of(executor.limits)
        with executor.stock_attention(), reference_lora(executor.model.model.layers, adapter):
            reference = reference_rows(executor.model, prompt)
        check_rows(f"the adapter {adapter.name}", partial(executor.rows_of, prompt, version), reference, dtype)
        comparison.mark_passed()


class LateVariants:
    """The variants in ``folders`` of a model that comes in stages, which serve with its last one."""

    def __init__(self, folders: Mapping[str, Path], device: str) -> None:
        self._folders, self._device = folders, device
        self._adapters: dict[str, Adapter] = {}
        self._variants: list[tuple[ModelVersion, Adapter]] = []
        self._files: tuple[Path, ...] = ()
        self._sums: dict[str, str] = {}
        self._base: StagedModelVersion

    def read(self, folder: Path, sha256: str, layers: Sequence[nn.Module]) -> None:
        """Read the adapters for the ``layers`` of the model in ``folder``, before their weights are there.

        Raises StageError as :func:`read_variants`, and for an adapter that does not fit.
        """
        self._adapters = read_variants(self._folders, Base(folder, sha256), self._device)
        self._files = folder / MODEL_CONFIG, folder / MANIFEST
        self._sums = {name: combined_sha256(adapter_files({name: path})) for name, path in self._folders.items()}
        for adapter in self._adapters.values():
            adapted_layers(layers, adapter)

    def host(self, version: StagedModelVersion, executor: LiveExecutor, between: Between) -> dict[str, ModelVersion]:
        """The variants by name, beside the ``version`` that is the last stage; ``between`` two steps each is compared
        as ``host_variants`` does. Raises ModelError."""
        self._base, hosted = version, {}
        (segment,) = version.decoder.segments
        for name, adapter in self._adapters.items():
            layers = adapted_layers(version.modules.base, adapter)
            decoder = Decoder(executor.model, [LocalSegment(layers)])
            variant = hosted[name] = ModelVersion(decoder, None, version.stage, version)
            for number, layer in enumerate(segment.modules):
                replace_layer(variant, number, layer, adapter)
            self._variants.append((variant, adapter))
            between(partial(_compare, executor, variant, adapter, self._files, self._sums[name]))
        return hosted

    def fuse(self) -> Iterator[None]:
        """Fuse the layers of that version as it does, and give each at once to the variants, with their adapters."""
        return fuse_variants(self._base.decoder, self._base.fuse(), self._variants)
