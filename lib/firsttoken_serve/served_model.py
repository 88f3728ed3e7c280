"""What serves a model folder: a plain server, which is here, a staged one or a swarm's; this chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from firsttoken.assets.adapter_files import CONFIG as ADAPTER_CONFIG
from firsttoken.assets.adapter_files import WEIGHTS, check_plain
from firsttoken.assets.checkpoint import ModelFiles, combined_sha256, stored_dtype, weight_files
from firsttoken.assets.model_config import CONFIG, read_config
from firsttoken.assets.positions import context_of
from firsttoken.assets.servable import check_servable
from firsttoken.assets.weight_files import unchanged
from firsttoken.cps.policies.online import OnlineCrossPoint
from firsttoken.engine.model_server import EngineServer, ModelServer
from firsttoken.engine.preemption import POLICIES, PreemptionPolicy, policy_of
from firsttoken.engine.request_limits import STALL_FREE, RequestLimits
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.progressiveserve.checkpoint.manifest import MANIFEST, check_files, read_manifest
from firsttoken.study import dtypes
from firsttoken.study.errors import FirstTokenError, StageError, first_line, permanent_faults
from firsttoken.study.extensions import extension, registered
from firsttoken.study.system.direct_io import read_ahead
from firsttoken_serve.retrying_server import AnswerEarly, RetryingServer, StagedService
from firsttoken_serve.service_config import ServiceConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from firsttoken.droidspeak.identity import ModelIdentity
    from firsttoken.engine.live_executor import LiveExecutor

BEFORE_TORCH = "BEFORE_TORCH"  # what a package registers that computes without it


class EarlyStart(NamedTuple):
    """The answers that are given until torch is imported, and the links over which their model is read."""

    answers: AnswerEarly
    links: tuple[Link, ...] = ()


# A Hugging Face folder that was not staged: it is read whole, lean or by transformers itself.


class PlainServer(RetryingServer):
    """Serves the whole model in the plain folder ``folder``, and uses what is in ``store`` of how a prompt begins; with
    it, under their names, the ``variants`` that adapters in these folders make of it. ``early`` answers until torch is
    imported, as :func:`start_before_torch` returns it."""

    def __init__(
        self,
        folder: Path,
        limits: RequestLimits,
        *,
        device: str,
        broken: Callable[[FirstTokenError], None],
        store: Path | None = None,
        owner: str = "",
        variants: Mapping[str, Path] = MappingProxyType({}),
        early: AnswerEarly | None = None,
    ) -> None:
        super().__init__(limits, device, broken=broken, early=early)
        self._folder, self._store, self._owner, self._variants = folder, store, owner, variants
        self._live: LiveExecutor
        self._load_other: Callable[[], nn.Module] | None = None  # where others multiply better than who begins

    def _read_ahead(self) -> None:
        """Let the system read the files ahead of their mapping, which has begun where there are answers."""
        if not self._answers_early():
            read_weights_ahead(self._folder)

    def _import(self) -> None:
        """Import all that loads, but not transformers, which only few folders ask for."""
        from firsttoken.engine.accelerator import accelerator

        accelerator()

    def _begin(self) -> bool:
        """Read it all. Raises PermanentFault for a folder that cannot be read: it stays as it is."""
        import torch

        from firsttoken.engine.accelerator import accelerator

        self._stages = 1
        with permanent_faults():
            files = check_servable(self._folder, way="spans" if self._store or self._variants else "alone")
            self._bytes_total = files.bytes
            stored = getattr(torch, stored_dtype(self._folder))
        early = None if self._early is None else self._early.model
        with unchanged(files.files, "" if early is None else early.weights.seen), permanent_faults():
            dtype = dtypes.serving(dtypes.AUTO, stored, self._device)
            if early is not None and early.dtype == dtypes.name_of(dtype):
                self._live = extension(BEFORE_TORCH, "take_over")(early, self.limits.blocks, self.limits.host_blocks)
                if not accelerator().multiplies(dtype):
                    self._load_other = partial(_load_again, files, dtype, self._device, early.weights.seen)
            else:
                model = load_plain(files, dtype, self._device)
                self._live = self._executor(model, torch.device(self._device))
            self._bytes_moved = self._bytes_total
            self._live.version.stage = 1
            versions = {}
            if self._variants:
                from firsttoken_serve.variants import host_variants

                versions = host_variants(self._live, self._variants, files, self._device)
        self._run(self._live, versions=versions)
        self._compare(files, dtype)
        return True

    def _compare(self, files: ModelFiles, dtype: torch.dtype) -> None:
        """Hold a step to the lean modules' own, unless it was before; others than lean ones the executor has held to
        transformers'. Requests run meanwhile. Raises PermanentFault."""
        from firsttoken.engine.attention import is_stock
        from firsttoken.engine.compared_step import Comparison, check_rows, lean_rows, prompt_of

        live, server = self._live, self._server
        comparison = Comparison([files.folder / CONFIG, *files.files], "lean", str(dtype), self._device)
        if comparison.due and not is_stock(live.model):
            prompt = prompt_of(live.limits)
            with unchanged(files.files), permanent_faults():
                reference = lean_rows(files, dtype, self._device, prompt)
                check_rows(files.folder.name, lambda: server.call(lambda: live.rows_of(prompt)), reference, dtype)
            comparison.mark_passed()

    def _continue_in_background(self) -> None:
        """Open the stored prefixes, and fuse the layers; or load those with which requests begin from then on."""
        self._open_prefixes()
        if self._load_other is None:
            self._fuse(self._live.version.fuse, self._release_plain)
            return
        with suppress(FirstTokenError):  # the server is being closed, or others have taken the place of its files
            from firsttoken.engine.model_version import fused_version

            version = fused_version(self._load_other())
            self._server.call(lambda: self._server.publish(version, lambda old, new: None))

    def _release_plain(self) -> None:
        """Let the model go of its layers, which the version has, so that each is freed as it is fused."""
        from torch import nn

        self._live.model.model.layers = nn.ModuleList()

    def _open_prefixes(self) -> None:
        if self._store is None:
            return
        dtype, who = next(self._live.model.parameters()).dtype, (self._owner, self._variants)
        self._note(1, use_prefixes(self, self._store, lambda: receivers(self._folder, dtype, *who), self._device))


