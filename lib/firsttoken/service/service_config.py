"""What a service is told before it starts."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from firsttoken.engine.request_limits import BLOCK_TOKENS, POOL_TOKENS
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.parse_errors import blaming, read_bytes

KEY_VARIABLE = "FIRSTTOKEN_API_KEY"
STAGES, WHOLE = "a model in stages", "a model that is whole"
REFUSED = {
    ("--swarm", "--preemption"): "the keys and values are with its servers, and this process can swap none of them",
    ("--swarm", "--worker"): "its servers compute the blocks, and a worker would have none",
    ("--gbit-per-s", WHOLE): "only what `firsttoken stage` has written is read over a link",
}
"""Pairs of options that are not served together, and why; ``tests/service/test_pairs_of_options.py`` tries all."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ServiceConfig:
    """A model, the wire it comes over, how the engine shares itself, and the limits of the service.

    ``folder`` is a staged checkpoint or a plain Hugging Face folder. Each of the ``replicas`` loads it by itself, a
    staged one over a link of its own of ``gbit_per_s`` (0: unshaped) that ``threads`` readers share. Per replica
    ``max_running`` requests are in the engine's steps and ``max_waiting`` wait for that; one more is refused, and so
    are prompts and answers of more than ``max_model_len`` tokens together, prompts of more than ``max_prompt_tokens``,
    answers of more than ``max_new_tokens`` (None, of each: as many as the model's context and the KV pool have room
    for), more than ``max_choices`` answers to one request, and bodies that take longer than ``body_s`` seconds. A
    client that takes nothing of what is sent to it for ``stalled_s`` seconds has gone. When the service ends it takes
    nothing new, and what runs has ``grace_s`` seconds to end by itself.
    ``scheduler``, ``share_prefixes``, ``token_budget`` (None: its default) as of the engine's configuration, and
    ``preemption`` but for "cross_point", whose costs are this machine's: measured at the first start of a whole model,
    and at this one with ``measure_again``. ``kv_blocks`` None: as many as the limits ask for. ``prefix_store`` is a
    folder of KV files, of which those of everybody and of ``prefix_owner`` are read. ``variants`` (a name and a folder
    each) are LoRA adapters on the whole model, so on the last stage of a staged one; requests choose one by name. The
    replicas run on the Ray ``cluster`` at that address, or on this machine. With an ``api_key`` nobody else is served.

    With members of a ``swarm`` (HOST:PORT), blocks are on its servers and only the model's ends on the ``device`` here,
    which of a staged one are all that is read, over the link; who is silent for ``swarm_step_s`` seconds is replaced.
    ``swarm_token_file`` and ``swarm_tls_ca`` as the swarm's own commands have them. A share ``swarm_audit_rate`` of its
    servers' answers is audited (None: of no server), with the shares ``swarm_audit_undecided`` and
    ``swarm_audit_unwitnessed`` as those commands have them.

    With a ``worker`` the model computes in a process of its own, which is replaced where it dies or hangs. With
    ``torch_first`` no request is answered before torch is there, which is otherwise done where it can be.
    """

    folder: Path
    gbit_per_s: float = 0.0
    replicas: int = 1
    cluster: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "cpu"
    scheduler: str = "sarathi"
    preemption: str = "recompute"
    measure_again: bool = False
    share_prefixes: bool = False
    token_budget: int | None = None
    prefix_store: Path | None = None
    prefix_owner: str = ""
    variants: tuple[tuple[str, Path], ...] = ()
    kv_blocks: int | None = None
    max_running: int = 64
    max_waiting: int = 64
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_choices: int = 16
    body_s: float = 30.0
    stalled_s: float = 60.0
    grace_s: float = 0.0
    threads: int = 8
    api_key: str | None = field(default=None, repr=False)
    swarm: tuple[str, ...] = ()
    swarm_token_file: Path | None = None
    swarm_tls_ca: Path | None = None
    swarm_step_s: float = 5.0
    swarm_audit_rate: float | None = None
    swarm_audit_undecided: float = 0.5
    swarm_audit_unwitnessed: float = 1.0
    worker: bool = False
    torch_first: bool = False

    def __post_init__(self) -> None:
        lengths = ("max_model_len", "max_prompt_tokens", "max_new_tokens")
        for key in ("replicas", "max_running", *lengths, "max_choices", "threads"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise StageError(f"serve: {key} must be 1 or more, not {getattr(self, key)}")
        if self.prefix_owner and self.prefix_store is None:
            raise StageError("serve: --prefix-owner is for --prefix-store; add that, or leave it out")
        if self.measure_again and self.preemption != "cross_point":
            raise StageError("serve: --measure-again is for --preemption cross_point; add that, or leave it out")
        self.check_pairs()
        names = [self.model, *(name for name, _ in self.variants)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise StageError(f"serve: two models would be called {twice[0]!r}; give each --variant a name of its own")
        if odd := [name for name in names[1:] if not _NAME.fullmatch(name)]:
            raise StageError(f"serve: {odd[0][:80]!r} is no name; take up to 64 letters, digits, dots, dashes")
        if self.max_waiting < 0:
            raise StageError(f"serve: max_waiting must be 0 or more, not {self.max_waiting}")
        for key in ("body_s", "stalled_s", "swarm_step_s"):
            if not getattr(self, key) > 0:
                raise StageError(f"serve: {key} must be above 0, not {getattr(self, key)}")
        if not 0 <= self.grace_s < math.inf:
            raise StageError(f"serve: grace_s must be seconds, 0 or more, not {self.grace_s}")
        if not 1 <= self.port <= 65535:
            raise StageError(f"serve: the port must be 1 to 65535, not {self.port}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise StageError("serve: an API key is one line of printable ASCII; make another")

    def check_pairs(self, staged: bool | None = None) -> None:
        """Raises StageError for two options that cannot be served together; a model is ``staged``, or it is not known
        yet whether it is."""
        asked = {
            "--cluster": self.cluster is not None,
            "--device": self.device != "cpu",
            "--gbit-per-s": self.gbit_per_s > 0,
            "--preemption": self.preemption != "recompute",
            "--prefix-store": self.prefix_store is not None,
            "--replicas": self.replicas > 1,
            "--share-prefixes": self.share_prefixes,
            "--swarm": bool(self.swarm),
            "--variant": bool(self.variants),
            "--worker": self.worker,
            STAGES: staged is True,
            WHOLE: staged is False,
        }
        for (one, other), why in REFUSED.items():
            if asked[one] and asked[other]:
                raise StageError(f"serve: {one} does not go with {other}: {why}; leave one of them out")

    def max_len(self, context: int) -> int:
        """Tokens of a prompt and its answer together at most, for a model of a ``context`` of so many tokens.

        Where neither is limited, or only one of them, the other has what a pool of the usual size has room for.
        """
        wanted = self.max_model_len
        if wanted is None and (self.max_prompt_tokens or self.max_new_tokens):
            wanted = (self.max_prompt_tokens or POOL_TOKENS) + (self.max_new_tokens or POOL_TOKENS)
        room = sys.maxsize if self.kv_blocks is None else self.kv_blocks * BLOCK_TOKENS
        return min(context, wanted or POOL_TOKENS, room)

    @property
    def model(self) -> str:
        """The name that clients know the model by: that of its folder."""
        return self.folder.resolve().name

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"


def read_key(file: Path | None) -> str | None:
    """The API key in ``file``, or without one that of the environment; None: no key is asked for.

    Raises StageError for a file that cannot be read.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    with blaming(file, StageError, "put the API key there, on one line"):
        return read_bytes(file, 4096).decode("utf-8").strip()


@contextmanager
def listening(config: ServiceConfig) -> Iterator[socket.socket]:
    """A socket on the port of ``config``. Raises StageError for one that cannot be had.

    What is sent and not taken for ``stalled_s`` ends its connection, by the kernel and where it can: a client that
    reads nothing holds no place for longer.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise StageError(f"cannot listen on {config.host}:{config.port} ({error.strerror}): choose --port") from error
    with listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * config.stalled_s))
        yield listener
