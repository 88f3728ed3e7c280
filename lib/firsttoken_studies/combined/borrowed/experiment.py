"""Starts that borrow beside starts that wait, by the rate of the link and the round trip to the neighbour."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tqdm import tqdm

from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken_studies.combined.borrowed.neighbour import own_request, shaped, warm_neighbour
from firsttoken_studies.combined.borrowed.setting import StartSetting, start_setting
from firsttoken_studies.combined.borrowed.summary import ALONE
from firsttoken_studies.combined.borrowed.trial import BORROWED, PRUNED, WHOLE, BorrowSpec
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, TrialLink, one_trial

TRIAL = "firsttoken_studies.combined.borrowed.trial"


@dataclass(frozen=True)
class BorrowedConfig:
    """``tokens`` of the first of ``questions``, over links of ``gbit_per_s``, with neighbours ``rtt_ms`` away.

    Every start ``rounds`` times, those over ``main_gbit_per_s`` and ``main_rtt_ms`` ``main_rounds`` times;
    ``busy_rounds`` of them beside a request that the neighbour has running, whose rate alone is that of ``alone_s``
    seconds. ProfileError for numbers below these, and a main setting that is none of those.
    """

    questions: str
    tokens: int
    gbit_per_s: tuple[float, ...]
    rtt_ms: tuple[float, ...]
    main_gbit_per_s: float
    main_rtt_ms: float
    rounds: int
    main_rounds: int
    busy_rounds: int
    alone_s: float
    readers: int

    def __post_init__(self) -> None:
        if self.main_gbit_per_s not in self.gbit_per_s or self.main_rtt_ms not in self.rtt_ms:
            raise ProfileError("borrowed.main_gbit_per_s and main_rtt_ms must be among gbit_per_s and rtt_ms")
        if not 1 <= self.rounds <= self.main_rounds or self.tokens < 2 or not self.alone_s > 0 or self.readers < 1:
            raise ProfileError("borrowed: at least 1 round, as many main_rounds, 2 tokens, 1 reader and some alone_s")
        if min(self.gbit_per_s) <= 0 or min(self.rtt_ms) < 0 or self.busy_rounds < 0:
            raise ProfileError("borrowed: links have a rate, round trips a length, and busy_rounds is 0 or more")


def borrowed_start(profile: Profile) -> Outcome:
    """Rows {what: start, variant, gbit_per_s, rtt_ms, round, ...} of fresh processes, and {what: neighbour, beside,
    tokens, seconds} of what the neighbour's own request had meanwhile."""
    config = profile.section("borrowed", BorrowedConfig)
    setting = start_setting(profile, config.questions, config.tokens, config.readers)
    specs = _BorrowedStarts(setting)
    rows: Rows = []
    depth = setting.checkpoint.plan.depth
    with warm_neighbour(setting.folder, depth, setting.theirs, setting.threads) as address:
        starts = [
            (variant, rate, rtt, round_)
            for rate in config.gbit_per_s
            for variant, rtt in ((WHOLE, 0.0), (PRUNED, 0.0), *((BORROWED, rtt) for rtt in config.rtt_ms))
            for round_ in range(_rounds(config, variant, rate, rtt))
        ]
        random.Random(profile.seed).shuffle(starts)
        with ExitStack() as relays:
            ways = {
                (rate, rtt): relays.enter_context(shaped(address, rtt, rate))
                for rate in config.gbit_per_s
                for rtt in config.rtt_ms
            }
            for variant, rate, rtt, round_ in tqdm(starts, desc="starts that borrow", unit="start", disable=None):
                row = specs.start(variant, rate, ways.get((rate, rtt), ""))
                rows.append({"what": "start", "rtt_ms": rtt, "round": round_} | row)
            main = ways[config.main_gbit_per_s, config.main_rtt_ms]
            for round_ in range(config.busy_rounds):
                rows += _beside(specs, config, setting, (address, main), round_)
    return Outcome(rows, provenance=setting.provenance)


def _rounds(config: BorrowedConfig, variant: str, rate: float, rtt: float) -> int:
    main = rate == config.main_gbit_per_s and (variant != BORROWED or rtt == config.main_rtt_ms)
    return config.main_rounds if main else config.rounds


class _BorrowedStarts:
    """Starts of one model that differ in their way, their link and their neighbour."""

    def __init__(self, setting: StartSetting) -> None:
        staged, folder = str(setting.checkpoint.staged), str(setting.folder)
        self._common = BorrowSpec(**setting.common)
        self._folders = {PRUNED: staged, WHOLE: folder, BORROWED: folder}

    def start(self, variant: str, rate: float, neighbour: str) -> dict[str, object]:
        """One start over a link of ``rate`` whose bytes wait in memory. Raises FirstTokenError when it fails."""
        spec = replace(self._common, variant=variant, staged=self._folders[variant], neighbour=neighbour)
        return one_trial(spec, TrialLink(rate, BUCKET, cold=False), module=TRIAL)


def _beside(
    specs: _BorrowedStarts,
    config: BorrowedConfig,
    setting: StartSetting,
    addresses: tuple[str, str],
    round_: int,
) -> Rows:
    """The neighbour's own request alone, beside a start that borrows nothing, and beside one that does."""
    windows: list[tuple[str, float, float]] = []
    with own_request(setting.folder, addresses[0], setting.theirs, setting.threads) as running:
        begun = time.monotonic()
        time.sleep(config.alone_s)
        windows.append((ALONE, begun, begun + config.alone_s))
        for variant, address in ((WHOLE, ""), (BORROWED, addresses[1])):
            row = specs.start(variant, config.main_gbit_per_s, address)
            begun = float(row["arrived_at_s"])
            windows.append((variant, begun, begun + float(row["local_s"] or row["loaded_s"])))
        times = running.times_s()
    return [
        {"what": "neighbour", "beside": name, "round": round_, "seconds": end - start}
        | {"tokens": sum(start <= at < end for at in times)}
        for name, start, end in windows
    ]