def start_before_torch(config: ServiceConfig) -> EarlyStart | None:
    """The model of ``config`` that computes without torch, the first stage of one in stages, while threads read and
    pack its weights.

    None where answers wait for torch: because it is imported already, because of ``torch_first``, or because this
    process does not serve a model of its own, without variants, on the CPU; and where nothing computes without it.
    """
    elsewhere = config.swarm or config.device != "cpu"
    waits = config.variants or config.torch_first or "torch" in sys.modules
    if elsewhere or waits or not registered(BEFORE_TORCH):
        return None
    staged = is_staged(config.folder)
    links = (Link(LinkConfig(config.gbit_per_s)),) if staged else ()
    if not staged:
        read_weights_ahead(config.folder)

    def make() -> Any:
        if staged:
            weights = extension(BEFORE_TORCH, "staged")(config.folder, links, readers=config.threads)
        else:
            weights = extension(BEFORE_TORCH, "plain")(check_servable(config.folder))
        return extension(BEFORE_TORCH, "model")(weights, config.max_len(context_of(read_config(config.folder))))

    reader = ThreadPoolExecutor(1, "reading")
    coming = reader.submit(make)
    reader.shutdown(wait=False)
    return EarlyStart(partial(extension(BEFORE_TORCH, "answers"), coming), links)


def read_weights_ahead(folder: Path) -> None:
    """Let the system read the weights in ``folder`` into memory, where it can."""
    with suppress(FirstTokenError):
        for file in weight_files(folder):
            Thread(target=read_ahead, args=(file,), daemon=True).start()


def load_plain(files: ModelFiles, dtype: torch.dtype, device: str) -> nn.Module:
    """The model of ``files`` on ``device``, held in memory: lean, or what transformers makes of a folder that asks for
    more, which a line on the terminal says. Raises ModelError for a folder that cannot be read, or of another family.
    """
    from firsttoken.assets.decoder_layers import layers_of
    from firsttoken.assets.weights import fill
    from firsttoken.engine.accelerator import accelerator

    if (own_model := accelerator().build_own(files.folder, dtype)) is not None:
        model = fill(own_model, files, device)
    else:
        from firsttoken.assets.models import load_model

        model = load_model(str(files.folder), dtype=dtype, device=device, with_tokenizer=False).model
    layers_of(model)  # which the engine runs
    return model


def _load_again(files: ModelFiles, dtype: torch.dtype, device: str, before: str) -> nn.Module:
    """Load as :func:`load_plain` while the files are as :func:`file_states` has said ``before``."""
    with unchanged(files.files, before):
        return load_plain(files, dtype, device)


# Keys and values that were computed before, in a folder of KV files.


def use_prefixes(server: EngineServer, store: Path, who: Callable[[], Mapping[str, ModelIdentity]], device: str) -> str:
    """Let ``server``, whose model is whole, take from ``store`` what each of ``who`` may read, "" the model itself.
    Return what came of it: what goes wrong, with nothing taken, or that they are used. It hashes the weights and
    imports transformers, which takes seconds."""
    from firsttoken_serve.prefixes.prefix_finder import PrefixFinder

    try:
        server.use_sources(PrefixFinder(store, who(), device))
    except FirstTokenError as error:
        return f"no stored prefixes: {first_line(error)}"
    return "stored prefixes are used"


