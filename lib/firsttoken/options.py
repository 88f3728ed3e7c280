"""The options of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from firsttoken import __version__, option_values
from firsttoken.study import extensions

_WHAT = (
    "Five research reports on serving language models: their figures, their measurements and a server, on one machine."
)
_FIRST = "Begin with `firsttoken doctor` and `firsttoken run --only 01`. Each command has a --help of its own."
_SERVE = "Serve a model over HTTP by OpenAI's protocol, while its weights still arrive (needs firsttoken[serve])."
_PREFIX = "Store what a model computes for a text, so that it and others of its shape need not (DroidSpeak)."
_INT8 = "Write a copy of a model whose blocks are stored in 8 bits. Servers and clients then take it as their --model."
_TOKEN = "a file with the secret text that all members of the swarm share (default: none)"
_CA = "a PEM file with the certificate by which servers on other machines are recognised (default: none)"
_SILENT = "replace a server that has not answered a step for this many seconds (default: 5)"
_CLUSTER = "run them on the Ray cluster at this address, such as 10.0.0.1:6379 (default: on this machine)"
_LOOPBACK = "the address to listen on; 0.0.0.0 is every address of this machine (default: 127.0.0.1, this machine only)"


def add_client_options(serve: argparse.ArgumentParser) -> None:
    """Add what ``firsttoken serve`` is told of a swarm that has the model's blocks."""
    swarm = serve.add_argument_group("a model whose blocks a swarm computes (see `firsttoken swarm`)")
    named = "a server of the swarm, such as 127.0.0.1:4000; may be repeated. Only embeddings and head are loaded here"
    swarm.add_argument("--swarm", action="append", default=[], metavar="HOST:PORT", help=named)
    swarm.add_argument("--swarm-token-file", type=Path, metavar="FILE", help=_TOKEN)
    swarm.add_argument("--swarm-tls-ca", type=Path, metavar="FILE", help=_CA)
    step = option_values.whole(1, 3600)
    swarm.add_argument("--swarm-step-s", type=step, default=5, metavar="SECONDS", help=_SILENT)
    _add_audits(swarm, "--swarm-", "--swarm")


def add_options(swarm: argparse.ArgumentParser) -> None:
    """Add what ``firsttoken swarm`` can do, each action with its options; the choice is ``action``."""
    actions = swarm.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        folder = "the model's folder, with config.json and *.safetensors; all members of a swarm have the same files"
        added.add_argument("--model", type=option_values.folder, required=True, metavar="FOLDER", help=folder)
        added.add_argument(
            "--dtype",
            choices=("auto", "float32", "bfloat16", "float16"),
            default="auto",
            help="the number format to compute in (default: auto, which is what this machine is fastest in)",
        )
        added.add_argument("--token-file", type=Path, metavar="FILE", help=_TOKEN)
        added.add_argument("--tls-ca", type=Path, metavar="FILE", help=_CA)
        return added

    serve = action("serve", "Serve some blocks (decoder layers) of a model until Ctrl-C.")
    blocks = "the blocks to serve: 0:15 is blocks 0 to 14; auto takes those that the swarm serves least"
    serve.add_argument("--blocks", required=True, metavar="A:B", help=blocks)
    count = "with --blocks auto, the number of blocks to serve (default: all)"
    serve.add_argument("--count", type=option_values.whole(1, 1000), metavar="N", help=count)
    serve.add_argument(
        "--rebalance-s",
        type=option_values.above_zero(86_400),
        default=120,
        metavar="SECONDS",
        help="with --blocks auto, how often the server checks whether the swarm gains if it takes other blocks"
        " (default: 120)",
    )
    serve.add_argument(
        "--rebalance-by",
        choices=("paper", *extensions.registered("REBALANCING")),
        default="paper",
        help="the rule of that check: paper moves a server when the swarm would then gain a third; fewest-moves plans"
        " the fewest moves that gain a fiftieth, and moves only the servers in that plan (default: paper)",
    )
    known = (
        "a server that is in the swarm already, such as 127.0.0.1:4000; may be repeated. Without it a new swarm begins"
    )
    serve.add_argument("--registry", action="append", default=[], metavar="HOST:PORT", help=known)
    serve.add_argument("--host", type=option_values.host, default="127.0.0.1", help=_LOOPBACK)
    port, any_port = option_values.whole(0, 65535), "the port to listen on (default: 0, any free port)"
    serve.add_argument("--port", type=port, default=0, help=any_port)
    told = "the address by which others reach this server, where it differs from the one that it listens on"
    serve.add_argument("--address", default="", metavar="HOST:PORT", help=told)
    key = "the file of this server's private key; it is made if it does not exist (default: a new key at each start)"
    serve.add_argument("--key", type=Path, metavar="FILE", help=key)
    serve.add_argument(
        "--servers",
        type=option_values.whole(1, 64),
        default=1,
        metavar="N",
        help="how many servers to start, each in a Ray process (needs firsttoken[serve]; not together with --host,"
        " --port, --address or --key) (default: 1, without Ray)",
    )
    serve.add_argument("--cluster", metavar="HOST:PORT", help=_CLUSTER)
    variant = "also compute the blocks with this LoRA adapter, for clients that ask for it; may be repeated"
    serve.add_argument(
        "--variant", type=option_values.named_folder, action="append", default=[], metavar="NAME=DIR", help=variant
    )
    train = "also answer the forward and backward passes of clients that train; the blocks themselves never change"
    serve.add_argument("--train", action="store_true", help=train)
    threads = "the number of threads to compute with (default: 0, one for each core)"
    serve.add_argument("--threads", type=option_values.whole(0, 1024), default=0, metavar="N", help=threads)
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="this server's certificate, a PEM file")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="the private key of that certificate, a PEM file")
    kv, room = option_values.whole(16, 10**8), "how many tokens of KV cache all sessions share (default: 16384)"
    serve.add_argument("--kv-tokens", type=kv, default=16384, metavar="N", help=room)
    gone = "others forget a server that has said nothing for this many seconds (default: 30)"
    serve.add_argument("--expiry-s", type=option_values.whole(1, 300), default=30, metavar="SECONDS", help=gone)

    int8 = actions.add_parser("int8", help=_INT8, description=_INT8)
    int8.add_argument("--model", type=option_values.folder, required=True, metavar="FOLDER", help="the model's folder")
    int8.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new folder for the copy")

    generate = action("generate", "Let a swarm continue a text, and print the continuation.")
    generate.add_argument("prompt", help="the text to continue, such as 'The capital of France is'")
    listed = action("list", "Print which server of a swarm has which blocks of a model.")
    for added in (generate, listed):
        known = "a server of the swarm, such as 127.0.0.1:4000; may be repeated"
        added.add_argument("--registry", action="append", required=True, metavar="HOST:PORT", help=known)
    most = "the most tokens to generate (default: 32)"
    generate.add_argument("--max-tokens", type=option_values.whole(1, 100_000), default=32, metavar="N", help=most)
    generate.add_argument(
        "--coding",
        choices=("float32", "bfloat16", "float16", "int8"),
        default="",
        help="the number format in which hidden states are sent (default: that of --dtype)",
    )
    generate.add_argument("--step-s", type=option_values.whole(1, 3600), default=5, metavar="SECONDS", help=_SILENT)
    _add_audits(generate, "--", "--registry")


