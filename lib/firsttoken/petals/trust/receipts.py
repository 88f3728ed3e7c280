"""A client's receipts for what servers have done for it."""

from __future__ import annotations

from firsttoken.petals.keys import ServerKey, public_hex
from firsttoken.petals.message_headers import ACCOUNT
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.trust.ledger import Order, Receipt, signed_slip, tell_slip
from firsttoken.study.errors import SwarmError


async def give_receipts(swarm: Swarm, key: ServerKey, keeper: str) -> None:
    """Tell the ledger at ``keeper`` (HOST:PORT) what each server of ``swarm`` has served so far, signed with ``key``.

    Totals are those of this ``swarm``, which needs a key of its own: an older total of the same key is taken for a
    replay. Raises SwarmError where the keeper does not answer or refuses one.
    """
    for server, total in swarm.served.items():
        await tell_keeper(swarm, keeper, signed_slip(Receipt(public_hex(key), server, total), key))


async def tell_keeper(swarm: Swarm, keeper: str, slip: Receipt | Order) -> None:
    """Hand the ledger at ``keeper`` (HOST:PORT) a receipt or an order. Raises SwarmError as ``give_receipts``."""
    import grpc

    call, timeouts = swarm.channel(keeper).unary_unary(ACCOUNT), swarm.timeouts
    try:
        await call(tell_slip(slip), timeout=timeouts.answer_s, metadata=swarm.access.headers)
    except grpc.aio.AioRpcError as error:
        raise SwarmError(error.details() or error.code().name) from error
