"""Starts that borrow beside starts that wait, by the rate of the link and the round trip to the neighbour."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Scalar, Summary
from firsttoken_extras.layer_borrowing.replica import as_they_come
from firsttoken_studies.combined.borrowed.neighbour import own_request, shaped, warm_server
from firsttoken_studies.combined.borrowed.setting import StartSetting, start_setting
from firsttoken_studies.nb56_a_start_that_borrows.borrow_spec import BORROWED, PRUNED, WAYS, WHOLE, BorrowSpec
from firsttoken_studies.progressiveserve.coldstart.harness import BUCKET, TrialLink, one_trial
from firsttoken_studies.progressiveserve.coldstart.summary import ratio, values
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.plot import COLOURS, LOOKS, Figure, categories, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, rows_where
from firsttoken_studies.record.show import cells, interval

# What starts that borrow say: first tokens by link and round trip, whose they are, and what the neighbour lost.

TTFT, TTFT_PROCESS, LAST = "ttft_request_s", "ttft_process_s", "last_token_s"
ALONE = "alone"


def borrowed_start_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """By link: TTFT of the three ways, and by round trip that of borrowing over that of waiting, the same for the last
    token and for all layers being here, and the bytes that were lent; over all of them whose tokens came out; the
    neighbour's own rate alone, beside a start that waits and beside one that borrows."""
    summary, config = Summary(), parameters["borrowed"]
    starts = [
        row | {LAST: row["times_s"][-1], "all_s": row["local_s"] or row["loaded_s"]}
        for row in rows_where(rows, what="start")
    ]
    for rate in config["gbit_per_s"]:
        starts_at_rate = rows_where(starts, gbit_per_s=rate)
        for way in (WHOLE, PRUNED):
            first = bootstrap(values(starts_at_rate, way, TTFT), "median").summary("s")
            summary.add("ttft_p50_s", first, variant=way, gbit_per_s=rate)
        speedup = ratio(starts_at_rate, PRUNED, WHOLE, TTFT).summary("x")
        summary.add("ttft_x", speedup, variant=PRUNED, than=WHOLE, gbit_per_s=rate)
        loaded = bootstrap(values(starts_at_rate, WHOLE, "loaded_s"), "median").summary("s")
        summary.add("loaded_s", loaded, variant=WHOLE, gbit_per_s=rate)
        for rtt in config["rtt_ms"]:
            near = [row for row in starts_at_rate if row["variant"] != BORROWED or row["rtt_ms"] == rtt]
            _borrowed(summary, near, variant=BORROWED, gbit_per_s=rate, rtt_ms=rtt)
    _from_creation(summary, starts, config)
    _whose(summary, starts)
    _neighbour(summary, rows)
    return summary


def _from_creation(summary: Summary, starts: Rows, config: Mapping[str, Any]) -> None:
    """Add the first and the last token from the creation of the process, over the main link."""
    starts_at_rate = rows_where(starts, gbit_per_s=config["main_gbit_per_s"])
    near = [row for row in starts_at_rate if row["rtt_ms"] in (0.0, config["main_rtt_ms"])]
    for way in WAYS:
        first = bootstrap(values(near, way, TTFT_PROCESS), "median").summary("s")
        summary.add("ttft_process_s", first, variant=way)
    for way in (WHOLE, BORROWED):
        last = [row[TTFT_PROCESS] - row[TTFT] + row[LAST] for row in rows_where(near, variant=way)]
        summary.add("last_token_process_s", bootstrap(last, "median").summary("s"), variant=way)


def _borrowed(summary: Summary, rows: Rows, **labels: Scalar) -> None:
    summary.add("ttft_p50_s", bootstrap(values(rows, BORROWED, TTFT), "median").summary("s"), **labels)
    for measure, column in (("ttft_x", TTFT), ("last_token_x", LAST), ("loaded_x", "all_s")):
        summary.add(measure, ratio(rows, BORROWED, WHOLE, column).summary("x"), **labels, than=WHOLE)
    borrowed = frame_of(rows, variant=BORROWED)
    borrowed["lent_mb"] = borrowed.lent_bytes / 1e6
    borrowed["lent_tokens"] = [_lent_tokens(row) for row in borrowed.to_dict("records")]
    lent = {"lent_mb": ("lent_mb", "median", "MB"), "lent_tokens": ("lent_tokens", "median", "tokens")}
    summary.by(borrowed, {}, lent, **labels)


def _lent_tokens(row: Mapping[str, Any]) -> int:
    """Tokens that were said before all layers were here."""
    return sum(time_s < row["local_s"] for time_s in row["times_s"])


