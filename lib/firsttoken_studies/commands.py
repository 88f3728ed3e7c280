"""The commands that measure: notebooks, experiments, the ledger, a policy of the reader's own.

Each imports what it needs when it runs: `firsttoken serve` makes these options, too, and numpy and the record would
cost it a tenth of the time to a first token.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from firsttoken.study import option_values, paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.machine import kernels_multiply
from firsttoken.study.profile import check_used, load_profile, profile_names
from firsttoken.study.system.openmp import set_wait_policy
from firsttoken.terminal import size_text
from firsttoken_studies.registry import EXPERIMENTS, find_experiment
from firsttoken_studies.trying import KINDS, try_policy

OK, FAILED = 0, 1
NO_HISTORY = "; the history is not here, so revisions were not looked up"


def run(options: argparse.Namespace) -> int:
    """Run the notebooks in order; a failing one does not keep the others from running."""
    from firsttoken.study.machine import machine_slug
    from firsttoken_studies import ledger, running
    from firsttoken_studies.record.notebooks import notebook_paths, notebook_title

    notebooks = notebook_paths(options.only)
    if options.list:
        for path in notebooks:
            print(f"{path.name[:2]}  {notebook_title(path)}")
        return OK
    profile = load_profile(options.profile)
    if options.publish and profile.name != "quick":
        raise ProfileError(f"notebooks/ shows the quick profile, not {profile.name}; leave out --publish")
    failed = running.run_notebooks(notebooks, profile, published=options.publish)
    print("", *ledger.end_of_run(profile.name, [path.name[:2] for path in notebooks]), sep="\n")
    for kind, folder in (("figures", paths.own_figures()), ("results", paths.RESULTS / machine_slug() / profile.name)):
        print(f"{kind}: {folder}")
    print(f"executed notebooks: {paths.EXECUTED / profile.name}")
    if failed:
        print(f"firsttoken: {failed} of {len(notebooks)} notebooks failed", file=sys.stderr)
    return FAILED if failed else OK


def measure(options: argparse.Namespace) -> int:
    """Run experiments without notebooks; return the exit status."""
    experiments = [find_experiment(name) for name in options.experiments]
    if any(experiment.in_turns for experiment in experiments):
        set_wait_policy(kernels_multiply())
    from firsttoken.study.summary import named
    from firsttoken_studies.experiments import run_experiment
    from firsttoken_studies.record.verdicts import show

    profile, used = load_profile(options.profile, **dict(options.set)), set[str]()
    for name in options.experiments:
        result = run_experiment(name, profile, options.because)
        measured = {"duration_s": result.duration_s, "rows": len(result.rows), "path": str(result.path)}
        options.answer[name] = measured | {"summary": list(result.summary)}
        print(f"{name}: {result.duration_s:.1f} s, {len(result.rows)} rows in {result.path}", flush=True)
        for entry in result.summary:
            measure_name = named(entry["measure"], entry["where"])
            print(f"  {measure_name}: {show(entry['value'])} {entry.get('unit', '')}".rstrip())
        used |= profile.used.keys()
    check_used(dict(options.set), used)
    return OK


def capacity(options: argparse.Namespace) -> int:
    """Find the capacity of one scheduler and print it beside the record's."""
    from firsttoken_studies import ledger
    from firsttoken_studies.record.results import pick
    from firsttoken_studies.sarathi import leaderboard
    from firsttoken_studies.sarathi.contest import CapacityBenchmark

    profile = load_profile(options.profile, **(_card(options) | dict(options.set)))
    trace = None
    if options.arrivals is not None:
        from firsttoken.simulation.workload.traces import load_trace

        trace = load_trace(options.arrivals, unit=options.arrivals_unit)
        print(f"{options.arrivals}: {trace.description()}")
    elif options.arrivals_unit is not None:
        raise ProfileError("--arrivals-unit says what the times of a trace are: add --arrivals FILE, or leave it out")
    contest = CapacityBenchmark.of(options.scheduler, profile, options.seeds, trace)
    rates = contest.run()
    record = pick(ledger.recorded(), leaderboard.EXPERIMENT, machine="any")
    options.answer |= contest.content(rates, record)
    print(contest.told(rates, record))
    if options.trace or options.rows:
        contest.write_run(rates[0], options.trace, options.rows)
    return OK


