"""What ``firsttoken prefix`` does: keep what a model computes for a text, for itself and for others of its shape."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from firsttoken.assets.checkpoint import combined_sha256, stored_dtype
from firsttoken.assets.models import load_model
from firsttoken.assets.servable import check_servable
from firsttoken.droidspeak.entry import Entry
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible, identify
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.prefix_index import token_bytes
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.shared_base import adapted_layers
from firsttoken.study import dtypes
from firsttoken.study.errors import CacheError, RequestError
from firsttoken.study.parsing.parse_errors import errors_as, read_bytes
from firsttoken_serve.chat.text import read_vocabulary
from firsttoken_serve.prefixes.pair_profile import SUFFIX, profile_pair, read_profiles, write_profile
from firsttoken_serve.variants import ADAPTER_FILES, read_fitting

_MOST_TEXT = 1 << 24  # bytes


def run(options: argparse.Namespace) -> None:
    """The action that was chosen. Raises ModelError, StageError, CacheError and RequestError."""
    actions = {"put": _put, "profile": _profile, "list": _list, "drop": _drop}
    actions[options.action](options)


@dataclass(frozen=True)
class _NamedModel:
    """The model in ``folder``, with an ``adapter`` on it or without, as a service computes with it."""

    folder: Path
    adapter: Path | None

    def loaded(self) -> tuple[nn.Module, ModelIdentity]:
        """The model, and who it is. Raises ModelError, and StageError for an adapter of another model."""
        files, adapter, adapter_sha256 = check_servable(self.folder), None, ""
        if self.adapter is not None:
            adapter = read_fitting("--adapter", self.adapter.name, self.adapter, files, "cpu")
            adapter_sha256 = combined_sha256([self.adapter / name for name in ADAPTER_FILES])
        dtype = dtypes.serving(dtypes.AUTO, getattr(torch, stored_dtype(self.folder)), "cpu")
        model = load_model(str(self.folder), dtype=dtype)
        if adapter is not None:
            model.model.model.layers = nn.ModuleList(adapted_layers(list(model.model.model.layers), adapter))
        return model.model, identify(model.model, model.tokenizer, files.sha256, adapter_sha256)


def _put(options: argparse.Namespace) -> None:
    named = _NamedModel(options.model, options.adapter)
    check_servable(options.model)  # before a text is read for it
    tokens, (model, identity) = _text_ids(options), named.loaded()
    profiled = read_profiles(options.store)
    edges = {
        profile.lo for (sender, _), profile in profiled.items() if sender == identity.key and profile.lo < profile.hi
    }
    edges.update(options.edge)
    owned = replace(identity, owner=options.owner)
    store = KVStore(options.store, memory_bytes=0, disk_bytes=int(options.most_gb * 1e9))
    before = {file.entry.key for file in store.files}
    store.store(tokens, owned, full_prefill(model, Prefix.of([tokens]), edges - {0}))
    stored = {file.entry.key: file for file in store.files}
    key = Entry(owned, token_bytes(tokens), ()).key
    print(f"{key}: {len(tokens):,} tokens, {stored[key].nbytes / 1e6:.1f} MB, by {identity}{_owned_by(options.owner)}")
    for gone in sorted(before - stored.keys()):
        print(f"{gone}: dropped to make room, as it was used least recently")
    if not any(sender == identity.key for sender, _ in profiled):
        print("only this model will take it: no pair is profiled in this store (`firsttoken prefix profile`)")


def _text_ids(options: argparse.Namespace) -> list[int]:
    """The token ids of the text, as the service makes them of a prompt. Raises RequestError for none."""
    text = options.text
    if text is None:
        if options.file is None:
            raise RequestError("prefix put: give the text, or --file FILE")
        with errors_as(options.file, RequestError, "name a text file in UTF-8"):
            text = read_bytes(options.file, _MOST_TEXT).decode("utf-8")
    elif options.file is not None:
        raise RequestError("prefix put: give the text or --file FILE, not both")
    vocabulary = read_vocabulary(options.model, None)
    if not options.system:
        return vocabulary.prompt_ids(text)
    chats = ([{"role": "system", "content": text}, {"role": "user", "content": question}] for question in ("a", "1"))
    ids, other = (vocabulary.chat_ids(chat) for chat in chats)
    same = next((n for n, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), len(ids))
    if not same:
        raise RequestError("prefix put: the model's chat template begins with the user; leave --system out")
    return ids[:same]


def _profile(options: argparse.Namespace) -> None:
    sender, receiver = (
        _NamedModel(options.model, options.adapter),
        _NamedModel(options.receiver, options.receiver_adapter),
    )
    check_servable(options.receiver)
    with errors_as(options.file, RequestError, "name a text file in UTF-8"):
        text = read_bytes(options.file, _MOST_TEXT).decode("utf-8")
    ids, length = read_vocabulary(options.receiver, None).tokenizer.encode(text).ids, options.tokens + SUFFIX
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)][: options.items]
    if not rows:
        raise RequestError(f"{options.file} has {len(ids):,} tokens; a pair needs a text of {length:,} or more")
    (sender_model, whose), (other, reader) = sender.loaded(), receiver.loaded()
    check_compatible(whose, reader)
    if whose == reader:
        raise RequestError(
            "prefix profile: sender and receiver are one model, which takes its own prefixes as they are"
        )
    pair_profile = profile_pair(sender_model, other, rows, options.most_lost)
    write_profile(options.store, whose, reader, pair_profile)
    print(f"{reader} over what {whose} computed: {pair_profile}")
    if len(pair_profile.group) == pair_profile.layers:
        print("that is a prefill of its own, and nothing of this sender is taken; allow a larger --most-lost to")


def _list(options: argparse.Namespace) -> None:
    store = _open_store(options.store)
    for file in sorted(store.files, key=lambda file: file.path.stat().st_mtime_ns):
        entry = file.entry
        edges = f", hidden states at {', '.join(map(str, entry.edges))}" if entry.edges else ""
        print(
            f"{entry.key}: {entry.length:,} tokens, {file.nbytes / 1e6:.1f} MB, by {entry.model.anybody}"
            f"{_owned_by(entry.model.owner)}{edges}"
        )
    for (sender, receiver), pair_profile in read_profiles(options.store).items():
        print(f"{receiver} over what {sender} computed: {pair_profile}")


def _drop(options: argparse.Namespace) -> None:
    store = _open_store(options.store)
    for key in options.keys:
        store.drop(key)
        print(f"{key}: dropped")


def _open_store(folder: Path) -> KVStore:
    """Open the store in ``folder``. Raises CacheError for one that is not there: nothing is listed in a new one."""
    if not folder.is_dir():
        raise CacheError(f"there is no folder {folder}; `firsttoken prefix put` makes it")
    return KVStore(folder, memory_bytes=0, disk_bytes=sys.maxsize)


def _owned_by(owner: str) -> str:
    return f", of {owner}" if owner else ""