def _whose(summary: Summary, starts: Rows) -> None:
    """Add the share of starts whose tokens, all and the first, equal those of starts that wait for the whole model."""
    wanted = {tuple(row["tokens"]) for row in rows_where(starts, variant=WHOLE)}
    summary.add("answers", {"value": len(wanted), "unit": "answers of starts that wait"}, variant=WHOLE)
    for variant in (PRUNED, BORROWED):
        answers = [tuple(row["tokens"]) for row in rows_where(starts, variant=variant)]
        same = [tokens in wanted for tokens in answers]
        first = [tokens[0] in {answer[0] for answer in wanted} for tokens in answers]
        for measure, shares in (("same_tokens_pct", same), ("same_first_token_pct", first)):
            summary.add(measure, bootstrap(shares).summary("% of starts", 100), variant=variant, than=WHOLE)
    lent = rows_where(starts, variant=BORROWED)
    refused = sum(not any(why in row["gone"] for why in ("all layers", "is over")) for row in lent)
    summary.add("loans_that_failed", {"value": refused, "unit": "starts"})


def _neighbour(summary: Summary, rows: Rows) -> None:
    """Tokens a second of the neighbour's own request, and the share of them that it lost."""
    windows = frame_of(rows, what="neighbour")
    if not len(windows):
        return
    windows["rate"] = windows.tokens / windows.seconds
    rates = windows.pivot(index="round", columns="beside", values="rate")
    for name in (ALONE, WHOLE, BORROWED):
        summary.add("neighbour_tokens_per_s", bootstrap(rates[name], "median").summary("tokens/s"), case=name)
        if name != ALONE:
            lost = bootstrap(100 * (1 - rates[name] / rates[ALONE]), "median").summary("%")
            summary.add("neighbour_lost_pct", lost, case=name, than=ALONE)


TRIAL = "firsttoken_studies.nb56_a_start_that_borrows.borrow_trial"


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
            raise ProfileError("borrowed needs at least 1 round, as many main_rounds, 2 tokens, 1 reader and alone_s")
        if min(self.gbit_per_s) <= 0 or min(self.rtt_ms) < 0 or self.busy_rounds < 0:
            raise ProfileError("borrowed: gbit_per_s must be above 0, and rtt_ms and busy_rounds 0 or more")


def borrowed_start(profile: Profile, *, take_over: Callable[[int, int], int] = as_they_come) -> Outcome:
    """Rows {what: start, variant, gbit_per_s, rtt_ms, round, ...} of fresh processes, and {what: neighbour, beside,
    tokens, seconds} of what the neighbour's own request had meanwhile.

    ``take_over`` says how many of the layers that have come are computed by the replica. It is asked here, for every
    number of them, and the processes of the starts are told its answers.
    """
    config = profile.section("borrowed", BorrowedConfig)
    setting = start_setting(profile, config.questions, config.tokens, config.readers)
    rows: Rows = []
    depth = setting.checkpoint.plan.depth
    taken = () if take_over is as_they_come else _taken(take_over, depth)
    with warm_server(setting.folder, depth, setting.theirs, setting.threads) as (address, _):
        ways = ((WHOLE, 0.0), (PRUNED, 0.0), *((BORROWED, rtt) for rtt in config.rtt_ms))
        starts = [
            (variant, rate, rtt, round_)
            for rate, (variant, rtt) in product(config.gbit_per_s, ways)
            for round_ in range(_rounds(config, variant, rate, rtt))
        ]
        random.Random(profile.seed).shuffle(starts)
        with ExitStack() as relays:
            links = product(config.gbit_per_s, config.rtt_ms)
            near = {(rate, rtt): relays.enter_context(shaped(address, rtt, rate)) for rate, rtt in links}
            for variant, rate, rtt, round_ in track(starts, desc="starts that borrow", unit="start"):
                row = _start(setting, variant, rate, near.get((rate, rtt), ""), taken)
                rows.append({"what": "start", "rtt_ms": rtt, "round": round_} | row)
            main = near[config.main_gbit_per_s, config.main_rtt_ms]
            for round_ in range(config.busy_rounds):
                rows += _beside(config, setting, (address, main), round_, taken)
    return Outcome(rows, provenance=setting.provenance)


def _rounds(config: BorrowedConfig, variant: str, rate: float, rtt: float) -> int:
    main = rate == config.main_gbit_per_s and rtt in (0.0, config.main_rtt_ms)
    return config.main_rounds if main else config.rounds


def _taken(take_over: Callable[[int, int], int], depth: int) -> tuple[int, ...]:
    """Return the rule's answer to each number of layers that have come. Raises ProfileError for more than have."""
    taken = tuple(int(take_over(come, depth)) for come in range(depth + 1))
    for come, layers in enumerate(taken):
        if not 0 <= layers <= come:
            raise ProfileError(f"take_over({come}, {depth}) is {layers}, where {come} layers have come")
    return taken


