"""Starts of several processes that each fetch a part, beside one that fetches all, by the rate of a process's link."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tqdm import tqdm

from firsttoken.assets.needs import LAYERS, ModelFacts, Need, check
from firsttoken.progressiveserve.checkpoint.manifest import read_manifest
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken_studies.combined.borrowed.setting import start_setting
from firsttoken_studies.combined.borrowed.trial import WHOLE
from firsttoken_studies.combined.fetchers.division import bytes_of, divided
from firsttoken_studies.combined.fetchers.trial import FETCHED, FetchSpec
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, TrialLink, one_trial

TRIAL = "firsttoken_studies.combined.fetchers.trial"


@dataclass(frozen=True)
class FetchersConfig:
    """``tokens`` of the first of ``questions`` by one process and by each number of ``servers``, every one of them with
    a link of each of ``gbit_per_s`` and so many ``readers``; ``rounds`` times. Few of them: files that are read at once
    are whole at once, and the first process would wait for others behind its own part (eight readers: 50 MB of them).

    ProfileError for numbers below these, and for a number of servers or a rate that is named twice.
    """

    questions: str
    tokens: int
    gbit_per_s: tuple[float, ...]
    servers: tuple[int, ...]
    rounds: int
    readers: int

    def __post_init__(self) -> None:
        if len({*self.servers}) < len(self.servers) or len({*self.gbit_per_s}) < len(self.gbit_per_s):
            raise ProfileError("fetchers: name every number of servers and every rate of gbit_per_s once")
        if min(self.servers, default=0) < 2 or min(self.gbit_per_s, default=0.0) <= 0:
            raise ProfileError("fetchers: 2 servers or more in each start, and links that have a rate")
        if self.rounds < 1 or self.tokens < 2 or self.readers < 1:
            raise ProfileError("fetchers: at least 1 round, 2 tokens and 1 reader")


def parallel_start(profile: Profile) -> Outcome:
    """Rows {variant, servers, gbit_per_s, round, ...} of fresh processes, in random order; the floor of each start is
    its largest part at the link's rate.

    The first process has one half of the cores, the others share the other one: with three processes on two cores, the
    two behind the first place their weights on one. Raises StageError for more processes than the layers give work.
    """
    config = profile.section("fetchers", FetchersConfig)
    most = Need("fetchers.servers", max(config.servers), LAYERS, "take fewer")
    check([most], ModelFacts(profile.model))
    setting = start_setting(profile, config.questions, config.tokens, config.readers)
    manifest = read_manifest(setting.folder)
    parts = {count: divided(manifest, count) for count in (1, *config.servers)}
    common = FetchSpec(**setting.common | {"staged": str(setting.folder), "others": setting.theirs})
    starts = [(rate, count, n) for rate in config.gbit_per_s for count in parts for n in range(config.rounds)]
    random.Random(profile.seed).shuffle(starts)
    rows: Rows = []
    for rate, count, round_ in tqdm(starts, desc="starts with fetchers", unit="start", disable=None):
        spec = replace(common, variant=WHOLE if count == 1 else FETCHED, servers=count)
        rows.append({"round": round_} | one_trial(spec, TrialLink(rate, BUCKET, cold=False), module=TRIAL))
    largest = {
        count: max(bytes_of(manifest, one, ends=one is layers[0]) for one in layers) for count, layers in parts.items()
    }
    floors = {
        floor_name(rate, count): {"value": 8e-9 * size / rate, "unit": "s", "why": f"{size:,} bytes over its link"}
        for rate in config.gbit_per_s
        for count, size in largest.items()
    }
    divisions = {"layers": {str(count): [[one.start, one.stop] for one in each] for count, each in parts.items()}}
    return Outcome(rows, floors, provenance=setting.provenance | divisions)


def floor_name(gbit_per_s: float, servers: int) -> str:
    """What the floor of the first token of such a start is called."""
    return f"first token, {servers} over {gbit_per_s:g} Gbit/s"
