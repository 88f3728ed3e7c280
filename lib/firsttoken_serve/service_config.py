"""What a service is told before it starts."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from firsttoken.assets.model_config import public_name
from firsttoken.engine.request_limits import BLOCK_TOKENS, POOL_TOKENS
from firsttoken.study import option_values as values
from firsttoken.study.errors import StageError
from firsttoken.study.option_values import option
from firsttoken.study.parsing.parse_errors import errors_as, read_bytes

KEY_VARIABLE = "FIRSTTOKEN_API_KEY"
STAGES, WHOLE = "a model in stages", "a model that is whole"
REFUSED = {
    ("--swarm", "--preemption"): "the keys and values are with its servers, and this process can swap none of them",
    ("--swarm", "--share-prefixes"): "the keys and values are with its servers, and each session has its own",
    ("--swarm", "--prefix-store"): "the keys and values are with its servers, which compute those of every prompt",
    ("--swarm", "--gbit-per-s"): "the layers stay with its servers, and the rest is read from this disk",
    ("--gbit-per-s", WHOLE): "only what `firsttoken stage` has written is read over a link",
}
"""Pairs of options that are not served together, and why; ``tests/serve/test_pairs_of_options.py`` tries all."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)

ENGINE, LIMITS = "the engine", "limits"
SWARM = "a model whose blocks a swarm computes (see `firsttoken swarm`)"
_COUNT, _LENGTH, _SHARE = values.whole(1, 10**8), "as far as the KV cache has room", values.above_zero(1)
HELP = {
    "gbit_per_s": "read the weights over a link of this rate in Gbit/s, such as 0.1 (default: 0, as fast as the disk)",
    "replicas": "how many copies of the model serve side by side; more than 1 run behind Ray Serve (default: 1)",
    "host": "the address to listen on; 0.0.0.0 is every address of this machine (default: 127.0.0.1, this machine"
    " only)",
    "port": "the port to listen on (default: 8000)",
    "device": "the device that computes: cpu, cuda or cuda:1 (default: cpu)",
    "torch_first": "answer nothing before torch is imported. Without this option, requests without"
    " logprobs for a model on a CPU, or for its first stage, are answered by numpy and the engine's compiled kernels"
    " until then, and the engine goes on with them",
    "scheduler": "the policy that chooses the requests of each step: request_level, iteration_level, prefill_first,"
    " sarathi, chunked_only, hybrid_only, prefill_cap, deadline, adaptive_budget, shortest_first (default: sarathi)",
    "token_budget": "with a scheduler that cuts prompts, the most tokens of a step; at least --max-running (default:"
    " 512)",
    "preemption": "how a preempted request gets its cache back: recompute, swap or online (whichever is cheaper"
    " for its length, as is learnt while serving) (default: recompute)",
    "share_prefixes": "let prompts that begin alike share KV blocks (default: they do not)",
    "prefix_store": "reuse keys and values of how prompts begin from this folder, which `firsttoken prefix put` has"
    " written",
    "prefix_owner": "with --prefix-store, read what is stored under this name, too (default: what is stored for"
    " everybody)",
    "variants": "serve a LoRA adapter on the model, too, from a folder as PEFT writes it; requests name it as their"
    " model. May be repeated: the weights are there once, and requests of all share steps",
    "kv_blocks": "the size of the KV cache in blocks of 16 tokens, such as 1024 (default: as many as the limits below"
    " need)",
    "max_model_len": f"the most tokens of a prompt with its answer (default: the model's context, {_LENGTH})",
    "max_prompt_tokens": f"the most tokens of a prompt (default: the model's context, {_LENGTH})",
    "max_new_tokens": f"the most tokens of an answer (default: the model's context, {_LENGTH})",
    "max_running": "the most requests that are computed at once (default: 64)",
    "max_waiting": "the most requests that wait for their turn; further ones are refused with status 429 (default: 64)",
    "grace_s": "how long running answers may go on after Ctrl-C or SIGTERM (default: 30)",
    "swarm": "a server of the swarm, such as 127.0.0.1:4000; may be repeated. Only embeddings and head are loaded here",
    "swarm_token_file": "a file with the secret text that all members of the swarm share (default: none)",
    "swarm_tls_ca": "a PEM file with the certificate by which servers on other machines are recognised (default: none)",
    "swarm_step_s": "replace a server that has not answered a step for this many seconds (default: 5)",
    "swarm_audit_rate": "the share of answers that another server computes again to find false ones, such as 0.05;"
    " where two differ, the server that was named first judges which one is false (default: none)",
}
"""What the command line says of each option; the options of a swarm are those of ``firsttoken swarm`` as well."""

