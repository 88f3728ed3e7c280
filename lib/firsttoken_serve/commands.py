"""The commands serve, prefix and swarm: each imports what it needs, so that ``serve`` listens before torch is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from firsttoken.study import extensions
from firsttoken.study import option_values as values
from firsttoken.study.dtypes import AUTO, DTYPES
from firsttoken.study.machine import kernels_multiply
from firsttoken.study.system.importing import without_collector
from firsttoken.study.system.openmp import set_wait_policy
from firsttoken.terminal import check_clone
from firsttoken_serve.service_config import ELSEWHERE, HELP, ServiceConfig

OK = 0

_SERVE = "Serve a model over HTTP by OpenAI's protocol, while its weights still arrive (needs the extra serve)."
_PREFIX = "Store what a model computes for a text, so that it and others of its shape need not (DroidSpeak)."
_INT8 = "Write a copy of a model whose blocks are stored in 8 bits. Servers and clients then take it as their --model."


def serve(options: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C; return the exit status."""
    with without_collector():
        from firsttoken.assets.checkpoint import hub_folder
        from firsttoken_serve.http.launch import serve_forever
        from firsttoken_serve.service_config import read_key

    if options.folder is None:
        check_clone("`firsttoken serve` without a FOLDER")
        from firsttoken.assets.gguf import PINNED, converted

        options.folder = converted(PINNED, hashed=False)
    else:
        options.folder = hub_folder(options.folder)
    given = {"folder": options.folder, "api_key": read_key(options.api_key_file)}
    serve_forever(values.configured(ServiceConfig, options, **given))
    return OK


def swarm(options: argparse.Namespace) -> int:
    """Serve blocks of a model, or use and list the servers that do."""
    set_wait_policy(kernels_multiply())
    from firsttoken_serve.swarm.swarm_actions import run

    run(options)
    return OK


def prefix(options: argparse.Namespace) -> int:
    """Store what models compute for texts, for services to take."""
    from firsttoken_serve.prefixes.prefix_actions import run

    run(options)
    return OK


COMMANDS = (serve, prefix, swarm)
ANYWHERE, OWN_ENDS = ("serve", "prefix", "swarm"), ("serve", "swarm")


