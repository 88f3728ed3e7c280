"""The figures and tables of notebook 54, drawn from results alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firsttoken.study.stats import share
from firsttoken_studies.nb54_validation_and_privacy.swarm_privacy import GUESS, LINEAR, NEAREST
from firsttoken_studies.nb54_validation_and_privacy.swarm_validation import LIES, foreseen
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.plot import COLOURS, LOOKS, handle, panels
from firsttoken_studies.record.results import Result, Rows, Table
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def schematic() -> Schematic:
    """Draw an audit: who computes an answer again, and who is convicted; and what the first server reads."""
    alt = (
        "A client draws some of its answers and has a witness, another server of the same layers, compute them again. "
        "Where the two differ, a third server, the keeper, computes the answer, too, and convicts who signed something "
        "else. Below, a client keeps some layers, and sends hidden states to the first server, which reads the tokens "
        "of the prompt from them."
    )
    sketch = Schematic(20, 9.6, alt)
    sketch.text(0.2, 0.5, "An audit: some answers are computed again", heading=True)
    sketch.box(0.2, 2.2, "client", "other", width=2.2)
    for row, (name, answer, look) in enumerate(
        (("server", "4.1", "not reproduced"), ("witness", "3.0", "measured"), ("keeper", "3.0", "measured"))
    ):
        top = 1.1 + 1.15 * row
        sketch.arrow((2.6, 2.7), (6.3, top + 0.5))
        sketch.box(6.5, top, name, look, width=3)
        sketch.arrow((9.7, top + 0.5), (11.5, top + 0.5))
        sketch.box(11.7, top, answer, look, width=1.6)
    sketch.text(13.7, 1.6, "signed by the server")
    sketch.text(13.7, 2.75, "differs: ask the keeper")
    sketch.text(13.7, 3.9, "the server is convicted")
    sketch.text(0.2, 3.6, "the same inputs")
    sketch.text(0.2, 5.6, "The first server reads what it is sent", heading=True)
    sketch.box(0.2, 6.4, "my name is", "other", width=3.2)
    sketch.arrow((3.5, 6.9), (4.6, 6.9))
    sketch.box(4.7, 6.4, "local layers", "single", width=3.2)
    sketch.arrow((8.0, 6.9), (11.5, 6.9), "hidden states")
    sketch.box(11.7, 6.4, "first server", "not reproduced", width=3.2)
    sketch.arrow((13.3, 7.5), (13.3, 8.4))
    sketch.box(11.7, 8.4, "my name is", "other", width=3.2)
    return sketch


def caught(recorded: Result | None, now: Result) -> Figure:
    """Liars that are convicted within an answer, by the share of answers audited, and what the draws foresee."""
    results = over(recorded, now)
    config = results[0].result.parameters["validation"]
    most = max(rate for shown in results for rate in shown.result.parameters["validation"]["rates"])
    fig, axes = panels(1, len(config["lies"]), figsize=(9, 4), sharey=True, squeeze=False)
    percents = range(101)
    for ax, lie in zip(axes[0], config["lies"], strict=True):
        for shown in results:
            tokens = shown.result.parameters["validation"]["tokens"]
            expected = [100 * foreseen(lie, percent / 100, tokens) for percent in percents]
            if shown.library is None:  # a changed audit is held to what the library's draws foresee
                ax.plot(percents, expected, color=COLOURS["other"], linewidth=2, linestyle="--" if shown.own else "-")
            for rate in shown.result.parameters["validation"]["rates"]:
                shown.point(ax, 100 * rate, _caught(shown.result, lie, rate), "measured")
        ax.set_title(LIES[lie].replace(", ", ",\n").replace(" of the", "\nof the"), fontsize=10)
        ax.set(xlabel="answers audited, %", xlim=(0, 110 * most), ylim=(-3, 105))
    axes[0][0].set_ylabel("convicted within the answer, %")
    handles = []
    for shown in results:
        look, style = LOOKS["measured"], shown.style
        drawn_as = {name: style[name] for name in ("alpha", "path_effects") if name in style}
        label = f"measured with 95 %, {shown.who()}"
        handles.append(handle(color=look.colour, marker=look.marker, label=label, **drawn_as))
        if shown.library is not None:
            continue
        label = f"foreseen for {shown.result.parameters['validation']['tokens']} tokens, {shown.who()}"
        style = "--" if shown.own else "-"
        handles.append(handle(color=COLOURS["other"], linestyle=style, label=label))
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, handlelength=3.2)
    fig.suptitle(_caught_title(results[0].result))
    return fig


def _caught_title(result: Result) -> str:
    """Say how many of those who lie in all their answers were convicted, at the rate nearest a tenth."""
    config = result.parameters["validation"]
    rate = min(config["rates"], key=lambda share_audited: abs(share_audited - 0.1))
    caught_pct = _caught(result, config["lies"][0], rate)["value"]
    return f"Auditing {100 * rate:.0f} % of the answers convicts {caught_pct:.0f} % of those who lie in all of theirs"


def _caught(result: Result, lie: str, rate: float) -> dict[str, float] | None:
    """The share of liars that were convicted, %, with its exact interval; None where there were none."""
    outcomes = [row["caught_at"] >= 0 for row in result.rows if (row.get("lie"), row.get("rate")) == (lie, rate)]
    return share(sum(outcomes), len(outcomes)).summary("%", 100) if outcomes else None


def inverted(recorded: Result | None, now: Result) -> Figure:
    """Tokens read from what the first server is sent, by the layers that stay with the client."""
    fig, ax = panels(figsize=(9, 4.2))
    results = over(recorded, now)
    attacks = ((LINEAR, "measured", "linear map, learnt"), (NEAREST, "other", "nearest embedding"))
    for shown in results:
        depths, summary = shown.result.parameters["privacy"]["depths"], shown.result.summary
        for attack, look, label in attacks:
            entries = [summary.get("recovered_pct", variant=attack, layers=depth) for depth in depths]
            shown.line(ax, depths, entries, look, label=f"{label}, {shown.who()}")
        if shown.own and shown.library is None:
            guessed = summary.value("recovered_pct", variant=GUESS)
            ax.axhline(guessed, color=COLOURS["floor"], linewidth=1, label="always the commonest token, your run")
    ax.set(xlabel="local layers", ylabel="tokens recovered, %", ylim=(-3, 105))
    ax.xaxis.get_major_locator().set_params(integer=True)
    depth = min(results[0].result.parameters["privacy"]["depths"], key=lambda layers: abs(layers - 8))
    read_pct = _read(results[0].result, LINEAR, depth)["value"]
    fig.suptitle(f"Behind {depth} local layers a linear map still reads {read_pct:.0f} % of the tokens")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9)
    return fig


def honest_rows(recorded: Result | None, now: Result) -> Rows:
    """Return the findings of the checks on honest servers."""
    by_name: dict[str, dict[str, str]] = {}
    for shown in over(recorded, now):
        summary = shown.result.summary
        alarms = summary.of("alarms_pct", case="honest")
        alarmed = share(round(alarms["value"] * alarms["n"] / 100), alarms["n"]).summary("%", 100)
        largest = summary.value("difference_x", case="honest", across="most", than="tolerance")
        again = summary.of("recomputed_x", case="honest", than="computed")
        rounding = summary.value("difference", case="rounding")
        for name, cells in {
            "audits": str(alarms["n"]),
            "found to differ, %": interval(alarmed, 1),
            "convicted, those beside liars included": str(summary.value("convicted", case="honest")),
            "largest difference in an audit": f"{summary.value('difference', case='audit', across='most'):.1e}",
            "difference from float64 and from transformers, median": f"{rounding:.1e}",
            "largest of all, in parts of the tolerance": f"{largest:.3f}",
            "computed again when all is audited, of the answer's own": interval(again, 1),
        }.items():
            by_name.setdefault(name, {})[shown.who()] = cells
    return [{"of honest servers": name} | cells for name, cells in by_name.items()]


def privacy_rows(recorded: Result | None, now: Result) -> Table:
    """Return by number of local layers what they weigh, and the share of tokens that each attack recovers."""
    for shown in over(recorded, now):
        for depth in shown.result.parameters["privacy"]["depths"]:
            yield {
                "local layers": depth,
                "their weights, MB": f"{shown.result.summary.value('weights_mb', layers=depth):.0f}",
                "nearest embedding, %": interval(_read(shown.result, NEAREST, depth), 1),
                "linear map, %": interval(_read(shown.result, LINEAR, depth), 1),
                "whose": shown.who(),
            }


def _read(result: Result, attack: str, depth: int) -> dict[str, float]:
    return result.summary.of("recovered_pct", variant=attack, layers=depth)
