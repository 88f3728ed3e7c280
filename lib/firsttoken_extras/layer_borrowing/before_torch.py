"""The first tokens of a start that borrows, before torch is imported: the model's ends are here, a lender has the rest.

Layers that come meanwhile are left to torch. While it is imported all layers are lent, as a token costs no more so: the
neighbour is warm, and this process's cores are wanted by the import.
"""

from __future__ import annotations

import numpy as np

from firsttoken.engine.native.exports import narrowed, widened
from firsttoken.engine.numpy_model import NumpyModel
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.message_headers import laid_out, told_step, usual_message
from firsttoken.petals.routing import check_cover
from firsttoken.petals.server_call import ServerFault
from firsttoken.petals.states import MOST_TOKENS, Stretch, check_range
from firsttoken.progressiveserve.checkpoint.manifest import PartFile
from firsttoken.progressiveserve.loading.reader import ReadBefore
from firsttoken.progressiveserve.loading.stage_weights import StageWeights
from firsttoken.study.errors import SwarmError
from firsttoken_extras.layer_borrowing.lender import Lending, NeighbourGone, OpenSession

NUMBER = 0
"""What the lender knows the answer as: the first request of an engine has this number."""


class EndsWeights(StageWeights):
    """Embedding, norm and head of a staged checkpoint, packed as they come; its layers are read for torch alone."""

    def read(self) -> ReadBefore:
        """The ends that have been read, and the layers as they come. Raises what reading the ends raised."""
        self.norm()
        self.head()
        return ReadBefore(self._files, self._decoded, self._reader)

    def _packs(self, part: PartFile) -> bool:
        return part.layer is None


class LentLayers:
    """All layers of a model by ``lending``, for one answer. Opening the session waits for nobody.

    Raises SwarmError for an address that may not be asked.
    """

    def __init__(self, lending: Lending) -> None:
        self.lending = lending
        self.gone = ""  # why nothing is lent any more
        self.session: OpenSession | None = wait_for(_opened(lending))

    def run(self, states: np.ndarray, start: int) -> np.ndarray:
        """``states`` [tokens, width] in float32 of the answer's tokens from ``start`` on, behind all layers.

        Raises NeighbourGone when the lender does not answer in time, or nonsense, or refuses, or has lost the session.
        """
        if self.session is None:
            raise NeighbourGone(self.gone)
        try:
            pieces = range(0, len(states), MOST_TOKENS)
            parts = [self._ask(states[first : first + MOST_TOKENS], start + first) for first in pieces]
        except SwarmError as error:
            self.close(str(error))
            raise NeighbourGone(self.gone) from error
        return np.concatenate(parts)

    def handed_over(self) -> OpenSession | None:
        """The session, which another client goes on with; None where nothing is lent any more."""
        session, self.session = self.session, None
        self.gone = self.gone or "another client goes on with it"
        return session

    def close(self, why: str = "the answer is over") -> None:
        """End the session."""
        if (session := self.handed_over()) is not None:
            self.gone = why
            wait_for(_end(session))

    def _ask(self, states: np.ndarray, start: int) -> np.ndarray:
        call, tokens = self.session.call, len(states)
        metadata = {"step": told_step([Stretch(NUMBER, start, start + tokens)])}
        numbers = np.ascontiguousarray(states, np.float32)
        data = wait_for(call.ask(laid_out(numbers.data, "F32", numbers.shape, metadata), tokens))
        call.steps += 1
        said = usual_message(data)
        if said is None or (said.dtype, said.shape) != ("F32", numbers.shape):
            raise ServerFault(f"{call.name}: its answer is no float32 states of {list(numbers.shape)}")
        found = np.frombuffer(data, np.float32, numbers.size, said.start).reshape(numbers.shape)
        check_range(float(found.min()), float(found.max()))
        call.known[NUMBER] = start + tokens
        return found


class LentModel(NumpyModel):
    """The model whose ends are ``weights`` and whose layers are ``lent``, for one answer of at most ``context``
    tokens. Raises SwarmError unless these are all layers."""

    weights: EndsWeights

    def __init__(self, weights: EndsWeights, lent: LentLayers, context: int = 4096, threads: int | None = None) -> None:
        super().__init__(weights, context, threads)
        check_cover([lent.lending.lender.layers], range(self.config.num_hidden_layers))
        self.lent = lent

    def _through(self, states: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Do what the base does, by the lender. Raises NeighbourGone."""
        entering = widened(states) if self.dtype == "bfloat16" else states
        return narrowed(self.lent.run(entering, int(places[0])), self.dtype)


async def _opened(lending: Lending) -> OpenSession:
    return lending.open()


async def _end(session: OpenSession) -> None:
    session.call.close()
    await session.channel.close()
