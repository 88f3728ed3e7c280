"""Which GPU a simulation runs on: the published batch times that are always there, or a profile that was brought."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.costs.profiled import ProfiledCosts
from firsttoken.engine.costs.sarathi_artifact import BatchCosts
from firsttoken.study.errors import ProfileError

PUBLISHED = "yi-34b-a100"


@dataclass(frozen=True)
class Hardware:
    """``costs`` is ``PUBLISHED``, pinned files that were brought (env/brought.yaml), or a folder of one's own.

    ``layers`` are those of the model on it, ``blocks`` its KV blocks of 16 tokens. A decode iteration, by which the
    paper sets its objectives (Table 3: five times as strict, 25 times as relaxed), is of ``decodes`` requests at
    ``context`` tokens.
    """

    costs: str
    layers: int
    blocks: int
    decodes: int
    context: int

    def __post_init__(self) -> None:
        if min(self.layers, self.blocks, self.decodes, self.context) < 1:
            raise ProfileError("hardware: layers, blocks, decodes and context must be at least 1")

    @property
    def tokens(self) -> int:
        """The number of tokens that the KV blocks hold."""
        return 16 * self.blocks

    def read(self) -> Costs:
        """Read the costs. Raises AssetError for files that are not there, CorpusError for those that cannot be read."""
        return BatchCosts() if self.costs == PUBLISHED else ProfiledCosts.read(downloaded(self.costs), self.layers)

    def iteration_s(self, costs: Costs) -> float:
        """The seconds of the decode iteration by which the objectives are set."""
        return costs.step_s([], [self.context] * self.decodes)

    def provenance(self, costs: Costs) -> dict[str, str]:
        """The text of a result about the costs that it was simulated on."""
        return {"kind": "simulated on profiled costs", "costs": self.costs, "sha256": getattr(costs, "sha256", "")}