def _start(setting: StartSetting, variant: str, rate: float, neighbour: str, taken: tuple[int, ...]) -> dict[str, Any]:
    """One start over a link of ``rate`` whose bytes wait in memory. Raises FirstTokenError when it fails."""
    folder = setting.checkpoint.staged if variant == PRUNED else setting.folder
    start = {"variant": variant, "staged": str(folder), "neighbour": neighbour, "taken": taken}
    spec = BorrowSpec(**{**setting.common, **start})
    return one_trial(spec, TrialLink(rate, BUCKET, cold=False), module=TRIAL)


def _beside(
    config: BorrowedConfig, setting: StartSetting, addresses: tuple[str, str], round_: int, taken: tuple[int, ...]
) -> Rows:
    """The neighbour's own request alone, beside a start that borrows nothing, and beside one that does."""
    windows: list[tuple[str, float, float]] = []
    with own_request(setting.folder, addresses[0], setting.theirs, setting.threads) as running:
        begun = time.monotonic()
        time.sleep(config.alone_s)
        windows.append((ALONE, begun, begun + config.alone_s))
        for variant, address in ((WHOLE, ""), (BORROWED, addresses[1])):
            row = _start(setting, variant, config.main_gbit_per_s, address, taken)
            begun = float(row["arrived_at_s"])
            windows.append((variant, begun, begun + float(row["local_s"] or row["loaded_s"])))
        times = running.times_s()
    return [
        {"what": "neighbour", "beside": name, "round": round_, "seconds": end - start}
        | {"tokens": sum(start <= time_s < end for time_s in times)}
        for name, start, end in windows
    ]


# The figures and tables of notebook 56, drawn from a result alone.

WAY_LOOKS = {WHOLE: "S3", PRUNED: "S1", BORROWED: "measured"}


def first_tokens(recorded: Result | None, now: Result) -> Figure:
    """Seconds to the first token by the rate of the link, of the three ways; borrowing at every round trip."""
    from matplotlib.ticker import LogLocator

    fig, ax = panels(figsize=(9, 4.6))
    results = over(recorded, now)
    for shown in results:
        config, summary = shown.result.parameters["borrowed"], shown.result.summary
        rates = sorted(config["gbit_per_s"])
        for way, name in WAYS.items():
            if shown.library is not None and way != BORROWED:
                continue
            for rtt in sorted(config["rtt_ms"]) if way == BORROWED else [None]:
                trip = {} if rtt is None else {"rtt_ms": rtt}
                entries = [summary.get("ttft_p50_s", variant=way, gbit_per_s=rate, **trip) for rate in rates]
                label = f"{name}, {shown.who()}" if rtt in (None, config["main_rtt_ms"]) else None
                shown.line(ax, rates, entries, WAY_LOOKS[way], label=label)
        if shown is results[0]:
            half = [summary.value("ttft_p50_s", variant=WHOLE, gbit_per_s=rate) / 2 for rate in rates]
            label = f"goal: half of the whole model's, {shown.who()}"
            ax.plot(rates, half, "--", color=COLOURS["target"], linewidth=1.2, label=label)
    ax.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="first token after the request, s")
    rates = sorted({rate for shown in results for rate in shown.result.parameters["borrowed"]["gbit_per_s"]})
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    ax.yaxis.set_minor_formatter("{x:g}")
    fig.suptitle(_first_tokens_title(results[0].result))
    fig.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    return fig


def _first_tokens_title(result: Result) -> str:
    """Say over the main link in what share of a whole start's time the first token is there."""
    config = result.parameters["borrowed"]
    main = {"gbit_per_s": config["main_gbit_per_s"], "rtt_ms": config["main_rtt_ms"]}
    share = result.summary.value("ttft_x", variant=BORROWED, than=WHOLE, **main)
    start = f"Over {main['gbit_per_s']:g} Gbit/s a borrowing start"
    return f"{start} has its first token in {share:.2f} of a whole start's time"


