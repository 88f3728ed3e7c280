"""A client's session with one server, for consecutive blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

import torch
from torch import Tensor

from firsttoken.petals.message_headers import MOST_NAMES, NAMED_TOKENS
from firsttoken.petals.server_call import ServerCall, ServerFault
from firsttoken.petals.states import Stretch
from firsttoken.petals.wire import Message, decode, encode


class ServerSession:
    """Layers of a model on the server that ``call`` leads to, run on hidden states.

    ``known`` are the tokens of each sequence that the server has seen, ``commitment`` what it vouches for of its latest
    answer. Blocks of shared beginnings have names that are of this ``server`` (its subkey) alone; keys and values go to
    it in pieces of ``room`` bytes.
    """

    def __init__(self, call: ServerCall, server: str = "", room: int = 1 << 16) -> None:
        self.name, self.layers, self.known = call.name, call.layers, call.known
        self._call, self._server, self._room = call, server.encode(), room
        self._over: set[int] = set()  # sequences that the server was not yet told to be over
        self.answered_s = 0.0  # when it did so last, on the monotonic clock
        self.commitment = ""

    @property
    def steps(self) -> int:
        """Return the number of answered steps."""
        return self._call.steps

    @property
    def moved_bytes(self) -> int:
        """The bytes of messages, both ways."""
        return self._call.moved_bytes

    async def run(
        self,
        stretches: Sequence[Stretch],
        hidden: Tensor,
        first: int = 0,
        keys: Mapping[int, Sequence[bytes]] = MappingProxyType({}),
    ) -> Tensor:
        """``hidden`` [tokens, hidden] of ``stretches``, end to end, after the layers, or after those from ``first`` on.

        The full blocks of sequences in ``keys`` can be found by these from then on. Raises ServerFault when this server
        does not answer in time, or nonsense, or refuses.
        """
        answer = await self._answer(hidden, stretches, first, self._filled(stretches, keys))
        self._call.steps += 1
        for stretch in stretches:
            self.known[stretch.number] = stretch.end
        self.commitment = answer.commitment
        return answer.hidden

    async def adopt(self, keys: Mapping[int, Sequence[bytes]]) -> dict[int, int]:
        """Begin these sequences anew with what the server has of their blocks of ``keys``; return how many tokens that
        is. Raises ServerFault as ``run``, and for more than was asked."""
        most = MOST_NAMES // len(keys)
        names = {number: self._names(prefix_keys[:most]) for number, prefix_keys in keys.items()}
        answer = await self._answer(torch.empty(0, 0), names=names)
        shared = dict(answer.shared)
        wrong = shared.keys() != names.keys() or any(
            tokens % NAMED_TOKENS or tokens > NAMED_TOKENS * len(names[number]) for number, tokens in shared.items()
        )
        if wrong or len(answer.shared) > len(shared):
            raise ServerFault(f"{self.name} says that it has {answer.shared} of what begins {len(names)} sequences")
        self.known |= shared
        return shared

    async def fill(self, number: int, start: int, kv: Tensor, keys: Sequence[bytes]) -> int:
        """Send ``kv`` [layers, 2, kv_heads, tokens, head_dim] of a sequence from token ``start`` on, and return how
        many tokens of it the server has then; it may refuse them. Raises ServerFault as ``run``."""
        # as many tokens at once as take no more room than the states of the longest step of a float32 model
        most = max(1, self._room // max(1, kv[:, :, :, :1].nbytes))
        for first in range(0, kv.shape[3], most):
            some = kv[:, :, :, first : first + most]
            stretches = [Stretch(number, start + first, start + first + some.shape[3])]
            answer = await self._answer(torch.empty(0, 0), stretches, 0, self._filled(stretches, {number: keys}), some)
            if [shared_number for shared_number, _ in answer.shared] != [number] or answer.shared[0][1] > stretches[
                0
            ].end:
                raise ServerFault(f"{self.name} says that it has {answer.shared} of what it was sent")
            if (has := answer.shared[0][1]) < stretches[0].end:
                return has
        return start + kv.shape[3]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Tell the server that these sequences are over; one that is not there any more knows anyway."""
        self._over.update(number for number in numbers if self.known.pop(number, None) is not None)
        if not (finished := list(self._over)):
            return
        if await self._call.tell(encode(None, self._call.coding, finished=finished)):
            self._over.difference_update(finished)  # else the next step tells it, or finds out

    def close(self) -> None:
        self._call.close()

    def _filled(self, stretches: Sequence[Stretch], keys: Mapping[int, Sequence[bytes]]) -> dict[int, list[str]]:
        """The names of the blocks that ``stretches`` fill, of sequences in ``keys``."""
        places = {
            stretch.number: slice(stretch.start // NAMED_TOKENS, stretch.end // NAMED_TOKENS) for stretch in stretches
        }
        names = {number: self._names(keys[number][blocks]) for number, blocks in places.items() if number in keys}
        return {number: some for number, some in names.items() if some}

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [blake2b(key + self._server, digest_size=16).hexdigest() for key in keys]

    async def _answer(
        self,
        hidden: Tensor,
        stretches: Sequence[Stretch] = (),
        first: int = 0,
        names: Mapping[int, Sequence[str]] = MappingProxyType({}),
        kv: Tensor | None = None,
    ) -> Message:
        """Return the server's answer to ``hidden`` [tokens, hidden], or without tokens to ``kv`` or ``names`` alone.
        Raises as ``run``."""
        rows, finished = hidden.shape[0], list(self._over)
        message = encode(hidden if rows else None, self._call.coding, stretches, finished, first, names=names, kv=kv)
        data = await self._call.ask(message, rows)
        self._over.difference_update(finished)
        try:
            answer = decode(data, self._call.coding, hidden.shape[1], hidden.dtype, rows)
        except Exception as error:  # whatever goes wrong with its answer is this server's fault
            raise ServerFault(f"{self.name}: {error}") from error
        self.answered_s = time.monotonic()
        return answer