def _card(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a profile for the card and the model that the options name; none where they name none."""
    if not options.hardware:
        if options.model or options.gpus != 1:
            raise ProfileError("--model and --gpus say what runs on a card: add --hardware NAME, or leave them out")
        return {}
    card = {"costs": options.hardware, "model": options.model or "llama-3.1-8b", "gpus": options.gpus}
    shape_of_step = {"layers": 0, "blocks": 0, "decodes": 32, "context": 1024}
    return {f"hardware.{key}": value for key, value in (card | shape_of_step).items()} | {
        "capacity.lengths": "openchat-sharegpt4-fit"
    }


def claims(options: argparse.Namespace) -> int:
    """Print the claims table, write the pages that show it, or check that they do."""
    from firsttoken_studies import ledger
    from firsttoken_studies.record import claims_table, history

    if not (options.check or options.update):
        judged = ledger.judged(options.machine, options.report, options.verdict)
        options.answer |= {
            "machine": options.machine or ledger.machine(),
            "claims": [judgement.content for judgement in judged],
        }
        if options.json:
            return OK
        if options.all or options.report or options.verdict or not sys.stdout.isatty():
            print(ledger.table(options.machine, statements=[judgement.claim for judgement in judged]))
        else:
            print(*claims_table.overview(judged), sep="\n")
        return OK
    if options.update:
        ledger.update_pages(options.machine)
    if late := ledger.outdated_pages(options.machine):
        print(f"firsttoken: out of date: {', '.join(late)}; run `firsttoken claims --update`")
        return FAILED
    if options.update:
        print("claims: README.md, the pages of data and the notebooks show the record")
        return OK
    if faults := ledger.record_faults():
        print(*(f"firsttoken: {fault}" for fault in faults), sep="\n", file=sys.stderr)
        return FAILED
    print("claims: README.md, the pages of data and the notebooks show the record")
    print("record: results, claims and data/record.jsonl fit together" + ("" if history.is_here() else NO_HISTORY))
    return OK


def site(options: argparse.Namespace) -> int:
    """Write the site of static pages."""
    from firsttoken_studies.site.build import build

    size = build(options.folder)
    print(f"site: {options.folder / 'index.html'}, {size_text(size)}")
    return OK


def record(options: argparse.Namespace) -> int:
    """Print the log of the record, or note what was done to the record and why."""
    from firsttoken_studies import ledger

    if (options.summarise or options.claims or options.remove) and not options.because:
        raise ProfileError("the record keeps a reason for each change: add --because TEXT")
    if options.remove:
        if not options.machine:
            raise ProfileError("--remove takes out the result of one machine: add --machine NAME")
        print(f"withdrawn: {ledger.take_out(options.remove, options.machine, options.because, faulty=options.faulty)}")
    if options.summarise:
        print(*ledger.summarise_again(options.because), sep="\n")
    if options.claims:
        print(*ledger.note_edits(options.because), sep="\n")
    log = ledger.log()
    lines = log.lines[-options.last :]
    options.answer |= {"count": len(log.lines), "head": log.head, "lines": [asdict(line) for line in lines]}
    for line in lines:
        verdicts = Counter(answer.verdict for answer in line.claims.values() if answer.verdict)
        counts_text = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        line_text = " ".join(filter(None, (line.kind, line.experiment, line.profile, line.machine, line.started)))
        print(": ".join(filter(None, (line_text, counts_text, line.reason))))
    print(f"{len(log.lines)} lines; the last has sha256 {log.head}")
    return OK


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine is and what is there."""
    from firsttoken.assets.lock import load_lock
    from firsttoken.study import dtypes
    from firsttoken.study.machine import describe
    from firsttoken.study.system.compiled import ACCELERATOR, ACCELERATORS, accelerator_name, compiler
    from firsttoken_studies.record.results import result_path

    machine, answer = describe(), options.answer
    if options.missing:
        for profile in profile_names():
            names = [name for name, entry in EXPERIMENTS.items() if profile in entry.profiles]
            absent = [name for name in names if not result_path(name, profile, machine["slug"]).exists()]
            answer[profile] = absent
            print(f"{profile}: {', '.join(absent) or 'nothing is missing'}")
        return OK
    answer |= machine | {"dtype": dtypes.why("cuda" if machine["gpu"] else "cpu"), "compiler": compiler()}
    answer |= {"accelerator": accelerator_name(), "clone": str(paths.ROOT) if paths.IS_CLONE else None}
    for key, value in machine.items():
        if key != "packages":
            print(f"{key}: {size_text(value) if key.endswith('_bytes') else value}")
    for package, version in machine["packages"].items():
        print(f"{package}: {version or 'not installed'}")
    print(f"dtype: auto is {answer['dtype']}")
    print(f"C++ compiler: {' '.join(compiler() or []) or 'none, so the engine does without its CPU kernels'}")
    print(f"{ACCELERATOR}: {accelerator_name()}, {ACCELERATORS[accelerator_name()]}")
    if not paths.IS_CLONE:
        print(f"clone: none at {paths.ROOT}; FIRSTTOKEN_ROOT names one, whose notebooks, profiles and models are used")
        return OK
    free = shutil.disk_usage(paths.CACHE if paths.CACHE.exists() else paths.ROOT).free
    assets = {asset.name: not asset.missing() for asset in load_lock()}
    answer |= {"assets": assets, "cache": str(paths.CACHE), "free_bytes": free, "profiles": list(profile_names())}
    for name, present in assets.items():
        print(f"asset {name}: {'present' if present else 'missing, run `firsttoken fetch`'}")
    print(f"cache: {paths.CACHE}, {size_text(free)} free")
    print(f"profiles: {', '.join(profile_names())}")
    return OK


COMMANDS = (run, measure, capacity, try_policy, claims, record, site, doctor)
ANYWHERE = ("doctor",)


def add_options(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the options of these commands; ``command`` makes the parser of one, from its name and what it does."""
    added = command("run", "Run the notebooks in order, and end with the table of claims.")
    option_values.add_profile(added)
    added.add_argument("--only", nargs="+", metavar="NN", help="the notebooks to run, such as 11 40 (default: all)")
    added.add_argument("--publish", action="store_true", help="copy what was run into notebooks/, to commit it")
    added.add_argument("--list", action="store_true", help="list the notebooks with their numbers, and stop")

    added = command("measure", "Run experiments without their notebooks, for example on a GPU machine.")
    experiments_help = f"the experiments to run, one or more of: {', '.join(EXPERIMENTS)}"
    added.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=experiments_help)
    option_values.add_profile(added)
    option_values.add_setting(added)
    why = "with a result that is recorded already: the reason for measuring it again, which the log keeps"
    added.add_argument("--because", default="", metavar="TEXT", help=why)
    option_values.add_json(added)

    added = command(
        "capacity", "Find how many requests a second a scheduler serves within a limit on time between tokens."
    )
    name = "a scheduler of the engine, such as sarathi, or your file; a token budget may follow it: 'mine.py 1024'"
    added.add_argument("--scheduler", required=True, metavar="NAME", help=name)
    option_values.add_profile(added, default="full")
    option_values.add_setting(added)
    seeds = "how many draws of the requests to search (default: as many as the profile has)"
    added.add_argument("--seeds", type=int, metavar="N", help=seeds)
    replayed = (
        "replay the requests of a trace: CSV of Azure, BurstGPT or vidur, JSON lines of Alibaba Bailian or Mooncake"
        " (default: random arrivals, with the lengths of the profile)"
    )
    added.add_argument("--arrivals", type=Path, metavar="FILE", help=replayed)
    unit = "the unit of the times in that trace, seconds or milliseconds; only needed where the program asks for it"
    added.add_argument("--arrivals-unit", choices=("s", "ms"), help=unit)
    cards = (
        "simulate this card from its measured operators: a100-sxm, h100-sxm, h200-sxm, l40s, b200-sxm, rtx-pro-6000"
        " (default: the costs of the profile)"
    )
    added.add_argument("--hardware", metavar="NAME", help=cards)
    model = (
        "the model on it: a name such as yi-34b or qwen3-235b-a22b, or the path of a config.json, dense or a mixture of"
        " experts (default: llama-3.1-8b)"
    )
    added.add_argument("--model", metavar="MODEL", help=model)
    gpus = "over how many of these cards the model is split, in tensor parallel (default: 1)"
    added.add_argument("--gpus", type=option_values.whole(1, 8), default=1, metavar="N", help=gpus)
    trace = "write the run at the capacity that was found to this file, for the viewer of ui.perfetto.dev"
    added.add_argument("--trace", type=Path, metavar="JSON", help=trace)
    rows = "write the same run to this file as a table, with a row for each step and for each request"
    added.add_argument("--rows", type=Path, metavar="CSV", help=rows)
    option_values.add_json(added)

    added = command("try", "Run a policy of your own beside the built-in ones on one workload, and print a table.")
    added.add_argument("kind", choices=KINDS, help="what it decides; examples are in CONTRIBUTING.md, 'Add a policy'")
    own_options = (
        "your Python file, with one subclass of Scheduler, PreemptionPolicy, Transition or Rebalancing, or with one"
        " function (victim, resume, layers); a token budget may follow the file of a scheduler, as in 'mine.py 1024'"
    )
    added.add_argument("file", metavar="FILE", help=own_options)
    draws = "how many random workloads to run; more give narrower intervals (default: 5)"
    added.add_argument("--draws", type=option_values.whole(1, 1000), default=5, metavar="N", help=draws)
    option_values.add_profile(added)
    option_values.add_setting(added)
    option_values.add_json(added)

    added = command("claims", "Count the verdicts by report on a terminal, else print the table of claims.")
    added.add_argument("--all", action="store_true", help="print the table of all claims, on a terminal too")
    report = "print the claims of this report, such as PETALS"
    added.add_argument("--report", default="", metavar="NAME", help=report)
    verdict = "print the claims with this verdict, such as reproduced, trend-only or not-reproduced"
    added.add_argument("--verdict", default="", metavar="VERDICT", help=verdict)
    option_values.add_json(added)
    added.add_argument("--check", action="store_true", help="exit with 1 unless the pages agree with the record")
    update = "write README.md, the pages of data/ and the findings of the notebooks again, from data/templates"
    added.add_argument("--update", action="store_true", help=update)
    whose = "show the results of this machine, such as amd-epyc-avx2-2c (default: all recorded ones, and yours)"
    added.add_argument("--machine", metavar="NAME", help=whose)

    added = command("record", "Print the log of recorded results, or note a change to them with its reason.")
    added.add_argument("--last", type=int, default=10, metavar="N", help="how many lines to print (default: 10)")
    again = "compute the summary of every recorded result again from its rows (needs --because)"
    added.add_argument("--summarise", action="store_true", help=again)
    added.add_argument(
        "--claims", action="store_true", help="note that claims were changed or retired (needs --because)"
    )
    gone = "withdraw the result of this experiment on one machine; its file stays (needs --machine and --because)"
    added.add_argument("--remove", metavar="EXPERIMENT", help=gone)
    added.add_argument("--machine", metavar="NAME", help="with --remove, the machine, such as amd-epyc-avx2-2c")
    added.add_argument(
        "--faulty", action="store_true", help="with --remove, say that it measured the wrong thing; its file goes"
    )
    added.add_argument("--because", default="", metavar="TEXT", help="the reason for the change, which the log keeps")
    option_values.add_json(added)

    added = command("site", "Write the notebooks, the claims and an index as static pages that need no network.")
    added.add_argument("folder", type=Path, metavar="OUT", help="the folder to write, empty or not there yet")

    added = command("doctor", "Print what this machine is, which packages and assets it has, and its free disk.")
    added.add_argument("--missing", action="store_true", help="list the experiments without a result here, and stop")
    option_values.add_json(added)
