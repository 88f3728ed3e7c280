"""What the starts of one profile have in common: the checkpoint, the request, and the cores of each side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.progressiveserve.base_model import ServedConfig, load_served
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.staging import served_source
from firsttoken.study.dtypes import name_of
from firsttoken.study.profile import Profile
from firsttoken.study.system.cgroup_limits import halves_of_cores
from firsttoken_extras.layer_borrowing.embeddings import ends_first
from firsttoken_studies.nb13_cold_start.study import trial_specs
from firsttoken_studies.progressiveserve.coldstart.checkpoints import Checkpoint, served_checkpoint


@dataclass(frozen=True)
class StartSetting:
    """``checkpoint`` in the report's stages, and ``folder`` with the same model, its ends first; the replica has the
    cores ``ours``, and whoever lends ``theirs``, with as many ``threads`` each. ``common`` is what specs share."""

    checkpoint: Checkpoint
    folder: Path
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    threads: int
    common: Mapping[str, Any]

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the weights, with the cores that compute and the dtype."""
        notes = {"replica_cores": list(self.ours), "neighbour_cores": list(self.theirs), "computed_in": "float32"}
        return self.checkpoint.provenance | notes


def start_setting(profile: Profile, questions: str, tokens: int, readers: int) -> StartSetting:
    """Make the setting of starts that generate ``tokens`` for the first of ``questions`` with the served model of
    ``profile``, which is staged if it is not. Raises what staging raises."""
    check(profile.section("served", ServedConfig).needs(), ModelFacts(profile.model))
    served = load_served(profile)
    checkpoint, source = served_checkpoint(profile, served), served_source(served)
    name = f"{served.sha256[:12]}-{name_of(served.stored or served.model.dtype)}-ends-first"
    folder = checkpoint.staged.with_name(name)
    write_staged(source, ends_first(source.names, served.plan.depth), folder)
    ours, theirs = halves_of_cores()
    threads = len(ours) or max(1, torch.get_num_threads())
    common = asdict(trial_specs(profile, checkpoint, questions, readers)("whole_streamed"))
    common |= {"threads": threads, "dtype": "float32", "device": "cpu", "tokens": tokens, "cores": ours}
    return StartSetting(checkpoint, folder, ours, theirs, threads, common)
