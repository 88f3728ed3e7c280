"""The cold start as an experiment: every variant over every link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check
from firsttoken.progressiveserve.base_model import ServedConfig, load_served
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.progressiveserve.staging import RANDOM
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken_studies.probes.kernel_link import available
from firsttoken_studies.progressiveserve.coldstart.checkpoints import (
    Checkpoint,
    LayerGroups,
    checkpoint_root,
    grouped_checkpoint,
    prompt_of,
    random_checkpoint,
    served_checkpoint,
)
from firsttoken_studies.progressiveserve.coldstart.harness import (
    BUCKET,
    NONE,
    SERVER,
    TrialLink,
    one_trial,
    run_trials,
    wire_for,
)
from firsttoken_studies.progressiveserve.coldstart.rival_loaders import installed
from firsttoken_studies.progressiveserve.coldstart.spec import TrialSpec
from firsttoken_studies.progressiveserve.coldstart.summary import link_floor
from firsttoken_studies.progressiveserve.coldstart.variants import FIRST, WHOLE, find_variant
from firsttoken_studies.record.results import Outcome, Rows


@dataclass(frozen=True)
class ColdStartConfig:
    """Settings of the cold starts: the variants that start, and the rates of their links in Gbit/s.

    ``variants`` run ``rounds`` times over a link of ``gbit_per_s``, and ``few_rounds`` times: ``few_variants`` beside
    them in the first rounds, ``disk_variants`` from this machine's own storage, ``sweep_variants`` over the faster
    ``sweep_links``, ``parallel_variants`` over several links of ``gbit_per_s`` each, ``server_variants`` from a data
    server that sends at ``gbit_per_s``. The last three must be ours: others open files themselves, and can be held back
    in the kernel alone.
    """

    questions: str
    rounds: int
    few_rounds: int
    readers: int
    gbit_per_s: float
    variants: tuple[str, ...]
    few_variants: tuple[str, ...]
    disk_variants: tuple[str, ...]
    sweep_links: tuple[float, ...]
    sweep_variants: tuple[str, ...]
    parallel_variants: tuple[str, ...]
    server_variants: tuple[str, ...]

    def __post_init__(self) -> None:
        rates = (self.gbit_per_s, *([0.0] if self.disk_variants else []), *self.sweep_links)
        if len(set(rates)) < len(rates):
            raise ProfileError("coldstart.gbit_per_s and sweep_links: name each rate once; disk_variants are 0")
        if self.rounds < self.few_rounds:
            raise ProfileError(f"coldstart.rounds: {self.rounds} are fewer than the {self.few_rounds} few_rounds")


def halved(depth: int, block: Sequence[int]) -> list[Sequence[int]]:
    """Return the layers that each of the report's three stages brings: all but the ``block``, and its two halves."""
    plan = StagePlan.from_block(depth, block)
    return [plan.a, plan.b, plan.c]


def cold_start(profile: Profile, *, groups: LayerGroups = halved) -> Outcome:
    """Fresh processes from cold files to the first token, over each link; ratios within each link.

    ``groups`` other than the report's are staged in a folder that is gone afterwards, and loaded by the starts that
    answer after the first stage.
    """
    config = profile.section("coldstart", ColdStartConfig)
    check(profile.section("served", ServedConfig).needs(), ModelFacts(profile.model))
    ours = (*config.sweep_variants, *config.parallel_variants, *config.server_variants)
    if peers := [name for name in ours if find_variant(name).peer]:
        raise ProfileError(
            f"coldstart: {peers[0]} opens its own files, so no link of it is shaped; name loaders of this project"
        )
    served = load_served(profile)
    checkpoint = grouped = served_checkpoint(profile, served)
    with checkpoint_root(groups is not halved) as root:
        if groups is not halved:
            grouped = grouped_checkpoint(profile, served, groups, root)
        del served  # the children need the memory
        by_plan = {
            stages: trial_specs(profile, of_plan, config.questions, config.readers)
            for stages, of_plan in ((WHOLE, checkpoint), (FIRST, grouped))
        }
        return _trials(profile.seed, config, checkpoint, lambda name: by_plan[find_variant(name).stages or WHOLE](name))