def receivers(
    folder: Path, dtype: torch.dtype, owner: str, variants: Mapping[str, Path] = MappingProxyType({}), weights: str = ""
) -> dict[str, ModelIdentity]:
    """The model in ``folder`` as "", and its ``variants`` by name, as those who ask for prefixes of ``owner``.

    ``weights`` is the sha256 of the model's, where the folder's files do not say. Raises ModelError for a folder that
    transformers does not know.
    """
    from firsttoken.droidspeak.identity import identify_folder
    from firsttoken_serve.variants import ADAPTER_FILES

    model = identify_folder(folder, dtype, weights or combined_sha256(weight_files(folder)), owner)
    sums = {
        name: combined_sha256([adapter_folder / file for file in ADAPTER_FILES])
        for name, adapter_folder in variants.items()
    }
    return {"": model} | {name: replace(model, adapters=adapters) for name, adapters in sums.items()}


# Which of the servers it is.


def is_staged(folder: Path) -> bool:
    """Return whether ``folder`` is what `firsttoken stage` writes, and not a plain Hugging Face folder.

    The default model's folder has a manifest of its own kind beside its weights; a stage's weights lie in folders.
    """
    return (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors"))


def check_model(config: ServiceConfig) -> None:
    """Raises ModelError and StageError for a folder that cannot be served, or not with what ``config`` asks for."""
    staged, store = is_staged(config.folder), config.prefix_store
    if store is not None and not store.is_dir():
        raise StageError(f"serve: there is no folder {store}; `firsttoken prefix put` makes one")
    config.check_pairs(staged)
    for name, folder in config.variants:
        if all((folder / file).is_file() for file in (ADAPTER_CONFIG, WEIGHTS)):  # else whoever reads it says so
            check_plain(folder, f"adapter of the variant {name}")
    if staged and not config.swarm:
        check_files(config.folder, read_manifest(config.folder), stages=(1,))
    else:
        alone = not (config.swarm or config.prefix_store or config.variants)
        check_servable(config.folder, in_8_bits=bool(config.swarm), way="alone" if alone else "spans")


def serve_model(
    config: ServiceConfig,
    broken: Callable[[FirstTokenError], None],
    context: int = sys.maxsize,
    early_start: EarlyStart | None = None,
) -> ModelServer:
    """The model of ``config``, whose context has ``context`` tokens. It takes requests from now on, and begins to load
    when it is started; ``early_start``, of :func:`start_before_torch`, answers until then.

    Raises ProfileError for a scheduler, policy, pool or budget that the engine does not have, and as a SwarmServer;
    what the folder lacks, a server that loads it reports itself, and to ``broken`` what leaves no hope.
    """
    engine = replace(
        STALL_FREE,
        scheduler=config.scheduler,
        share_prefixes=config.share_prefixes,
        requests=config.max_running,
        token_budget=STALL_FREE.token_budget if config.token_budget is None else config.token_budget,
    )
    longest, variants = config.max_len(context), dict(config.variants)
    answers = early_start and early_start.answers
    limits = RequestLimits(
        max_sessions=config.max_running + config.max_waiting,
        max_prompt_tokens=min(config.max_prompt_tokens or longest, longest),
        max_new_tokens=min(config.max_new_tokens or longest, longest),
        max_model_len=longest,
        kv_blocks=config.kv_blocks,
        engine=engine,
        preemption=_preemption(config.preemption),
    )
    if config.swarm:
        from firsttoken_serve.swarm.over_swarm import SwarmServer

        return SwarmServer(config, limits, is_staged(config.folder))
    if is_staged(config.folder):
        links = [Link(LinkConfig(config.gbit_per_s))] if early_start is None else early_start.links
        options = {"device": config.device, "broken": broken, "early": answers, "variants": variants}
        staged = StagedService(config.folder, links, limits, dtype=dtypes.AUTO, threads=config.threads, **options)
        if (store := config.prefix_store) is not None:
            staged.whole = lambda dtype, weights: use_prefixes(
                staged,
                store,
                lambda: receivers(config.folder, dtype, config.prefix_owner, variants, weights),
                config.device,
            )
        return staged
    options = {"device": config.device, "store": config.prefix_store, "owner": config.prefix_owner}
    options |= {"variants": variants, "early": answers}
    return PlainServer(config.folder, limits, broken=broken, **options)


def _preemption(name: str) -> PreemptionPolicy:
    """The policy called ``name``; no threshold of another machine serves. Raises ProfileError for an unknown one."""
    online = OnlineCrossPoint.name
    return policy_of(POLICIES | {online: OnlineCrossPoint}, name, {"start": 0} if name == online else {})