def taking_over(recorded: Result | None, now: Result) -> Figure:
    """One start of each way over the main link: its own layers over time, and its tokens."""
    results = over(recorded, now)
    shape = 2, len(results)
    options = {"sharex": "col", "sharey": "row", "squeeze": False, "height_ratios": [3, 1.3]}
    fig, axes = panels(*shape, figsize=(9, 4.6), **options)
    for shown, (upper, lower) in zip(results, axes.T, strict=True):
        chosen = main_starts(shown.result)
        taken = chosen[BORROWED]["taken"]
        times = [0.0, *(time_s for time_s, _ in taken)]
        shares = [0.0, *(100 * layers / taken[-1][1] for _, layers in taken)]
        end = max(chosen[way]["times_s"][-1] for way in WAYS)
        moved = shown.library is not None and taken != main_starts(shown.library)[BORROWED]["taken"]
        ring = shown.style if moved else {}
        upper.fill_between([*times, end], [*shares, 100], step="post", color=COLOURS["single"], alpha=0.5, linewidth=0)
        upper.step([*times, end], [*shares, 100], where="post", color=COLOURS["measured"], **ring)
        upper.set(ylim=(0, 104), title=shown.who())
        for row, way in enumerate(WAYS):
            look, tick_s = LOOKS[WAY_LOOKS[way]], chosen[way]["times_s"]
            style = {"color": look.colour, "markersize": 14, "markeredgewidth": 1.5} | (ring if way == BORROWED else {})
            lower.plot(tick_s, [row] * len(tick_s), "|", **style)
        lower.set(xlim=(0, None), xlabel="after the request, s")
    axes[0, 0].set_ylabel("layers computed locally, %")
    categories(axes[1, 0], [f"tokens, {name}" for name in WAYS.values()], 0.4)
    fig.suptitle("A borrowing start has its first token early, and takes the layers over from then on")
    return fig


def main_starts(result: Result) -> dict[str, dict[str, Any]]:
    """Return for each way the start over the main link whose time to the first token is the median."""
    config, chosen = result.parameters["borrowed"], {}
    for way in WAYS:
        trip = {"rtt_ms": config["main_rtt_ms"]} if way == BORROWED else {}
        rows = rows_where(result.rows, what="start", variant=way, gbit_per_s=config["main_gbit_per_s"], **trip)
        chosen[way] = sorted(rows, key=lambda row: row[TTFT])[(len(rows) - 1) // 2]
    return chosen


def start_rows(recorded: Result | None, now: Result) -> Table:
    """The table of first tokens, of last ones and of bytes, by link and round trip."""
    waiting = {"whole, s": ("ttft_p50_s", 2, {"variant": WHOLE}), "stage 1, s": ("ttft_p50_s", 2, {"variant": PRUNED})}
    borrowing = {
        "borrowing, s": ("ttft_p50_s", 2),
        "over whole": ("ttft_x", 2, {"than": WHOLE}),
        "last token over whole": ("last_token_x", 2, {"than": WHOLE}),
        "all layers here, over whole": ("loaded_x", 2, {"than": WHOLE}),
        "lent, MB": ("lent_mb", 2),
        "tokens before all are here": ("lent_tokens", 0),
    }
    for shown in over(recorded, now):
        summary, config = shown.result.summary, shown.result.parameters["borrowed"]
        for rate, rtt in product(config["gbit_per_s"], config["rtt_ms"]):
            line = {"link and round trip": f"{rate:g} Gbit/s, {rtt:g} ms"} | cells(summary, waiting, gbit_per_s=rate)
            line |= cells(summary, borrowing, variant=BORROWED, gbit_per_s=rate, rtt_ms=rtt)
            yield line | {"whose": shown.who()}


def creation_rows(recorded: Result | None, now: Result) -> Table:
    """The table of first and last tokens from the creation of the process, over the main link."""
    for shown in over(recorded, now):
        summary = shown.result.summary
        for way, name in WAYS.items():
            yield {
                "start": name,
                "first token, s": interval(summary.get("ttft_process_s", variant=way), 2),
                "last token, s": interval(summary.get("last_token_process_s", variant=way), 2),
                "whose": shown.who(),
            }


def whose_rows(recorded: Result | None, now: Result) -> Table:
    """Return rows that say how often a start's tokens are the whole model's."""
    for shown in over(recorded, now):
        for way in (PRUNED, BORROWED):
            same = shown.result.summary.of("same_tokens_pct", variant=way, than=WHOLE)
            first = shown.result.summary.value("same_first_token_pct", variant=way, than=WHOLE)
            columns = {"first token is the whole model's, %": first, "all tokens are, %": same["value"]}
            yield {"start": WAYS[way], "starts": same["n"], **columns, "whose": shown.who()}


def neighbour_rows(recorded: Result | None, now: Result) -> Table:
    """Yield the rate of the neighbour's own request alone and beside each start; empty where not measured."""
    names = {ALONE: "alone", WHOLE: "beside a start that waits", BORROWED: "beside a start that borrows"}
    for shown in over(recorded, now):
        for case, name in names.items():
            yield {
                "the neighbour's own request": name,
                "tokens/s": interval(shown.result.summary.get("neighbour_tokens_per_s", case=case), 1),
                "lost, %": interval(shown.result.summary.get("neighbour_lost_pct", case=case, than=ALONE), 1),
                "whose": shown.who(),
            }
