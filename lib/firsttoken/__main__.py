"""The command line: each command imports what it needs, so that ``serve`` listens before torch is there."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from firsttoken.options import parser
from firsttoken.registry import EXPERIMENTS, find_experiment
from firsttoken.study import paths, storage
from firsttoken.study.errors import AssetError, FirstTokenError, ProfileError, StageError
from firsttoken.study.foreign.schema import unknown
from firsttoken.study.machine import describe, machine_slug
from firsttoken.study.measures import named
from firsttoken.study.notebooks import notebook_paths, notebook_title
from firsttoken.study.profile import Profile, check_used, load_profile, profile_names
from firsttoken.study.record import pick, result_path
from firsttoken.study.system.waiting import wait_briefly
from firsttoken.study.verdicts import show
from firsttoken.terminal import ended_as_interrupted, show_what_it_can, size_text
from firsttoken.trying import try_policy

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    show_what_it_can()
    options = parser(COMMANDS).parse_args(arguments)
    try:
        with storage.storing(paths.OUT), ended_as_interrupted(options.command.__name__):
            return options.command(options)
    except FirstTokenError as error:
        print(f"firsttoken: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nfirsttoken: interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED


def run(options: argparse.Namespace) -> int:
    """Run the notebooks in order; a failing one does not keep the others from running."""
    from firsttoken import ledger, running

    notebooks = notebook_paths(options.only)
    if options.list:
        for path in notebooks:
            print(f"{path.name[:2]}  {notebook_title(path)}")
        return OK
    profile = load_profile(options.profile)
    if options.publish and profile.name != "quick":
        raise ProfileError(f"notebooks/ shows the quick profile, not {profile.name}; leave out --publish")
    ran = running.run_notebooks(notebooks, profile, again=options.again, published=options.publish)
    print("", *ledger.end_of_run(profile.name), sep="\n")
    for what, folder in (("figures", paths.own_figures()), ("results", paths.RESULTS / machine_slug() / profile.name)):
        print(f"{what}: {folder}")
    print(f"executed notebooks: {paths.EXECUTED / profile.name}")
    if ran.kept:
        print(f"{ran.kept} notebooks were kept: nothing that they hang on has changed; --again runs them all the same")
    if ran.failed:
        print(f"firsttoken: {ran.failed} of {len(notebooks)} notebooks failed", file=sys.stderr)
    return FAILED if ran.failed else OK


def measure(options: argparse.Namespace) -> int:
    """Run experiments without notebooks."""
    experiments = [find_experiment(name) for name in options.experiments]
    if any(experiment.in_turns for experiment in experiments):
        wait_briefly()
    from firsttoken.experiments import run_experiment

    profile, used = load_profile(options.profile, **dict(options.set)), set[str]()
    for name in options.experiments:
        result = run_experiment(name, profile)
        print(f"{name}: {result.duration_s:.1f} s, {len(result.rows)} rows in {result.path}", flush=True)
        for entry in result.summary:
            what = named(entry["measure"], entry["where"])
            print(f"  {what}: {show(entry['value'])} {entry.get('unit', '')}".rstrip())
        used |= profile.used.keys()
    check_used(dict(options.set), used)
    return OK


def capacity(options: argparse.Namespace) -> int:
    """Find the capacity of one scheduler and print it beside the record's."""
    from firsttoken import ledger
    from firsttoken.chunked import standing
    from firsttoken.chunked.contest import Contest

    profile = load_profile(options.profile, **dict(options.set))
    trace = None
    if options.arrivals is not None:
        from firsttoken.engine.workload.traces import load_trace

        trace = load_trace(options.arrivals, unit=options.arrivals_unit)
        print(f"{options.arrivals}: {trace.told()}")
    elif options.arrivals_unit is not None:
        raise ProfileError("--arrivals-unit says what the times of a trace are: add --arrivals FILE, or leave it out")
    contest = Contest.of(options.scheduler, profile, options.seeds, trace)
    rates = contest.run()
    print(contest.told(rates, pick(ledger.recorded(), standing.EXPERIMENT, machine="any")))
    if options.trace or options.rows:
        contest.write_run(rates[0], options.trace, options.rows)
    return OK


def claims(options: argparse.Namespace) -> int:
    """Print the claims table, write the pages that show it, or check that they do."""
    from firsttoken import ledger

    if not (options.check or options.update):
        print(ledger.table(options.machine))
        return OK
    if options.update:
        ledger.update_pages(options.machine)
    if late := ledger.outdated_pages(options.machine):
        print(f"firsttoken: out of date: {', '.join(late)}; run `firsttoken claims --update`")
        return FAILED
    print("claims: README.md, the pages of data and the notebooks show the record")
    return OK


def fetch(options: argparse.Namespace) -> int:
    """Bring the pinned assets into the cache."""
    from firsttoken.assets.brought import bring
    from firsttoken.assets.fetch import fetch, load_lock

    lock = {asset.name: asset for asset in load_lock()}
    if odd := next((name for name in options.names if name not in lock), ""):
        raise AssetError(f"no asset is called {odd!r}; {unknown(odd, lock)}")
    if options.list:
        for asset in [lock[name] for name in options.names or lock]:
            lacks = len(asset.missing())
            state = f"missing {lacks} of {len(asset.members)} files" if lacks else "present"
            print(f"{asset.name}: {asset.pin}, {asset.bytes / 1e6:.0f} MB to download, {asset.licence}; {state}")
        return OK
    for name in bring(options.from_dir) if options.from_dir else ():
        print(f"{name}: brought")
    fetch(options.names or None, from_dir=options.from_dir)
    return OK