def add_prefix_options(prefix: argparse.ArgumentParser) -> None:
    """Add what ``firsttoken prefix`` can do, each action with its options; the choice is ``action``."""
    actions = prefix.add_subparsers(required=True, metavar="ACTION", dest="action")
    folder, model = option_values.folder, "the model that computes it, a folder as `firsttoken serve` takes one"
    adapted = "a LoRA adapter on that model, a folder as PEFT writes it (default: none)"
    most = option_values.above_zero(1e6)

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
    put.add_argument(
        "--owner",
        type=option_values.owner,
        default="",
        metavar="NAME",
        help="who alone may read it: services with this --prefix-owner (default: everybody)",
    )
    layer = "store the hidden states before this layer, too; may be repeated (default: where profiled pairs begin)"
    put.add_argument("--edge", type=option_values.whole(0, 1000), action="append", default=[], metavar="N", help=layer)

    profile = action("profile", "Find which layers a model computes again over what another of its shape computed.")
    profile.add_argument("--model", type=folder, required=True, metavar="FOLDER", help=model)
    profile.add_argument("--adapter", type=folder, metavar="DIR", help=adapted)
    profile.add_argument("--receiver", type=folder, required=True, metavar="FOLDER", help="the model that takes it")
    profile.add_argument("--receiver-adapter", type=folder, metavar="DIR", help="a LoRA adapter on the receiver")
    profile.add_argument("--file", type=Path, required=True, metavar="FILE", help="a text of the kind that is served")
    count = "the most pieces of the text that are tried (default: 16)"
    profile.add_argument("--items", type=option_values.whole(1, 10_000), default=16, metavar="N", help=count)
    length = "the tokens of the prefix of a piece (default: 256)"
    profile.add_argument("--tokens", type=option_values.whole(1, 100_000), default=256, metavar="N", help=length)
    lost = "the share of the receiver's next tokens that may become others (default: 0.05)"
    profile.add_argument("--most-lost", type=option_values.above_zero(1), default=0.05, metavar="SHARE", help=lost)

    action("list", "Print what is stored, least recently used first, and which pairs are profiled.")
    drop = action("drop", "Remove stored prefixes. Who reads one at that moment has all of it.")
    drop.add_argument("keys", nargs="+", metavar="KEY", help="the prefixes, as `firsttoken prefix list` names them")

    serve = action("serve", "Let other machines copy stored prefixes until Ctrl-C: those without an owner.")
    reader = "let whoever has the secret text in this file read NAME's prefixes, too; may be repeated"
    serve.add_argument(
        "--reader", type=option_values.named_folder, action="append", default=[], metavar="NAME=FILE", help=reader
    )
    serve.add_argument("--host", type=option_values.host, default="127.0.0.1", help=_LOOPBACK)
    port = "the port to listen on (default: 8010)"
    serve.add_argument("--port", type=option_values.whole(0, 65535), default=8010, help=port)
    rate = "send at this rate in Gbit/s, all readers together (default: 0, no limit)"
    serve.add_argument("--gbit-per-s", type=option_values.rate, default=0.0, metavar="RATE", help=rate)

    copy = action("pull", "Copy prefixes from a store that `firsttoken prefix serve` serves. It must be trusted.")
    copy.add_argument("peer", metavar="HOST:PORT", help="where that listens")
    copy.add_argument("--token-file", type=Path, metavar="FILE", help="a file with a reader's secret text")
    again = "look again after this many seconds, until Ctrl-C (default: once)"
    copy.add_argument("--every", type=option_values.above_zero(86_400), metavar="SECONDS", help=again)
    for added in (put, copy):
        size = "the most that the store may hold, in GB (default: 10)"
        added.add_argument("--most-gb", type=most, default=10.0, metavar="GB", help=size)


