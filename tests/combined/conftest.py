"""A tiny model staged with its ends first, what it says, and neighbours that lend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from borrowing import SHORT, SMALL, TIMEOUTS
from swarms import DEPTH, Asked, Here, asking, servers_imported
from transformers import PreTrainedModel

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import PreemptionPolicy
from firsttoken.petals.local_swarm import varied_model
from firsttoken.petals.timeouts import Timeouts
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals
from firsttoken_extras.layer_borrowing.embeddings import ends_first
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica
from firsttoken_studies.petals.fleet import ProxiedServer


@pytest.fixture(scope="session")
def lent() -> PreTrainedModel:
    """Its heads are wide enough for the kernels, which run variants of a model in one pass."""
    return varied_model(head_dim=16)


@pytest.fixture(scope="session")
def ends_folder(lent: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staged checkpoint, from which replica and neighbour load."""
    folder = tmp_path_factory.mktemp("borrowed") / "tiny"
    source = ModelSource(lent, None, Origin("random", None, "random"))
    write_staged(source, ends_first(source.names, DEPTH), folder)
    return folder


@pytest.fixture(scope="session")
def asked(lent: PreTrainedModel) -> Callable[[int, int], Asked]:
    return asking(lent)


@pytest.fixture
def here(ends_folder: Path) -> Iterator[Here]:
    with ExitStack() as stack:
        here = Here(ends_folder)
        stack.callback(here.close)
        yield here


@pytest.fixture(scope="module")
def neighbour(ends_folder: Path) -> Iterator[Here]:
    """One for a whole file: nothing of what it lends may be left in it."""
    here = Here(ends_folder)
    here.server = here.serve((0, DEPTH))[0]
    yield here
    here.close()


@pytest.fixture(scope="module")
def member(ends_folder) -> Iterator[Callable[[], ProxiedServer]]:
    """A neighbour in a process of its own, another one when it has been killed."""
    members: list[ProxiedServer] = []

    def up() -> ProxiedServer:
        if not members or members[-1].gone:
            members.append(ProxiedServer(ends_folder, f"0:{DEPTH}", []).ready())
            members[-1].gone = False
        return members[-1]

    yield up
    for one in members:
        one.close()


@pytest.fixture
def replica(lent: PreTrainedModel, neighbour: Here) -> Iterator[Callable[..., BorrowingReplica]]:
    made = []

    def make(
        address: str = "",
        config: EngineConfig = SMALL,
        model: str = "",
        lenders: Sequence[Lender] = (),
        policy: PreemptionPolicy | None = None,
        timeouts: Timeouts | None = None,
        blocks: int = 64,
        **pool: int,
    ) -> BorrowingReplica:
        """Its layers are those of the whole model, and used when they are said to have come; others are lent by
        ``lenders``, or all by who is at ``address``, which is the neighbour's unless given."""
        arrivals, executor = LayerArrivals(DEPTH), LiveExecutor(lent, blocks, **pool)
        found, patience = (address, SHORT) if address else (neighbour.server.record.address, TIMEOUTS)
        whole = [Lender(found, range(DEPTH))]
        lease = Lease(lenders or whole, model or neighbour.model, DEPTH, 32, timeouts=timeouts or patience)
        one = BorrowingReplica(executor, lent.model.layers, arrivals, lease, config, policy=policy)
        one.arrivals = arrivals
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session", autouse=True)
def imported() -> Iterator[None]:
    with servers_imported():
        yield