def add_options(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands of the server, each by ``command``, which makes its parser."""
    serve = command("serve", _SERVE)
    description = (
        "what `firsttoken stage` wrote, a Hugging Face folder of a Llama-like model, or ORG/NAME of one that"
        " `hf download ORG/NAME` has brought to this machine (default: SmolLM2)"
    )
    serve.add_argument("folder", type=values.folder, nargs="?", metavar="FOLDER", help=description)
    keys = "a file with the key that clients must send (default: the variable FIRSTTOKEN_API_KEY, or no key)"
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)
    values.add_fields(serve, ServiceConfig, HELP)
    serve.set_defaults(grace_s=30.0)
    serve.elsewhere = ELSEWHERE
    _add_prefix_options(command("prefix", _PREFIX))
    _add_swarm_options(
        command("swarm", "Run a model over several servers that hold its blocks (needs the extra swarm).")
    )


def _add_swarm_options(swarm: argparse.ArgumentParser) -> None:
    """Add what ``firsttoken swarm`` can do, each action with its options; the choice is ``action``."""
    actions = swarm.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        folder = "the model's folder, with config.json and *.safetensors; all members of a swarm have the same files"
        added.add_argument("--model", type=values.folder, required=True, metavar="FOLDER", help=folder)
        numbers = "the number format to compute in (default: auto, which is what this machine is fastest in)"
        added.add_argument("--dtype", choices=(AUTO, *DTYPES), default=AUTO, help=numbers)
        added.add_argument("--token-file", type=Path, metavar="FILE", help=HELP["swarm_token_file"])
        added.add_argument("--tls-ca", type=Path, metavar="FILE", help=HELP["swarm_tls_ca"])
        return added

    serve = action("serve", "Serve some blocks (decoder layers) of a model until Ctrl-C.")
    blocks = "the blocks to serve: 0:15 is blocks 0 to 14; auto takes those that the swarm serves least"
    serve.add_argument("--blocks", required=True, metavar="A:B", help=blocks)
    count = "with --blocks auto, the number of blocks to serve (default: all)"
    serve.add_argument("--count", type=values.whole(1, 1000), metavar="N", help=count)
    at_most_a_day = values.above_zero(86_400)
    often = "with --blocks auto, how often the server checks whether the swarm gains if it takes other blocks"
    often += " (default: 120)"
    serve.add_argument("--rebalance-s", type=at_most_a_day, default=120, metavar="SECONDS", help=often)
    serve.add_argument(
        "--rebalance-by",
        choices=("paper", *extensions.registered("REBALANCING")),
        default="paper",
        help="the rule of that check: paper moves a server when the swarm would then gain a third; fewest-moves plans"
        " the fewest moves that gain a fiftieth, and moves only the servers in that plan (default: paper)",
    )
    registry_help = (
        "a server that is in the swarm already, such as 127.0.0.1:4000; may be repeated. Without it a new swarm begins"
    )
    serve.add_argument("--registry", action="append", default=[], metavar="HOST:PORT", help=registry_help)
    serve.add_argument("--host", type=values.host, default="127.0.0.1", help=HELP["host"])
    port, any_port = values.whole(0, 65535), "the port to listen on (default: 0, any free port)"
    serve.add_argument("--port", type=port, default=0, help=any_port)
    address_help = "the address by which others reach this server, where it differs from the one that it listens on"
    serve.add_argument("--address", default="", metavar="HOST:PORT", help=address_help)
    key = "the file of this server's private key; it is made if it does not exist (default: a new key at each start)"
    serve.add_argument("--key", type=Path, metavar="FILE", help=key)
    variant = "also compute the blocks with this LoRA adapter, for clients that ask for it; may be repeated"
    serve.add_argument(
        "--variant", type=values.named_folder, action="append", default=[], metavar="NAME=DIR", help=variant
    )
    train = "also answer the forward and backward passes of clients that train; the blocks themselves never change"
    serve.add_argument("--train", action="store_true", help=train)
    threads = "the number of threads to compute with (default: 0, one for each core)"
    serve.add_argument("--threads", type=values.whole(0, 1024), default=0, metavar="N", help=threads)
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="this server's certificate, a PEM file")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="the private key of that certificate, a PEM file")
    kv, room = values.whole(16, 10**8), "how many tokens of KV cache all sessions share (default: 16384)"
    serve.add_argument("--kv-tokens", type=kv, default=16384, metavar="N", help=room)
    gone = "others forget a server that has said nothing for this many seconds (default: 30)"
    serve.add_argument("--expiry-s", type=values.whole(1, 300), default=30, metavar="SECONDS", help=gone)

    int8 = actions.add_parser("int8", help=_INT8, description=_INT8)
    int8.add_argument("--model", type=values.folder, required=True, metavar="FOLDER", help="the model's folder")
    int8.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new folder for the copy")

    generate = action("generate", "Let a swarm continue a text, and print the continuation.")
    generate.add_argument("prompt", help="the text to continue, such as 'The capital of France is'")
    listed = action("list", "Print which server of a swarm has which blocks of a model.")
    for added in (generate, listed):
        registry_help = "a server of the swarm, such as 127.0.0.1:4000; may be repeated"
        added.add_argument("--registry", action="append", required=True, metavar="HOST:PORT", help=registry_help)
    most = "the most tokens to generate (default: 32)"
    generate.add_argument("--max-tokens", type=values.whole(1, 100_000), default=32, metavar="N", help=most)
    sent = "the number format in which hidden states are sent (default: that of --dtype)"
    generate.add_argument("--coding", choices=(*DTYPES, "int8"), default="", help=sent)
    silent = HELP["swarm_step_s"]
    generate.add_argument("--step-s", type=values.whole(1, 3600), default=5, metavar="SECONDS", help=silent)
    share = values.above_zero(1)
    generate.add_argument("--audit-rate", type=share, metavar="SHARE", help=HELP["swarm_audit_rate"])


def _add_prefix_options(prefix: argparse.ArgumentParser) -> None:
    """Add what ``firsttoken prefix`` can do, each action with its options; the choice is ``action``."""
    actions = prefix.add_subparsers(required=True, metavar="ACTION", dest="action")
    folder, model = values.folder, "the model that computes it, a folder as `firsttoken serve` takes one"
    adapted = "a LoRA adapter on that model, a folder as PEFT writes it (default: none)"

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        store = "the folder of stored prefixes, which `firsttoken serve --prefix-store` reads"
        added.add_argument("store", type=folder, metavar="STORE", help=store)
        return added

    put = action("put", "Compute a text by a model, and store its keys and values for prompts that begin with it.")
    put.add_argument("text", nargs="?", metavar="TEXT", help="what prompts begin with")
    put.add_argument("--file", type=Path, metavar="FILE", help="read the text from this file")
    put.add_argument("--system", action="store_true", help="the text is what a chat's system message says")
    put.add_argument("--model", type=folder, required=True, metavar="FOLDER", help=model)
    put.add_argument("--adapter", type=folder, metavar="DIR", help=adapted)
    whose = "who alone may read it: services with this --prefix-owner (default: everybody)"
    put.add_argument("--owner", type=values.owner, default="", metavar="NAME", help=whose)
    layer = "store the hidden states before this layer, too; may be repeated (default: where profiled pairs begin)"
    put.add_argument("--edge", type=values.whole(0, 1000), action="append", default=[], metavar="N", help=layer)
    size = "the most that the store may hold, in GB (default: 10)"
    put.add_argument("--most-gb", type=values.above_zero(1e6), default=10.0, metavar="GB", help=size)

    profile = action("profile", "Find which layers a model computes again over what another of its shape computed.")
    profile.add_argument("--model", type=folder, required=True, metavar="FOLDER", help=model)
    profile.add_argument("--adapter", type=folder, metavar="DIR", help=adapted)
    profile.add_argument("--receiver", type=folder, required=True, metavar="FOLDER", help="the model that takes it")
    profile.add_argument("--receiver-adapter", type=folder, metavar="DIR", help="a LoRA adapter on the receiver")
    profile.add_argument("--file", type=Path, required=True, metavar="FILE", help="a text of the kind that is served")
    count = "the most pieces of the text that are tried (default: 16)"
    profile.add_argument("--items", type=values.whole(1, 10_000), default=16, metavar="N", help=count)
    length = "the tokens of the prefix of a piece (default: 256)"
    profile.add_argument("--tokens", type=values.whole(1, 100_000), default=256, metavar="N", help=length)
    lost = "the share of the receiver's next tokens that may become others (default: 0.05)"
    profile.add_argument("--most-lost", type=values.above_zero(1), default=0.05, metavar="SHARE", help=lost)

    action("list", "Print what is stored, least recently used first, and which pairs are profiled.")
    drop = action("drop", "Remove stored prefixes. Who reads one at that moment has all of it.")
    drop.add_argument("keys", nargs="+", metavar="KEY", help="the prefixes, as `firsttoken prefix list` names them")