def _add_audits(added: argparse._ActionsContainer, prefix: str, first: str) -> None:
    share = option_values.above_zero(1)
    added.add_argument(
        f"{prefix}audit-rate",
        type=share,
        metavar="SHARE",
        help="the share of answers that another server computes again to find false ones, such as 0.05; where two"
        f" differ, the server of the first {first} judges which one is false (default: none)",
    )
    added.add_argument(
        f"{prefix}audit-undecided",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="leave a server when more than this share of its audits found a difference without a culprit; the answer"
        " ends if no other server has its blocks (default: 0.5)",
    )
    added.add_argument(
        f"{prefix}audit-unwitnessed",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="leave a server when more than this share of its audits found no other server to compare with; the answer"
        " ends if no other server has its blocks (default: 1, never)",
    )


Command = Callable[[argparse.Namespace], int]

EXTENSIONS = extensions.commands()  # packages of their own: the library serves without them, and imports none


def parser(commands: Iterable[Command]) -> argparse.ArgumentParser:
    """Return the program's parser; the command that was chosen is ``command`` of what it parses."""
    known, made = {function.__name__: function for function in commands}, dict[str, argparse.ArgumentParser]()
    parser = argparse.ArgumentParser(prog="firsttoken", description=_WHAT, epilog=_FIRST)
    parser.add_argument("--version", action="version", version=f"firsttoken {__version__}")
    added_to = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made[name] = added = added_to.add_parser(name, help=text, description=text)
        added.set_defaults(command=known[name])
        return added

    for extension in EXTENSIONS:
        extension.add_options(command)

    what = "Download the pinned model and texts, or what a page of the site runs on, and check their hashes."
    added = command("fetch", what)
    added.add_argument(
        "names", nargs="*", metavar="ASSET", help="the assets to fetch, as --list names them (default: all)"
    )
    from_dir = "copy the wheels, and the files that env/brought.yaml lists, from this folder instead of downloading"
    added.add_argument("--from", dest="from_dir", type=option_values.folder, metavar="DIR", help=from_dir)
    added.add_argument("--list", action="store_true", help="list the assets, their sizes and what is missing, and stop")

    added = command("stage", "Write a model in stages, so that `firsttoken serve` answers before all of it is loaded.")
    added.add_argument("folder", type=option_values.folder, metavar="FOLDER", help="the folder to write")
    option_values.add_profile(added)
    option_values.add_setting(added)
    recipes = (
        "the adapters that repair the stages: ours, report or none (default: those that answer best by the profile)"
    )
    added.add_argument("--adapters", default="", metavar="NAME", help=recipes)
    added.set_defaults(make_plan=lambda options, profile: None)

    _add_serve(command("serve", _SERVE))
    add_prefix_options(command("prefix", _PREFIX))
    add_options(command("swarm", "Run a model over several servers that hold its blocks (needs firsttoken[swarm])."))

    for extension in EXTENSIONS:
        for name, add in getattr(extension, "MORE_OPTIONS", {}).items():
            add(made[name])
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "folder",
        type=option_values.folder,
        nargs="?",
        metavar="FOLDER",
        help="what `firsttoken stage` wrote, or a Hugging Face folder of a Llama-like model (default: SmolLM2)",
    )
    gbit = "read the weights over a link of this rate in Gbit/s, such as 0.1 (default: 0, as fast as the disk)"
    serve.add_argument("--gbit-per-s", type=option_values.rate, default=0.0, metavar="RATE", help=gbit)
    replicas = "how many copies of the model serve side by side; more than 1 run behind Ray Serve (default: 1)"
    serve.add_argument("--replicas", type=option_values.whole(1, 64), default=1, metavar="N", help=replicas)
    serve.add_argument("--cluster", metavar="HOST:PORT", help=_CLUSTER)
    serve.add_argument("--host", type=option_values.host, default="127.0.0.1", help=_LOOPBACK)
    port = option_values.whole(0, 65535)
    serve.add_argument("--port", type=port, default=8000, help="the port to listen on (default: 8000)")
    device = "the device that computes: cpu, cuda or cuda:1 (default: cpu)"
    serve.add_argument("--device", default="cpu", help=device)
    worker = "compute in a process of its own, which is replaced when it crashes or hangs (needs firsttoken[worker])"
    serve.add_argument("--worker", action="store_true", help=worker)
    first = (
        "answer nothing before torch is imported. Without this option, greedy requests for a whole model on a CPU are"
        " answered by numpy and the engine's compiled kernels until then, and the engine goes on with them"
    )
    serve.add_argument("--torch-first", action="store_true", help=first)
    keys = "a file with the key that clients must send (default: the variable FIRSTTOKEN_API_KEY, or no key)"
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)

    engine = serve.add_argument_group("the engine")
    engine.add_argument(
        "--scheduler",
        default="sarathi",
        metavar="NAME",
        help="the policy that chooses the requests of each step: request_level, iteration_level, prefill_first, "
        "sarathi, chunked_only, hybrid_only, prefill_cap, deadline, adaptive_budget, shortest_first (default: sarathi)",
    )
    count = option_values.whole(1, 10**8)
    budget = "with a scheduler that cuts prompts, the most tokens of a step; at least --max-running (default: 512)"
    engine.add_argument("--token-budget", type=count, metavar="N", help=budget)
    preempted = (
        "how a preempted request gets its cache back: recompute, swap, cross_point (whichever is cheaper for its"
        " length: measured on this machine at the first start, kept, and followed while serving) or online (the same,"
        " learnt while serving alone) (default: recompute)"
    )
    engine.add_argument("--preemption", default="recompute", metavar="NAME", help=preempted)
    again = "with --preemption cross_point, measure at this start what both ways cost, whatever was kept"
    engine.add_argument("--measure-again", action="store_true", help=again)
    share = "let prompts that begin alike share KV blocks (default: they do not)"
    engine.add_argument("--share-prefixes", action="store_true", help=share)
    stored = "reuse keys and values of how prompts begin from this folder, which `firsttoken prefix put` has written"
    engine.add_argument("--prefix-store", type=option_values.folder, metavar="DIR", help=stored)
    owner = "with --prefix-store, read what is stored under this name, too (default: what is stored for everybody)"
    engine.add_argument("--prefix-owner", type=option_values.owner, default="", metavar="NAME", help=owner)
    variant = (
        "serve a LoRA adapter on the model, too, from a folder as PEFT writes it; requests name it as their model. May"
        " be repeated: the weights are there once, and requests of all share steps"
    )
    engine.add_argument(
        "--variant", type=option_values.named_folder, action="append", default=[], metavar="NAME=DIR", help=variant
    )
    blocks = "the size of the KV cache in blocks of 16 tokens, such as 1024 (default: as many as the limits below need)"
    engine.add_argument("--kv-blocks", type=count, metavar="N", help=blocks)

    limits = serve.add_argument_group("limits")
    for name, what in (
        ("model-len", "a prompt with its answer"),
        ("prompt-tokens", "a prompt"),
        ("new-tokens", "an answer"),
    ):
        most = f"the most tokens of {what} (default: the model's context, as far as the KV cache has room)"
        limits.add_argument(f"--max-{name}", type=count, metavar="N", help=most)
    at_once, waiting = option_values.whole(1, 4096), option_values.whole(0, 10**6)
    running = "the most requests that are computed at once (default: 64)"
    limits.add_argument("--max-running", type=at_once, default=64, metavar="N", help=running)
    queue = "the most requests that wait for their turn; further ones are refused with status 429 (default: 64)"
    limits.add_argument("--max-waiting", type=waiting, default=64, metavar="N", help=queue)
    grace = "how long running answers may go on after Ctrl-C or SIGTERM (default: 30)"
    limits.add_argument("--grace-s", type=option_values.seconds, default=30.0, metavar="SECONDS", help=grace)
    add_client_options(serve)
