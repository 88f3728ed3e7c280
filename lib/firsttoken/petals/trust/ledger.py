"""Accounts of points, as one member keeps them (PETALS, section 4, incentives): what was served, set aside, and spent.

There is no consensus: each keeper has a ledger of its own, in memory, and its points are worth what the servers give
for them that trust this keeper. Nothing stops who has two keys from signing receipts to himself, nor a client from
signing none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, TypeVar

from firsttoken.petals.keys import ServerKey, check_signature, read_said, signature_of
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.parse_errors import Damaged
from firsttoken.study.parsing.schema import between, digits, shaped

MOST = 4096  # accounts of a ledger
_LARGEST = 1 << 53
_Key = Annotated[str, digits(64)]
_Points = Annotated[int, between(1, _LARGEST)]
_Signature = Annotated[str, digits(128)]
Slip = TypeVar("Slip", "Receipt", "Order")


@dataclass(frozen=True)
class Receipt:
    """Says how many tokens x blocks ``server`` has ever served ``client`` in all: the latest replaces those before
    it, so that none counts twice. Signed by the client."""

    client: _Key
    server: _Key
    total: _Points
    signature: _Signature = "0" * 128

    @property
    def signer(self) -> str:
        """The key that must have signed this: the client's."""
        return self.client


@dataclass(frozen=True)
class Order:
    """Sets ``points`` of ``owner``'s account with ``keeper`` aside as its deposit, or offers them for a place.

    Each order of an owner has a higher ``number`` than the one before it: none is carried out twice. Signed by the
    owner.
    """

    owner: _Key
    keeper: _Key
    purpose: Literal["deposit", "offer"]
    points: _Points
    number: _Points
    signature: _Signature = "0" * 128

    @property
    def signer(self) -> str:
        """The key that must have signed this: the owner's."""
        return self.owner


def signed_slip(slip: Slip, key: ServerKey) -> Slip:
    """``slip`` with the signature of its signer's ``key``."""
    return replace(slip, signature=signature_of(key, _domain(slip), asdict(slip)))


def check_slip(slip: Receipt | Order) -> None:
    """Raise SwarmError unless its signer signed it, and all in it is what it may be: points of 1 or more."""
    kind = type(slip).__name__.lower()
    try:
        shaped(type(slip), asdict(slip))
    except Damaged as error:
        raise SwarmError(f"this is no {kind}: {error}") from error
    check_signature(slip.signer, _domain(slip), asdict(slip), f"the {kind} of {slip.signer[:8]}")


def _domain(slip: Receipt | Order) -> bytes:
    return f"firsttoken swarm {type(slip).__name__.lower()} 1\n".encode()


@dataclass(frozen=True)
class _ToldSlip:
    receipt: Receipt | None = None
    order: Order | None = None


def tell_slip(slip: Receipt | Order) -> bytes:
    """What ``Ledger.told`` is told."""
    return json.dumps({type(slip).__name__.lower(): asdict(slip)}).encode()


@dataclass
class Account:
    """``points`` to spend, a ``deposit`` that a conviction takes, and the ``number`` of the latest order."""

    points: int = 0
    deposit: int = 0
    convicted: bool = False
    number: int = 0


class Ledger:
    """The accounts with ``keeper`` (a subkey)."""

    def __init__(self, keeper: str) -> None:
        self.keeper = keeper
        self._accounts: dict[str, Account] = {}
        self._served: dict[tuple[str, str], int] = {}  # by client and server, the total of the latest receipt

    def account(self, owner: str) -> Account:
        """The account of this key. Raises SwarmError where there are too many."""
        if owner not in self._accounts and len(self._accounts) >= MOST:
            raise SwarmError(f"{MOST} accounts are kept here, and no more")
        return self._accounts.setdefault(owner, Account())

    def check_standing(self, owner: str) -> None:
        """Raise SwarmError for one who was convicted."""
        if owner in self._accounts and self._accounts[owner].convicted:
            raise SwarmError(f"{owner[:8]} was convicted, and has no account here any more")

    def credit(self, receipt: Receipt) -> Account:
        """Credit a server with what is new of ``receipt``; return its account.

        Raises SwarmError for one that is forged, or no newer than the one that is known, as a replayed one is, and for
        a client that is the server itself.
        """
        check_slip(receipt)
        if receipt.client == receipt.server:
            raise SwarmError(f"{receipt.client[:8]} has signed a receipt for itself")
        self.check_standing(receipt.server)
        account = self.account(receipt.server)
        known = self._served.get((receipt.client, receipt.server), 0)
        if receipt.total <= known:
            raise SwarmError(f"a receipt of {receipt.total} points where {known} are known: it is replayed")
        if known == 0 and len(self._served) >= MOST * 16:
            raise SwarmError("too many pairs of clients and servers are known here")
        self._served[receipt.client, receipt.server] = receipt.total
        account.points += receipt.total - known
        return account

    def carry_out(self, order: Order, purpose: str) -> Account:
        """Take the points of ``order``, of this ``purpose``, from its owner's account, into its deposit or away.

        Raises SwarmError for one that is forged, replayed, another keeper's or of another purpose, and for more points
        than there are.
        """
        check_slip(order)
        if order.keeper != self.keeper or order.purpose != purpose:
            raise SwarmError(f"an order of {order.owner[:8]} is for another keeper, or no {purpose}")
        self.check_standing(order.owner)
        account = self.account(order.owner)
        if order.number <= account.number:
            raise SwarmError(f"order {order.number} of {order.owner[:8]} is not newer than {account.number}: replayed")
        if order.points > account.points:
            raise SwarmError(f"{order.owner[:8]} has {account.points} points here, not {order.points}")
        account.number = order.number
        account.points -= order.points
        if purpose == "deposit":
            account.deposit += order.points
        return account

    def refund(self, owner: str, points: int) -> None:
        """Give back what an offer took of this account, unless it was closed meanwhile."""
        account = self.account(owner)
        if not account.convicted:
            account.points += points

    def told(self, data: bytes) -> Account:
        """Do what a message says (a receipt, or an order for a deposit); return the account that it concerns.

        Raises SwarmError as ``credit`` and ``carry_out``, and for what is neither.
        """
        said = read_said(_ToldSlip, data, "what is said to an account cannot be read")
        if said.receipt is not None:
            return self.credit(said.receipt)
        if said.order is not None:
            return self.carry_out(said.order, "deposit")
        raise SwarmError("an account is told of a receipt or an order")

    def convict(self, server: str, accuser: str) -> int:
        """Close the account of ``server``, if it has one; its deposit, which is points of the accuser's from now on."""
        if (account := self._accounts.get(server)) is None:
            return 0
        taken, account.deposit, account.points, account.convicted = account.deposit, 0, 0, True
        if taken:
            self.account(accuser).points += taken
        return taken
