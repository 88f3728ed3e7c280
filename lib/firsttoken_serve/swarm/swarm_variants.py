"""LoRA adapters on the blocks of a swarm: what a server of some blocks adds to them, and what a service asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from firsttoken.assets.checkpoint import ModelFiles, combined_sha256
from firsttoken.assets.servable import check_servable
from firsttoken.engine.accelerator import Fused
from firsttoken.engine.lora import Adapter
from firsttoken.engine.shared_base import adapted_layers
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.petals.records import MOST_ADAPTERS, Record, adapter_name, adapters_fault
from firsttoken.study.errors import StageError, SwarmError
from firsttoken_serve.variants import ADAPTER_FILES, Base, adapter_files, read_variants


def adapter_names(folders: Mapping[str, Path], files: Base | ModelFiles) -> dict[str, str]:
    """By the variant's name, what servers call the adapter in its folder. Raises StageError as ``read_variants``, for
    adapters of the model of ``files``."""
    adapter_files(folders)
    sums = {name: combined_sha256([folder / file for file in ADAPTER_FILES]) for name, folder in folders.items()}
    read_variants(folders, files, "cpu")
    return {name: adapter_name(name, sha256) for name, sha256 in sums.items()}


def other_adapter(name: str, wanted: str, servers: Sequence[Record]) -> SwarmError | None:
    """Why nobody of ``servers`` has the adapter ``wanted`` of this name: one that has another under it, if there is."""
    for server in servers:
        for adapter in server.adapters:
            if adapter != wanted and adapter.startswith(f"{name}@"):
                return SwarmError(
                    f"--variant {name}: the adapter is {_short(wanted)} here and {_short(adapter)} on the server "
                    f"{server.name}; name the same files on both"
                )
    return None


def _short(adapter: str) -> str:
    return adapter.partition("@")[2][:12]


class AdapterFolders:
    """The adapters in ``folders``, each with a name, on blocks of the model in the folder ``model``; a server keeps
    what is on its own.

    Raises StageError as :func:`adapter_names`, for one that is for layers that the model does not have, and for names
    and numbers that no server announces.
    """

    def __init__(self, folders: Sequence[tuple[str, Path]], model: Path) -> None:
        self._folders, self._files = dict(folders), check_servable(model, in_8_bits=True)
        if len(self._folders) < len(folders) or len(folders) > MOST_ADAPTERS:
            raise StageError(f"--variant: give a server at most {MOST_ADAPTERS} adapters, each a name of its own")
        self._named = adapter_names(self._folders, self._files)
        self.names = tuple(self._named.values())
        if adapters_fault(self.names):
            raise StageError("--variant: name each adapter with up to 64 letters, digits, dots, dashes")

    def adapted(
        self, blocks: range, plain: Sequence[nn.Module], fused: Sequence[nn.Module]
    ) -> dict[str, list[nn.Module]]:
        """The layers with each adapter, fused where the kernels add it up. Raises StageError for one that does not fit
        or has changed since the server began."""
        if adapter_names(self._folders, self._files) != self._named:
            raise StageError("--variant: an adapter has changed since this server announced it; start it again")
        adapters = read_variants(self._folders, self._files, "cpu")
        return {self._named[name]: self._on(adapter, blocks, plain, fused) for name, adapter in adapters.items()}

    def _on(
        self, adapter: Adapter, blocks: range, plain: Sequence[nn.Module], fused: Sequence[nn.Module]
    ) -> list[nn.Module]:
        depth = self._files.config.num_hidden_layers
        if outside := sorted(number for number in adapter.layers if number >= depth):
            raise StageError(
                f"adapter {adapter.name} is for layer {outside[-1]}, and this model has {depth}; name its own"
            )
        slices = {number: adapter.layers[number] for number in blocks if number in adapter.layers}
        layers = adapted_layers(plain, replace(adapter, layers=slices), blocks.start)
        for index, (number, layer) in enumerate(zip(blocks, fused, strict=False)):
            if number not in slices:
                layers[index] = layer
            elif isinstance(layer, Fused) and (adapted := layer.with_adapter(slices[number])) is not None:
                layers[index] = adapted
        return layers


def with_variants(folders: Sequence[tuple[str, Path]], model: Path) -> Callable[..., BlockBackend]:
    """Makes the blocks of a server of the model in the folder ``model`` that has the adapters in ``folders``. Raises as
    :class:`AdapterFolders`."""
    return partial(BlockBackend, adapters=AdapterFolders(folders, model)) if folders else BlockBackend
