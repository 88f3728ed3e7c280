"""The GPU that a simulation runs on: the operators of a card that were measured, published batch times, or a
profile."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.assets.dense_shape import MixtureShape, model_shape
from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.simulation.costs.mixture_costs import layout, mixture_costs
from firsttoken.simulation.costs.operator_costs import OperatorCosts
from firsttoken.simulation.costs.operator_tables import CARDS, OperatorTables, tables_from
from firsttoken.simulation.costs.profiled import ProfiledCosts
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import ProfileError

PUBLISHED = "yi-34b-a100"


@dataclass(frozen=True)
class Hardware:
    """``costs`` is one of the ``CARDS`` whose operators were measured, ``PUBLISHED``, pinned files that were brought
    (env/brought.yaml), or a folder of one's own.

    On one of the ``CARDS`` a ``model`` (a name or the path of a config.json) is split over ``gpus`` of them; a mixture
    of experts has its weights in 8 bits. Its layers and the KV blocks that fit beside its weights follow, where they
    are not given. Else ``layers`` are those of the model, and ``blocks`` its KV blocks of 16 tokens. A decode
    iteration, by which the paper sets its objectives (Table 3: five times as strict, 25 times as relaxed), is of
    ``decodes`` requests at ``context`` tokens.
    """

    costs: str
    decodes: int
    context: int
    layers: int = 0
    blocks: int = 0
    model: str = ""
    gpus: int = 1
    weights: str = "bfloat16"

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
    def tokens(self) -> int:
        """The number of tokens that the KV blocks hold."""
        return 16 * self.blocks

    @property
    def description(self) -> str:
        """The hardware in words: whose costs they are, or which model on how many of which card."""
        if not self.model:
            return self.costs
        bits = " in 8 bits" if isinstance(model_shape(self.model), MixtureShape) else ""
        return f"{self.model}{bits} on {self.gpus} {self.costs} by measured operators"

    def read(self) -> Costs:
        """Read the costs. Raises AssetError for files that are not there, CorpusError for those that cannot be read."""
        if self.model:
            return self._operators()
        return BatchCosts() if self.costs == PUBLISHED else ProfiledCosts.read(downloaded(self.costs), self.layers)

    def _operators(self) -> OperatorCosts:
        tables, shape = OperatorTables.read(self.costs), model_shape(self.model)
        if isinstance(shape, MixtureShape):
            return mixture_costs(tables, shape, *layout(self.costs, shape, self.gpus))
        return OperatorCosts.of(tables, shape, self.gpus, weights=self.weights)

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
