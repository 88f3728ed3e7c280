"""What 8 bits cost and gain (Tables 1 and 2): perplexity with 8-bit weights and states, bytes, seconds of a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import PINNED, load_model, model_name
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.linear8 import THRESHOLD, UNROUNDED, Linear8, resting_bytes, to_8_bits
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.petals.int8_transport import pack, packed_bytes, unpack
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, share
from firsttoken.study.summary import Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.chain_costs import decode_step
from firsttoken_studies.record.overlay import DrawnResult, name_results, over
from firsttoken_studies.record.plot import COLOURS, panels
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, rows_where
from firsttoken_studies.record.schematic import Schematic
from firsttoken_studies.record.show import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PLAIN, STATES, EVERY, BOTH = "plain", "states", "states_every_layer", "both"
WEIGHTS, TOGETHER = "weights", "weights_outliers_among_the_rest"
INPUTS_KEPT, SERVED = "weights_inputs_kept", "weights_inputs_kept_and_states"
WHOLE = "16_bits"
STEPS = {WHOLE: None, "8_bits": THRESHOLD, "8_bits_inputs_kept": UNROUNDED}
"""What a step is timed of, and the threshold of its products in 8 bits."""
PREFILL = "prefill"

Wire: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]  # states as the next server gets them, and the bytes sent
Product: TypeAlias = Callable[..., Tensor]  # (x [tokens, in], weight [out, in], threshold) -> [tokens, out]


def packed_wire(hidden: Tensor) -> tuple[Tensor, int]:
    """Return ``hidden`` as the library's servers send it to each other, and the bytes that are sent."""
    packed = pack(hidden)
    return unpack(packed, hidden.dtype), packed_bytes(packed)