def stage(options: argparse.Namespace) -> int:
    """Write a staged checkpoint of the profile's model."""
    from firsttoken.progressive.staging import stage_model

    profile = load_profile(options.profile, **dict(options.set))
    planes = options.planes
    if planes == "auto":
        planes = _measured_plan(profile, options.budget, options.most_lost)
    elif options.budget is not None or options.most_lost is not None:
        raise StageError("--budget and --most-lost choose a plan: add --planes auto, or leave them out")
    manifest = stage_model(profile, options.folder, options.adapters, planes)
    check_used(dict(options.set), profile.used)
    for number, brought in enumerate(manifest.stages, start=1):
        healed = f", adapter {size_text(brought.adapter.bytes)}" if brought.adapter else ""
        print(f"stage {number} ({brought.name}): {len(brought.parts)} files, {size_text(brought.bytes)}{healed}")
    print(f"{options.folder}: serve it with `firsttoken serve {options.folder}`")
    return OK


def _measured_plan(profile: Profile, budget: float | None, most_lost: float | None) -> str:
    from firsttoken.progressive.planes import planner

    if budget is None and most_lost is None:
        raise StageError("--planes auto needs --budget SHARE, such as 0.36, or --most-lost PERCENT, such as 5")
    text, found = planner.measured(profile)
    for one in planner.worth_it(found):
        print(f"{one.mixture}: {one.first_share:.3f} of the bytes first, perplexity {one.lost_pct:+.1f} % by its parts")
    chosen = planner.choose(found, text.lost_pct, budget, most_lost)
    print(f"chosen: {chosen.mixture}, perplexity {chosen.lost_pct:+.1f} % as measured")
    return str(chosen.mixture)


def assemble(options: argparse.Namespace) -> int:
    """Write the ordinary checkpoint that was staged."""
    from firsttoken.progressive.planes.assemble import assemble as write

    print(f"{write(options.folder, options.target)}: as stock from_pretrained reads it")
    return OK


def serve(options: argparse.Namespace) -> int:
    """Serve a model until Ctrl-C."""
    from firsttoken.service.config import ServiceConfig, read_key
    from firsttoken.service.launch import serve_forever

    if options.folder is None:
        from firsttoken.assets.gguf import PINNED, converted

        options.folder = converted(PINNED, sums=False)
    names = ("folder", "gbit_per_s", "replicas", "host", "port", "device", "scheduler", "preemption", "share_prefixes")
    names += ("token_budget", "kv_blocks", "max_running", "max_waiting", "prefix_store", "cluster", "worker")
    names += ("max_model_len", "max_prompt_tokens", "max_new_tokens", "grace_s", "swarm_token_file", "swarm_tls_ca")
    names += ("swarm_step_s", "swarm_audit_rate", "swarm_audit_undecided", "swarm_audit_unwitnessed")
    settings = {name: getattr(options, name) for name in names} | {"swarm": tuple(options.swarm)}
    if options.swarm:
        wait_briefly()
    serve_forever(ServiceConfig(**settings, api_key=read_key(options.api_key_file)))
    return OK


def swarm(options: argparse.Namespace) -> int:
    """Serve blocks of a model, or use and list the servers that do."""
    wait_briefly()
    if options.action == "serve" and (options.servers > 1 or options.cluster is not None):
        from firsttoken.service.swarm_servers import serve_all as act
    else:
        from firsttoken.swarm.actions import run as act

    act(options)
    return OK


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine is and what is there."""
    from firsttoken.assets.fetch import load_lock
    from firsttoken.study import dtypes
    from firsttoken.study.system.compiled import compiler

    machine = describe()
    if options.missing:
        for profile in profile_names():
            names = [name for name, entry in EXPERIMENTS.items() if profile in entry.profiles]
            absent = [name for name in names if not result_path(name, profile, machine["slug"]).exists()]
            print(f"{profile}: {', '.join(absent) or 'nothing is missing'}")
        return OK
    for key, value in machine.items():
        if key != "packages":
            print(f"{key}: {size_text(value) if key.endswith('_bytes') else value}")
    for package, version in machine["packages"].items():
        print(f"{package}: {version or 'not installed'}")
    print(f"dtype: auto is {dtypes.why('cuda' if machine['gpu'] else 'cpu')}")
    print(f"C++ compiler: {' '.join(compiler() or []) or 'none, so the engine does without its CPU kernels'}")
    for asset in load_lock():
        print(f"asset {asset.name}: {'missing, run `firsttoken fetch`' if asset.missing() else 'present'}")
    here = paths.CACHE if paths.CACHE.exists() else paths.ROOT
    print(f"cache: {paths.CACHE}, {size_text(shutil.disk_usage(here).free)} free")
    print(f"profiles: {', '.join(profile_names())}")
    return OK


COMMANDS = (run, measure, capacity, try_policy, claims, fetch, stage, assemble, serve, swarm, doctor)


if __name__ == "__main__":
    sys.exit(main())
