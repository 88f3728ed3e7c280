"""The GPU that a simulation runs on: the operators of a card that were measured, published batch times, or a
profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from firsttoken.assets.dense_shape import DenseShape, MixtureShape, model_shape
from firsttoken.assets.manual_downloads import downloaded, names
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.simulation.costs.mixture_costs import layout, mixture_costs
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CARDS, OperatorTables, tables_from
from firsttoken.simulation.costs.profiled import ProfiledCosts
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import ProfileError

PUBLISHED = "yi-34b-a100"
SHARE = "-tp2"  # the end of the names of pinned profiles that are of one GPU's share


@dataclass(frozen=True)
class Hardware:
    """``costs`` is one of the ``CARDS`` whose operators were measured, ``PUBLISHED``, pinned files that were brought
    (env/brought.yaml), or a folder of one's own.

    On one of the ``CARDS`` a ``model`` (a name or the path of a config.json) is split over ``gpus`` of them, with
    weights as its config.json says or as ``weights``. Its layers and the KV blocks that fit beside its weights follow,
    where they are not given. Else ``layers`` are those of the model, and ``blocks`` its KV blocks of 16 tokens. A
    decode iteration, by which the paper sets its objectives (Table 3: five times as strict, 25 times as relaxed), is of
    ``decodes`` requests at ``context`` tokens.
    """

    costs: str
    decodes: int
    context: int
    layers: int = 0
    blocks: int = 0
    model: str = ""
    gpus: int = 1
    weights: str = ""

    def __post_init__(self) -> None:
        if (self.costs in CARDS) != bool(self.model):
            raise ProfileError(
                f"hardware: a model is given with one of {', '.join(CARDS)}, and with nothing else; costs is "
                f"{self.costs!r}, model {self.model!r}"
            )
        if self.model:
            operators = self._operators()
            object.__setattr__(self, "layers", operators.shape.layers)
            object.__setattr__(self, "blocks", self.blocks or operators.blocks)
        if min(self.layers, self.blocks, self.decodes, self.context) < 1:
            raise ProfileError("hardware: layers, blocks, decodes and context must be at least 1")

    @property
    def longest(self) -> int:
        """The most tokens of a request: those of the model's context, where it states one, that the KV blocks hold."""
        return min(self.tokens, (self._shape()[0].context if self.model else 0) or self.tokens)

    @property
    def tokens(self) -> int:
        """The number of tokens that the KV blocks hold."""
        return 16 * self.blocks

    @property
    def description(self) -> str:
        """The hardware in words: whose costs they are, or which model on how many of which card."""
        if not self.model:
            return self.costs
        bits = " in 8 bits" if self._shape()[0].stored == "fp8" else ""
        return f"{self.model}{bits} on {self.gpus} {self.costs} by measured operators"

    def read(self) -> Costs:
        """Read the costs. Raises AssetError for files that are not there, CorpusError for those that cannot be read."""
        if self.model:
            return self._operators()
        if self.costs == PUBLISHED:
            return BatchCosts()
        if self.costs.endswith(SHARE):
            raise ProfileError(
                f"{self.costs} is one GPU's share, and what the GPUs exchange is in no profile; simulate the model by "
                "the operators of a card (--hardware NAME --model MODEL --gpus N), whose all-reduces were measured"
            )
        return ProfiledCosts.read(downloaded(self.costs), self.layers, 1 if self.costs in names() else None)

    def _operators(self) -> OperatorCosts:
        tables, (dense, mixture) = OperatorTables.read(self.costs), self._shape()
        if mixture:
            return mixture_costs(tables, mixture, *layout(self.costs, mixture, self.gpus))
        return OperatorCosts.of(tables, dense, self.gpus, weights=dense.stored)

    def _shape(self) -> tuple[DenseShape, MixtureShape | None]:
        """The model's dense shape and, where it is one, the mixture of it; weights in the type that was asked for."""
        shape = model_shape(self.model)
        dense = shape.dense if isinstance(shape, MixtureShape) else shape
        dense = replace(dense, stored=self.weights or dense.stored)
        return dense, replace(shape, dense=dense) if isinstance(shape, MixtureShape) else None

    def iteration_s(self, costs: Costs) -> float:
        """The seconds of the decode iteration by which the objectives are set."""
        return costs.step_s([], [self.context] * self.decodes)

    def provenance(self, costs: Costs) -> dict[str, str]:
        """The text of a result about the costs that it was simulated on."""
        if self.model:
            beyond = "; ".join(getattr(costs, "beyond", ()))
            return {
                "kind": "simulated on measured operators",
                "costs": f"{self.description} of {tables_from()}",
                "beyond": beyond,
            }
        return {"kind": "simulated on profiled costs", "costs": self.costs, "sha256": getattr(costs, "sha256", "")}