class ProductOfCell(nn.Module):
    """A linear layer in 8 bits that multiplies by a notebook's function in place of the library's product."""

    def __init__(self, mixed_product: Product, linear: Linear8) -> None:
        super().__init__()
        self.mixed_product = mixed_product
        self.register_buffer("weight", linear.dequantized())
        self.register_buffer("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        result = self.mixed_product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]).to(x.dtype)
        return result if self.bias is None else result + self.bias


def replace_products(model: nn.Module, make: Callable[[Linear8], nn.Module]) -> None:
    """Put what ``make`` makes of it in the place of every linear layer in 8 bits of ``model``."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear8):
                setattr(module, name, make(child))


@dataclass(frozen=True)
class EightBitsConfig:
    """Perplexity over ``windows`` of ``window_tokens`` tokens, ``batch`` at once; states cross the wire before and
    after each of ``servers`` equal spans. A step is timed ``repeats`` times for each of ``batches`` requests of
    ``context`` tokens, and their prompts' prefill for each of ``prefills``, 16 bits and both products of 8 in turns."""

    windows: int
    window_tokens: int
    batch: int
    servers: int
    batches: tuple[int, ...]
    context: int
    repeats: int
    prefills: tuple[int, ...] = ()

    def needs(self) -> list[Need]:
        """Require a text that holds the windows, and a model with the spans and the context."""
        return [
            Need("eight_bits.windows x window_tokens", self.windows * self.window_tokens, text_of("test")),
            Need("eight_bits.window_tokens", self.window_tokens, CONTEXT),
            Need("eight_bits.context", self.context + 1, CONTEXT),
            Need("eight_bits.servers", self.servers, LAYERS),
        ]


def eight_bits(profile: Profile, *, over_the_wire: Wire = packed_wire, mixed_product: Product | None = None) -> Outcome:
    """Rows {what: quality | bytes | outliers | step, ...}; quality in float32, so that only the 8 bits differ.

    Quality is that of the states that ``over_the_wire`` gives, and of ``mixed_product``, by default the library's. A
    step is timed by the library's products alone.
    """
    config = profile.section("eight_bits", EightBitsConfig)
    check(config.needs(), ModelFacts(profile.model))
    device = profile.torch_device()
    base = load_model(profile.model, device=device)
    windows = token_windows(running_text("test"), base.tokenizer, config.window_tokens, config.windows).to(device)
    rows = _quality(base.model, windows, config, over_the_wire, mixed_product)
    rows += _bytes(base.model, over_the_wire)
    timed = load_model(profile.model, dtype=profile.torch_dtype(), device=device, with_tokenizer=False)
    rows += _steps(timed.model, windows, config)
    return Outcome(rows, provenance=base.provenance.as_dict())


def _quality(
    model: nn.Module, windows: Tensor, config: EightBitsConfig, wire: Wire, mixed_product: Product | None
) -> Rows:
    depth = len(layers_of(model))
    spans = [depth * server // config.servers for server in range(config.servers)]
    inputs, every = [*layers_of(model), model.model.norm], range(depth + 1)
    small, together, served = (copy.deepcopy(model) for _ in range(3))
    for module, threshold in ((small, THRESHOLD), (together, math.inf), (served, UNROUNDED)):
        to_8_bits(layers_of(module), threshold)
    if mixed_product is not None:
        replace_products(small, partial(ProductOfCell, mixed_product))
        replace_products(together, partial(ProductOfCell, partial(mixed_product, threshold=math.inf)))
    small_inputs, served_inputs = ([*layers_of(module), module.model.norm] for module in (small, served))
    counted = [0, 0]
    variants: list[tuple[str, nn.Module, Sequence[nn.Module]]] = [
        (PLAIN, model, ()),
        (STATES, model, [inputs[index] for index in (*spans, depth)]),
        (EVERY, model, [inputs[index] for index in every]),
        (WEIGHTS, small, ()),
        (TOGETHER, together, ()),
        (BOTH, small, [small_inputs[index] for index in (*spans, depth)]),
        (INPUTS_KEPT, served, ()),
        (SERVED, served, [served_inputs[index] for index in (*spans, depth)]),
    ]
    rows: Rows = []
    for variant, module, crossed in track(variants, desc="quality"):
        crossing = partial(_crossing, wire)
        hooks = [layer.register_forward_pre_hook(crossing, with_kwargs=True) for layer in crossed]
        if variant == WEIGHTS:
            linears = [layer for layer in module.modules() if isinstance(layer, Linear8 | ProductOfCell)]
            hooks += [linear.register_forward_pre_hook(_counter(counted)) for linear in linears]
        losses, best = _losses(module, windows, config.batch)
        for hook in hooks:
            hook.remove()
        if variant == PLAIN:
            reference = best
        agree = (best == reference).float().mean(1).tolist()
        rows += [
            {"what": "quality", "variant": variant, "window": index, "text_nll": loss, "agree": agree[index]}
            for index, loss in enumerate(losses)
        ]
    return [*rows, {"what": "outliers", "values": counted[1], "outliers": counted[0]}]


def _crossing(
    wire: Wire, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hidden states that a module is given, as the next server gets them."""
    if args:
        return (wire(args[0])[0], *args[1:]), kwargs
    return args, kwargs | {"hidden_states": wire(kwargs["hidden_states"])[0]}


def _counter(counted: list[int]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        counted[0] += int((args[0].abs() >= THRESHOLD).sum())
        counted[1] += args[0].numel()

    return count


@torch.inference_mode()
def _losses(model: nn.Module, windows: Tensor, batch: int) -> tuple[list[float], Tensor]:
    """Nats a token of each window, and the likeliest token at each place [windows, tokens - 1]."""
    losses, best = [], []
    for ids in windows.split(batch):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        token_losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses += token_losses.view(len(ids), -1).mean(1).tolist()
        best.append(argmax_tokens(logits))
    return losses, torch.cat(best)


def _bytes(model: nn.Module, wire: Wire) -> Rows:
    """Return the bytes of a token's hidden states and of all layers' weights, in 16 and in 8 bits."""
    states = torch.ones(1, 1, model.config.hidden_size)
    _, sent = wire(states)
    layers = copy.deepcopy(layers_of(model)).bfloat16()
    weights = resting_bytes(layers)
    to_8_bits(layers)
    return [
        {"what": "bytes", "of": "states", "bytes16": 2 * states.numel(), "bytes8": sent},
        {"what": "bytes", "of": "weights", "bytes16": weights, "bytes8": resting_bytes(layers)},
    ]


@torch.inference_mode()
def _steps(model: nn.Module, windows: Tensor, config: EightBitsConfig) -> Rows:
    timed = {}
    for name, threshold in STEPS.items():
        timed[name] = copy.deepcopy(model)
        if threshold is not None:
            to_8_bits(layers_of(timed[name]), threshold)
        fuse(timed[name])  # as servers run them
    text = windows.flatten()
    rows: Rows = []
    for case, batch in [*product(["step"], config.batches), *product([PREFILL], config.prefills)]:
        wanted = batch * (config.context + 1)
        ids = text.repeat(-(-wanted // len(text)))[:wanted].view(batch, -1)
        prompts = ids[:, :-1]
        steps = {
            name: decode_step(variant_model, ids) if case == "step" else partial(variant_model.model, prompts)
            for name, variant_model in timed.items()
        }
        for repeat, (name, step) in product(range(-1, config.repeats), steps.items()):  # the first only warms up
            with Stopwatch(ids.device) as watch:
                step()
            row = {"what": case, "of": name, "batch": batch, "repeat": repeat, "seconds": watch.seconds}
            rows += [row] if repeat >= 0 else []
    return rows


def eight_bits_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Perplexity lost by variant (per cent, paired by window), bytes over 16 bits, seconds over 16 bits by batch."""
    quality = frame_of(rows, what="quality")
    plain = quality[quality.variant == PLAIN].text_nll.to_numpy()
    summary, perplexity = Summary(), bootstrap(plain, lambda sample: float(np.exp(sample.mean())))
    summary.add("perplexity", perplexity.summary(), variant=PLAIN)
    for variant, variant_rows in quality[quality.variant != PLAIN].groupby("variant", sort=False):
        lost = bootstrap(variant_rows.text_nll.to_numpy() - plain, lambda sample: float(100 * np.expm1(sample.mean())))
        summary.add("perplexity_lost_pct", lost.summary("%"), variant=variant, than=PLAIN)
        summary.by(variant_rows, {"variant": "variant"}, {"same_token_pct": ("agree", "mean", "%", 100)}, than=PLAIN)
    (outliers,) = rows_where(rows, what="outliers")
    summary.add("outliers_pct", share(outliers["outliers"], outliers["values"]).summary("%", 100))
    for row in rows_where(rows, what="bytes"):
        summary.add("bytes_x", {"value": row["bytes8"] / row["bytes16"], "unit": "x"}, variant=row["of"], than=WHOLE)
    timed = frame_of([row for row in rows if row["what"] in ("step", PREFILL)])
    for (case, batch), steps in timed.groupby(["what", "batch"], sort=False):
        by_name = {name: step_rows.seconds.to_numpy() for name, step_rows in steps.groupby("of", sort=False)}
        tokens = batch * (parameters["eight_bits"]["context"] if case == PREFILL else 1)
        labels = {"batch": batch} | ({"case": PREFILL} if case == PREFILL else {})
        for name, seconds in by_name.items():
            rate = bootstrap(seconds, lambda sample, n=tokens: float(n / np.median(sample)))
            summary.add("tokens_per_s", rate.summary("tokens/s"), variant=name, **labels)
            if name != WHOLE:
                pairs = np.array([seconds, by_name[WHOLE]]).T
                ratio = bootstrap(pairs, lambda sample: float(100 * (np.divide(*np.median(sample, 0)) - 1)))
                summary.add("slower_pct", ratio.summary("%"), variant=name, than=WHOLE, **labels)
    return summary


VARIANTS = {
    "states": "hidden states, between three servers",
    "states_every_layer": "hidden states, after every layer",
    "weights_inputs_kept": "weights alone",
    "weights": "weights and inputs (LLM.int8)",
    "weights_outliers_among_the_rest": "weights and inputs, outliers in the integers",
    "weights_inputs_kept_and_states": "weights alone, states between servers",
    "both": "weights and inputs, states between servers",
}
STEP_NAMES = {"16_bits": "16 bits", "8_bits": "8 bits, inputs too", "8_bits_inputs_kept": "8 bits, inputs as they are"}
_PAPER = {"OPT-175B": (75.3, 74.9), "BLOOM-176B": (70.1, 70.3)}  # average accuracy of Table 1 in 16 and in 8 bits


def schematic() -> Schematic:
    """Draw how states become whole numbers for the wire, and which inputs of a product do not."""
    alt = (
        "On the wire, a block of a token's values becomes whole numbers of 8 bits and one scale. In a product, inputs "
        "become whole numbers, too, but an outlier, such as 30 among values of about 1, is multiplied apart."
    )
    sketch = Schematic(20, 8.4, alt)
    sketch.text(0.2, 0.5, "On the wire: a block of values becomes whole numbers and one scale", heading=True)
    sketch.text(0.2, 4.5, "In a product: an outlier stays out of the whole numbers", heading=True)
    for top, values in ((1, ("0.5", "-1.2", "2.4", "0.1")), (5, ("0.5", "-1.2", "30.0", "0.1"))):
        for column, value in enumerate(values):
            sketch.box(0.2 + 1.9 * column, top, value, "mark" if value == "30.0" else "single", width=1.8)
        sketch.arrow((8, top + 0.5), (10, top + 0.5), "round")
    for column, code in enumerate(("26", "-64", "127", "5")):
        sketch.box(10.2 + 1.6 * column, 1, code, "measured", width=1.5)
    sketch.text(16.9, 1.5, "x 0.019")
    sketch.text(0.2, 2.5, "16 bits each")
    sketch.text(10.2, 2.5, "8 bits each, and one scale")
    for column, code in enumerate(("53", "-127", "", "11")):
        sketch.box(10.2 + 1.6 * column, 5, code, "measured", width=1.5, missing=not code)
    sketch.text(16.9, 5.5, "x 0.0094")
    sketch.box(13.4, 6.6, "30.0", "mark", width=1.5)
    sketch.text(15.2, 7.1, "multiplied apart")
    return sketch


def quality(recorded: Result | None, now: Result) -> Figure:
    """Perplexity lost by what is in 8 bits, with intervals over windows, and the goal."""
    fig, ax = panels(figsize=(9, 4.2))
    results = over(recorded, now)
    for shown in results:
        for position, variant in enumerate(VARIANTS):
            entry = shown.result.summary.get("perplexity_lost_pct", variant=variant, than=PLAIN)
            shown.point(ax, position + shown.shift, entry, "measured", along="x")
    ax.axvline(0, color=COLOURS["floor"], linewidth=1)
    ax.axvline(1, color=COLOURS["target"], linestyle="--", linewidth=1.5)
    ax.annotate("goal: below 1 %", (1, -0.5), (5, 0), textcoords="offset points", fontsize=9, va="center")
    ax.set_yticks(range(len(VARIANTS)), list(VARIANTS.values()))
    ax.set(ylim=(len(VARIANTS) - 0.5, -0.9), xlabel="perplexity lost, %, paired by window of text")
    last = results[-1 if results[-1].library else 0].result.summary  # of few windows no title is made
    lost = {variant: last.value("perplexity_lost_pct", variant=variant, than=PLAIN) for variant in (STATES, WEIGHTS)}
    fig.suptitle(
        f"{lost[STATES]:.2f} % lost by 8-bit states between servers, {lost[WEIGHTS]:.2f} % by LLM.int8's product"
    )
    name_results(fig, results, "perplexity_lost_pct")
    return fig


def model_title(result: Result) -> str:
    """Return the model of ``result`` as figures and tables name it."""
    model = model_name(str(result.parameters["model"]))
    return "SmolLM2-135M" if model == PINNED else model


def by_model(recorded: Result | None, now: Result, able: Result | None) -> list[tuple[str, DrawnResult]]:
    """Return the results of the model of ``now`` and that of an ``able`` one, each with its model's name."""
    second = [] if able is None else [DrawnResult(able, own=False)]
    return [(model_title(shown.result), shown) for shown in (*over(recorded, now), *second)]


def table_1_rows(recorded: Result | None, now: Result, able: Result | None = None) -> Table:
    """Table 1's rows, and those of the models here below them: perplexity where the paper has accuracy."""
    for model, pair in _PAPER.items():
        for bits, accuracy in zip((16, 8), pair, strict=True):
            yield {"model": f"{model}, paper", "bits": bits, "accuracy, average of 3 tasks, %": accuracy}
    for model, shown in by_model(recorded, now, able):
        summary, named = shown.result.summary, f"{model}, {shown.who()}"
        plain = summary.of("perplexity", variant=PLAIN)
        yield {"model": named, "bits": 16, "perplexity": interval(plain, 2)}
        for variant, name in VARIANTS.items():
            lost = summary.get("perplexity_lost_pct", variant=variant, than=PLAIN)
            same = summary.get("same_token_pct", variant=variant, than=PLAIN)
            if lost is not None:
                perplexity = plain["value"] * (1 + lost["value"] / 100)
                row = {"model": named, "bits": f"8: {name}", "perplexity": f"{perplexity:.2f}"}
                row |= {"lost, %, paired": interval(lost, 2), "same likeliest token, %": interval(same, 1)}
                yield row


def speed_rows(recorded: Result | None, now: Result, able: Result | None = None) -> Table:
    """Tokens a second of all layers in 16 bits and by both products of 8, how much slower these are, by requests."""
    paper = {1: "5", 8: "negligible", 32: "negligible"}
    for model, shown in by_model(recorded, now, able):
        if shown.library is not None:  # whose steps are the library's, too
            continue
        for entry in shown.result.summary.all("tokens_per_s"):
            labels = entry["where"]
            in_paper = labels["variant"] == "8_bits" and "case" not in labels
            yield {
                "requests": labels["batch"],
                "of": labels.get("case", "a step"),
                "weights": STEP_NAMES[labels["variant"]],
                "tokens/s": interval(entry, 1),
                "slower, %": interval(shown.result.summary.get("slower_pct", **labels, than=WHOLE), 1),
                "slower in the paper, %": paper.get(labels["batch"], "") if in_paper else "",
                "model": model,
                "whose": shown.who(),
            }


def byte_rows(recorded: Result | None, now: Result) -> Table:
    """Bytes in 8 bits over those in 16, and the share of outliers, beside the paper's."""
    rows_said = {
        "weights, of their 16-bit bytes": ("about half", "bytes_x", {"variant": "weights", "than": WHOLE}),
        "hidden states on the wire, of their 16-bit bytes": ("half", "bytes_x", {"variant": "states", "than": WHOLE}),
        "outliers, %": ("0.1", "outliers_pct", {}),
    }
    for label, (paper, measure, labels) in rows_said.items():
        yield {
            "what": label,
            "paper": paper,
            "recorded": None if recorded is None else recorded.summary.value(measure, **labels),
            "measured": now.summary.value(measure, **labels),
        }
        changed = (now.with_mechanism or now).summary.value(measure, **labels)
        if changed != now.summary.value(measure, **labels):
            yield {"what": f"{label}: your mechanism", "measured": changed}
