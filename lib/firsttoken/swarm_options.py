"""The options of ``firsttoken swarm``."""

from __future__ import annotations

import argparse
from pathlib import Path

from firsttoken import option_values

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