_ELSEWHERE = {
    "--served-model-name --alias -a": "a model is called as its folder: rename that, or serve a link to it",
    "--model --model-path -m": "the folder stands by itself: `firsttoken serve FOLDER`",
    "--hf-repo -hf --hf-file": "download it first: `hf download ORG/NAME`, then `firsttoken serve ORG/NAME`",
    "--dtype --quantization": (
        "a model is served in the number format of its weights, or in float32 where that is faster here: leave it out"
    ),
    "--kv-cache-dtype": "the KV cache has the number format of the model: leave it out",
    "--max-num-seqs --parallel -np": "--max-running",
    "--max-num-batched-tokens --batch-size --chunked-prefill-size": "--token-budget",
    "--enable-chunked-prefill": "prompts are computed in chunks unless another --scheduler is chosen: leave it out",
    "--enable-prefix-caching": "--share-prefixes",
    "--enable-lora --lora-modules --lora --lora-paths": "--variant NAME=DIR",
    "--api-key": "others can read a command line: name a file by --api-key-file, or set FIRSTTOKEN_API_KEY",
    "--ctx-size -c --context-length": "--max-model-len",
    "--n-predict -n": "--max-new-tokens",
    "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --num-gpu-blocks-override": "--kv-blocks",
    "--swap-space": "--preemption swap",
    "--scheduling-policy --schedule-policy": "--scheduler",
    "--data-parallel-size -dp": "--replicas",
    "--tensor-parallel-size -tp --pipeline-parallel-size -pp": (
        "a model is computed on one device here: --replicas N serves copies, `firsttoken swarm` holds blocks apart"
    ),
    "--n-gpu-layers -ngl": "--device cuda",
    "--threads -t": "the variable OMP_NUM_THREADS says how many threads compute",
    "--tokenizer": "the tokenizer is the one in the model's folder: put it there",
    "--chat-template": "the chat template is the one in the model's folder: put it there as chat_template.jinja",
    "--trust-remote-code": "no code in a model's folder is run: leave it out",
    "--enforce-eager": "no graphs are captured: leave it out",
    "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file": (
        "the service speaks HTTP: let a proxy in front of it end TLS"
    ),
    "--uvicorn-log-level --log-level --verbose -v": "what the service has to say is what it says: leave it out",
    "--config": "there is no file of options: give them on the command line",
    "--seed": "each request may have a seed of its own: leave it out",
}
ELSEWHERE = {name: instead for names, instead in _ELSEWHERE.items() for name in names.split()}
"""What options are called by vLLM, SGLang and llama.cpp, and by what name, or how, the same is had here."""


