"""The options of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from firsttoken import __version__, option_values
from firsttoken.study.extensions import commands as commands_of_extensions

# The options of ``firsttoken swarm``.

_INT8 = "Write a copy of a model whose blocks rest in 8 bits, for servers and clients to be given as --model."


def add_client_options(serve: argparse.ArgumentParser) -> None:
    """What ``firsttoken serve`` is told of a swarm that has the model's blocks."""
    serve.add_argument(
        "--swarm",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a server of a swarm that has the model's blocks, may be repeated: only its ends are loaded here",
    )
    serve.add_argument("--swarm-token-file", type=Path, metavar="FILE", help="a file with the swarm's token")
    serve.add_argument(
        "--swarm-tls-ca", type=Path, metavar="FILE", help="the certificate (PEM) that the swarm's servers are known by"
    )
    serve.add_argument(
        "--swarm-step-s",
        type=option_values.whole(1, 3600),
        default=5,
        metavar="S",
        help="seconds after which a server of the swarm that is silent is replaced (default: 5)",
    )
    _add_audits(serve, "--swarm-", "--swarm")


def add_options(swarm: argparse.ArgumentParser) -> None:
    """What ``firsttoken swarm`` can do, each with its options; the choice is ``action``."""
    actions = swarm.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        added.add_argument(
            "--model", type=option_values.folder, required=True, metavar="FOLDER", help="config.json and *.safetensors"
        )
        added.add_argument(
            "--dtype",
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="what to compute in (default: what this machine is fastest in)",
        )
        added.add_argument("--token-file", type=Path, help="a file with the swarm's token")
        added.add_argument(
            "--tls-ca", type=Path, help="the certificate (PEM) that servers on other machines are known by"
        )
        return added

    serve = action("serve", "Serve some blocks of a model until Ctrl-C.")
    serve.add_argument("--blocks", required=True, help="a:b for blocks a to b - 1, or auto for those served least")
    serve.add_argument("--count", type=option_values.whole(1, 1000), help="how many blocks auto takes (default: all)")
    serve.add_argument(
        "--rebalance-s",
        type=option_values.above_zero(86_400),
        default=120,
        metavar="S",
        help="seconds between two looks whether the swarm gains by auto's taking other blocks (default: 120)",
    )
    serve.add_argument(
        "--rebalance-by",
        choices=("paper", "fewest-moves"),
        default="paper",
        help="who goes: whoever looks first, where the swarm gains a third (paper, the default), or those of the fewest"
        " moves that bring it near to what it could be, where it gains a fiftieth",
    )
    serve.add_argument(
        "--registry",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a server of the swarm, may be repeated; none begins one",
    )
    serve.add_argument(
        "--host", type=option_values.host, default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    serve.add_argument("--port", type=option_values.whole(0, 65535), default=0, help="port to listen on (default: any)")
    serve.add_argument(
        "--address", default="", metavar="HOST:PORT", help="what others are told (default: where it listens)"
    )
    serve.add_argument(
        "--key", type=Path, help="the file of this server's key, made where there is none (default: a new key)"
    )
    serve.add_argument(
        "--servers",
        type=option_values.whole(1, 64),
        default=1,
        help="more than 1: so many, each in a process of Ray (needs firsttoken[serve]; not with --port and such)",
    )
    serve.add_argument(
        "--cluster",
        metavar="HOST:PORT",
        help="let a Ray cluster that runs there carry them; each finds the files under the same paths",
    )
    serve.add_argument("--train", action="store_true", help="answer passes of training, too (the blocks stay frozen)")
    serve.add_argument(
        "--threads",
        type=option_values.whole(0, 1024),
        default=0,
        help="threads to compute with (default: one for each core)",
    )
    serve.add_argument("--tls-cert", type=Path, help="this server's certificate (PEM)")
    serve.add_argument("--tls-key", type=Path, help="its private key (PEM)")
    serve.add_argument(
        "--kv-tokens",
        type=option_values.whole(16, 100_000_000),
        default=16384,
        help="tokens of all sessions together (default: 16384)",
    )
    serve.add_argument(
        "--expiry-s",
        type=option_values.whole(1, 300),
        default=30,
        help="seconds until a server that is gone is forgotten (default: 30)",
    )

    rest = actions.add_parser("int8", help=_INT8, description=_INT8)
    rest.add_argument("--model", type=option_values.folder, required=True, metavar="FOLDER", help="the model")
    rest.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the copy goes")

    generate = action("generate", "Let a swarm continue a text.")
    generate.add_argument("prompt", help="the text")
    listed = action("list", "Print who serves which blocks of a model.")
    for added in (generate, listed):
        added.add_argument(
            "--registry",
            action="append",
            required=True,
            metavar="HOST:PORT",
            help="a server of the swarm, may be repeated",
        )
    generate.add_argument(
        "--max-tokens", type=option_values.whole(1, 100_000), default=32, help="new tokens (default: 32)"
    )
    generate.add_argument(
        "--coding",
        choices=("float32", "bfloat16", "float16", "int8"),
        default="",
        help="what hidden states travel in (default: what is computed in)",
    )
    generate.add_argument(
        "--step-s",
        type=option_values.whole(1, 3600),
        default=5,
        help="seconds after which a server that is silent is replaced (default: 5)",
    )
    _add_audits(generate, "--", "--registry")


def _add_audits(added: argparse.ArgumentParser, prefix: str, first: str) -> None:
    added.add_argument(
        f"{prefix}audit-rate",
        type=option_values.above_zero(1),
        metavar="SHARE",
        help=f"the share of answers that other servers compute again; the first {first} judges who lied",
    )
    added.add_argument(
        f"{prefix}audit-undecided",
        type=option_values.above_zero(1),
        default=0.5,
        metavar="SHARE",
        help="the share of a server's audits that may find a difference and nobody guilty, until it is left, or the"
        " answer ends (default: 0.5)",
    )
    added.add_argument(
        f"{prefix}audit-unwitnessed",
        type=option_values.above_zero(1),
        default=1.0,
        metavar="SHARE",
        help="the share of a server's audits for which nobody else may have its blocks, until it is left, or the answer"
        " ends (default: 1, never)",
    )


Command = Callable[[argparse.Namespace], int]

EXTENSIONS = commands_of_extensions()  # packages of their own: the library serves without them, and imports none


def parser(commands: Iterable[Command]) -> argparse.ArgumentParser:
    """Return the program's parser; the command that was chosen is ``command`` of what it parses."""
    known, made = {function.__name__: function for function in commands}, dict[str, argparse.ArgumentParser]()
    parser = argparse.ArgumentParser(prog="firsttoken", description="Attacks on the time to the first token, compared.")
    parser.add_argument("--version", action="version", version=f"firsttoken {__version__}")
    added_to = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made[name] = added = added_to.add_parser(name, help=text, description=text)
        added.set_defaults(command=known[name])
        return added

    for extension in EXTENSIONS:
        extension.add_options(command)

    added = command("fetch", "Bring the pinned model and texts, or what a page of the site runs on, into the cache.")
    added.add_argument("names", nargs="*", metavar="ASSET", help="which assets (default: all that studies need)")
    added.add_argument(
        "--from",
        dest="from_dir",
        type=option_values.folder,
        metavar="DIR",
        help="take the wheels from a folder, and the files of env/brought.yaml that it has",
    )
    added.add_argument("--list", action="store_true", help="list the assets, their sizes and what is missing")

    added = command("stage", "Write a model in stages: served from the first one, whole after the last.")
    added.add_argument("folder", type=option_values.folder, help="the folder to write")
    option_values.add_profile(added)
    option_values.add_setting(added)
    added.add_argument("--adapters", default="", help="ours, report or none (default: the profile's best)")
    added.set_defaults(make_plan=lambda options, profile: None)

    added = command("serve", "Serve a model over HTTP, OpenAI's interface, while it arrives (needs firsttoken[serve]).")
    added.add_argument(
        "folder",
        type=option_values.folder,
        nargs="?",
        help="what `firsttoken stage` wrote, or any Llama-like Hugging Face folder (default: the pinned model)",
    )
    added.add_argument(
        "--gbit-per-s", type=option_values.rate, default=0.0, help="rate of the link to the weights (default: all)"
    )
    added.add_argument(
        "--replicas",
        type=option_values.whole(1, 64),
        default=1,
        help="more than 1: so many processes behind Ray Serve",
    )
    added.add_argument(
        "--cluster",
        metavar="HOST:PORT",
        help="let a Ray cluster that runs there carry the replicas, which find the folder under the same path",
    )
    added.add_argument(
        "--host", type=option_values.host, default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    added.add_argument(
        "--port", type=option_values.whole(0, 65535), default=8000, help="port to listen on (default: 8000)"
    )
    added.add_argument("--device", default="cpu", help="where the model computes: cpu, cuda, cuda:1 (default: cpu)")
    added.add_argument(
        "--scheduler", default="sarathi", help="who runs in a step (default: sarathi, which stalls nobody)"
    )
    added.add_argument(
        "--token-budget",
        type=option_values.whole(1, 10**8),
        metavar="N",
        help="tokens of a step at most, of a scheduler that cuts prompts; at least --max-running (default: 512)",
    )
    added.add_argument(
        "--preemption",
        default="recompute",
        help="how a preempted request comes back: recompute, swap, cross_point or online (default: recompute)",
    )
    added.add_argument("--share-prefixes", action="store_true", help="prompts that begin alike share KV blocks")
    added.add_argument(
        "--prefix-store",
        type=option_values.folder,
        metavar="DIR",
        help="keys and values of prefixes that the whole model has computed before, as kvreuse's KVStore keeps them",
    )
    added.add_argument(
        "--kv-blocks",
        type=option_values.whole(1, 10**8),
        metavar="N",
        help="KV blocks of 16 tokens (default: what the limits ask for)",
    )
    lengths = (
        ("--max-model-len", "tokens of a prompt and its answer together"),
        ("--max-prompt-tokens", "tokens of a prompt"),
        ("--max-new-tokens", "tokens of an answer"),
    )
    for name, what in lengths:
        most = "at most (default: the model's context, as far as the KV pool has room)"
        added.add_argument(name, type=option_values.whole(1, 10**8), metavar="N", help=f"{what} {most}")
    added.add_argument(
        "--max-running",
        type=option_values.whole(1, 4096),
        default=64,
        metavar="N",
        help="requests in a step at once (default: 64)",
    )
    added.add_argument(
        "--grace-s",
        type=option_values.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long answers that run may go on when the service is told to end (default: 30)",
    )
    added.add_argument(
        "--max-waiting",
        type=option_values.whole(0, 10**6),
        default=64,
        metavar="N",
        help="requests that may wait for that; one more is refused (default: 64)",
    )
    added.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="holds the key that clients must send (default: that of FIRSTTOKEN_API_KEY, or none)",
    )

    added.add_argument(
        "--worker", action="store_true", help="the model in a process of its own, replaced where it dies or hangs"
    )
    add_client_options(added)

    add_options(command("swarm", "Run a model over servers of its blocks (needs firsttoken[swarm])."))

    for extension in EXTENSIONS:
        for name, add in getattr(extension, "MORE_OPTIONS", {}).items():
            add(made[name])
    return parser