def _trials(seed: int, config: ColdStartConfig, checkpoint: Checkpoint, specs: Callable[[str], TrialSpec]) -> Outcome:
    """Run the trials of every variant over every link, of which ``specs`` gives each."""
    rows: Rows = []
    floors: dict[str, dict[str, Any]] = {}
    disk = disk_speed(specs("read"))
    few = config.few_rounds
    main = wire_for(config.gbit_per_s, checkpoint.staged, disk)
    groups = [(main, (*config.variants, *config.few_variants)), (TrialLink(0.0, NONE), config.disk_variants)]
    groups += [(wire_for(rate, checkpoint.staged, disk), config.sweep_variants) for rate in config.sweep_links]
    groups.append((TrialLink(config.gbit_per_s, BUCKET, parallel=True), config.parallel_variants))
    groups.append((TrialLink(config.gbit_per_s, SERVER), config.server_variants))
    left_out: dict[str, list[str]] = {}
    for wire, variants in groups:
        if not variants:
            continue
        names = reachable(variants, wire)
        if missing := [name for name in variants if name not in names]:
            left_out[wire.name] = missing
        often = [specs(name) for name in names if wire is main and name in config.variants]
        every = [specs(name) for name in ("read", *names)]
        trial_rows = run_trials([every] * few + [often] * (config.rounds - few if often else 0), wire, seed)
        rows += trial_rows
        floors[f"link {wire.name}"] = link_floor(trial_rows)
    notes = {
        "block": list(checkpoint.plan.block),
        "left_out": left_out,
        "no_kernel_limit": available(checkpoint.staged),
    }
    return Outcome(rows, floors, provenance=checkpoint.provenance | notes)


@dataclass(frozen=True)
class ShapesConfig:
    """Random weights of ``shapes``, ``block`` layers of each deferred, over ``links`` (Gbit/s)."""

    shapes: tuple[str, ...]
    blocks: tuple[int, ...]
    links: tuple[float, ...]
    rounds: int
    readers: int
    prompt_tokens: int
    variants: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.blocks):
            raise ProfileError(f"shapes.blocks: {len(self.shapes)} shapes need as many blocks, not {len(self.blocks)}")

    def needs(self, block: int) -> list[Need]:
        """Return what one shape needs: two layers stay, the last among them; the prompt fits with its first token."""
        return [
            Need("shapes.blocks (and two that stay)", block + 2, LAYERS),
            Need("shapes.prompt_tokens", self.prompt_tokens + 1, CONTEXT),
        ]


def cold_start_shapes(profile: Profile) -> Outcome:
    """Larger shapes with random weights: what is left of the gain when the transfer dominates, and when it does not."""
    config = profile.section("shapes", ShapesConfig)
    rows: Rows = []
    for shape, block in zip(config.shapes, config.blocks, strict=True):
        check(config.needs(block), ModelFacts(f"{RANDOM}{shape}"))
    for shape, block in zip(config.shapes, config.blocks, strict=True):
        checkpoint = random_checkpoint(shape, profile.stored_dtype(), block, profile.seed)
        specs = trial_specs(profile, checkpoint, "", config.readers, config.prompt_tokens)
        disk = disk_speed(specs("read"))
        for rate in config.links:
            wire = wire_for(rate, checkpoint.staged, disk)
            names = ("read", *reachable(config.variants, wire))
            trials = [[specs(name) for name in names]] * config.rounds
            trial_rows = run_trials(trials, wire, profile.seed, timeout_s=1800)
            rows += [{"shape": shape, **row} for row in trial_rows]
    return Outcome(rows, provenance={"source": "random weights", "kind": "random"})


def reachable(variants: Sequence[str], wire: TrialLink) -> list[str]:
    """Return those of ``variants`` that can run: other people's loaders read past a token bucket, know no data server,
    and may not be installed."""
    held_back = wire.shaped_by not in (BUCKET, SERVER)
    return [name for name in variants if not (peer := find_variant(name).peer) or (held_back and installed(peer))]


def trial_specs(
    profile: Profile, checkpoint: Checkpoint, questions: str, readers: int, prompt_tokens: int = 0
) -> Callable[[str], TrialSpec]:
    """Return a function that gives the trial of a variant of one checkpoint: the progressive one goes on to the whole
    model. Without questions the prompt is ``prompt_tokens`` arbitrary ids."""
    common = {
        "staged": str(checkpoint.staged),
        "stock": str(checkpoint.stock),
        "prompt": prompt_of(profile, questions) if questions else "",
        "prompt_tokens": prompt_tokens,
        "threads": profile.threads,
        "readers": readers,
        "device": str(profile.torch_device()),
        "dtype": profile.dtype_name,
    }

    def spec(variant: str) -> TrialSpec:
        find_variant(variant)
        return TrialSpec(variant, recover=variant == "progressive", **common)

    return spec


def disk_speed(read: TrialSpec) -> float:
    """Gbit/s of this machine's own storage, cold, read as the trials read it."""
    row = one_trial(read, TrialLink(0.0, NONE))
    return 8e-9 * row["bytes"] / row["load_s"]