@dataclass(frozen=True)
class ServiceConfig:
    """A model, the wire it comes over, how the engine shares itself, and the limits of the service.

    ``HELP`` says what each option is. ``folder`` is a staged checkpoint or a plain Hugging Face folder. Each of the
    ``replicas`` loads it by itself, a staged one over a link of its own that ``threads`` readers share. ``max_running``
    and ``max_waiting`` are of each replica. Where a length is None, it is as many tokens as the model's context and the
    KV pool have room for. Refused are prompts and answers that are longer, more than ``max_choices`` answers to one
    request, and bodies that take longer than ``body_s`` seconds. A client that takes nothing of what is sent to it for
    ``stalled_s`` seconds has gone. When the service ends it takes nothing new, and what runs has ``grace_s`` seconds to
    end by itself. ``scheduler``, ``share_prefixes``, ``token_budget`` (None: its default) as of the engine's
    configuration, and ``preemption`` "recompute", "swap" or "online". ``variants`` (a name and a folder each) are LoRA
    adapters on the whole model, so on the last stage of a staged one. With an ``api_key`` nobody else is served.

    With members of a ``swarm`` (HOST:PORT), blocks are on its servers and only the model's ends on the ``device`` here.
    Without a ``swarm_audit_rate`` no server is audited.
    With ``torch_first`` no request is answered before torch is there, which is otherwise done where it can be.
    """

    folder: Path
    gbit_per_s: float = option(0.0, values.rate, "RATE")
    replicas: int = option(1, values.whole(1, 64), "N")
    host: str = option("127.0.0.1", values.host)
    port: int = option(8000, values.whole(0, 65535))
    device: str = option("cpu")
    torch_first: bool = option(False)
    scheduler: str = option("sarathi", metavar="NAME", group=ENGINE)
    token_budget: int | None = option(None, _COUNT, "N", group=ENGINE)
    preemption: str = option("recompute", metavar="NAME", group=ENGINE)
    share_prefixes: bool = option(False, group=ENGINE)
    prefix_store: Path | None = option(None, values.folder, "DIR", group=ENGINE)
    prefix_owner: str = option("", values.owner, "NAME", group=ENGINE)
    variants: tuple[tuple[str, Path], ...] = option((), values.named_folder, "NAME=DIR", group=ENGINE, flag="--variant")
    kv_blocks: int | None = option(None, _COUNT, "N", group=ENGINE)
    max_model_len: int | None = option(None, _COUNT, "N", group=LIMITS)
    max_prompt_tokens: int | None = option(None, _COUNT, "N", group=LIMITS)
    max_new_tokens: int | None = option(None, _COUNT, "N", group=LIMITS)
    max_running: int = option(64, values.whole(1, 4096), "N", group=LIMITS)
    max_waiting: int = option(64, values.whole(0, 10**6), "N", group=LIMITS)
    grace_s: float = option(0.0, values.seconds, "SECONDS", group=LIMITS)
    swarm: tuple[str, ...] = option((), metavar="HOST:PORT", group=SWARM)
    swarm_token_file: Path | None = option(None, Path, "FILE", group=SWARM)
    swarm_tls_ca: Path | None = option(None, Path, "FILE", group=SWARM)
    swarm_step_s: float = option(5.0, values.whole(1, 3600), "SECONDS", group=SWARM)
    swarm_audit_rate: float | None = option(None, _SHARE, "SHARE", group=SWARM)
    max_choices: int = 16
    body_s: float = 30.0
    stalled_s: float = 60.0
    threads: int = 8
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        lengths = ("max_model_len", "max_prompt_tokens", "max_new_tokens")
        for key in ("replicas", "max_running", *lengths, "max_choices", "threads"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise StageError(f"serve: {key} must be 1 or more, not {getattr(self, key)}")
        if self.prefix_owner and self.prefix_store is None:
            raise StageError("serve: --prefix-owner is for --prefix-store; add that, or leave it out")
        self.check_pairs()
        names = [self.model, *(name for name, _ in self.variants)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise StageError(f"serve: two models would be called {twice[0]!r}; give each --variant a name of its own")
        if bad_names := [name for name in names[1:] if not _NAME.fullmatch(name)]:
            raise StageError(f"serve: {bad_names[0][:80]!r} is no name; take up to 64 letters, digits, dots, dashes")
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
        set_options = {
            "--device": self.device != "cpu",
            "--gbit-per-s": self.gbit_per_s > 0,
            "--preemption": self.preemption != "recompute",
            "--prefix-store": self.prefix_store is not None,
            "--replicas": self.replicas > 1,
            "--share-prefixes": self.share_prefixes,
            "--swarm": bool(self.swarm),
            "--variant": bool(self.variants),
            STAGES: staged is True,
            WHOLE: staged is False,
        }
        for (first, other), why in REFUSED.items():
            if set_options[first] and set_options[other]:
                raise StageError(f"serve: {first} does not go with {other}: {why}; leave one of them out")

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
        """The name that clients know the model by: that of its folder, or on the Hub."""
        return public_name(self.folder.resolve())

    @property
    def one_process(self) -> bool:
        """Return whether this process serves, and not Ray."""
        return self.replicas == 1

    @property
    def address(self) -> str:
        """HOST:PORT, as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The service's address for a browser."""
        return f"http://{self.address}"

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can connect."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def read_key(file: Path | None) -> str | None:
    """The API key in ``file``, or without one that of the environment; None: no key is asked for.

    Raises StageError for a file that cannot be read.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    with errors_as(file, StageError, "put the API key there, on one line"):
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
        raise StageError(f"cannot listen on {config.address} ({error.strerror}): choose --port") from error
    with listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * config.stalled_s))
        yield listener
