"""What members say to each other about records: one asks with its own, the other answers with a page of those it knows.

A list of any length travels in pages of ``PAGE_BYTES``, each a message that every member takes; who asks names the
subkey behind which the next page begins.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from firsttoken.petals.access import Access, Channel
from firsttoken.petals.keys import ServerKey, check_signature, read_said, signature_of
from firsttoken.petals.records import Record, TwinError, read_record
from firsttoken.petals.wire import EXCHANGE
from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.schema import digits

TALK = 2  # the version of these messages
ANSWER_S = 2.0  # within which a member answers
PAGE_BYTES = 1 << 15  # of the records of one message: half of the smallest limit of a connection
MOST_PAGES = 32  # that are asked of one member
ASKED_BYTES = 4096  # of a message that asks, which holds one record at most
_MOST_RECORDS = 128  # of a page: a record is 500 bytes or more
_MOST_TEXT = 300  # characters of what is said of a record
_PROOF = b"firsttoken swarm proof 1\n"


def _short(value: str) -> str:
    return "" if len(value) <= _MOST_TEXT and value.isprintable() else f"expected a line of {_MOST_TEXT} characters"


def _few(value: tuple[str, ...]) -> str:
    return "" if len(value) <= 16 else "expected 16 lines at most"


_Line = Annotated[str, _short]


@dataclass(frozen=True)
class Exchanged:
    """What one member says to another: its own subkey ``server``, None for a client, and ``records``.

    Who asks gives a ``nonce``, and ``after``, the subkey behind which it wants to hear. Who answers signs the nonce,
    the ``proof`` that the key is there, and gives as ``after`` where the next page begins, "" behind the last one. It
    says why it has ``refused`` the record that it was told, "" where it has not, and what it holds against ``others``.
    """

    server: Annotated[str, digits(64)] | None
    records: tuple[Record, ...] = ()
    nonce: _Line = ""
    after: _Line = ""
    proof: Annotated[str, digits(128)] | None = None
    refused: _Line = ""
    others: Annotated[tuple[_Line, ...], _few] = ()
    talk: int = 1

    def check_proof(self, nonce: str) -> None:
        """Raise SwarmError unless who says this has the key of ``server``, and signed ``nonce`` with it."""
        said = {"server": self.server, "nonce": nonce, "signature": self.proof or "0" * 128}
        check_signature(self.server or "", _PROOF, said, f"the answer of {(self.server or '')[:8]}")


@dataclass(frozen=True)
class _Page(Exchanged):
    records: tuple[dict, ...] = ()  # what is wrong with one is said of the record


def line_of(said: str, most: int = _MOST_TEXT) -> str:
    """``said``, which may hold what strangers have written, as one line of at most ``most`` characters that show as
    what they are; a message can carry a line of the most that there are by default."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(said.split()))
    return line if len(line) <= most else line[: most - 3] + "..."


def proof_of(key: ServerKey, server: str, nonce: str) -> str:
    """The signature of ``nonce`` by who is ``server``."""
    return signature_of(key, _PROOF, {"server": server, "nonce": nonce})


def tell(records: Iterable[Record], server: str | None = None, **more: object) -> bytes:
    """A message of ``records`` and of the fields ``more`` of a ``Exchanged``."""
    said = {"server": server, "talk": TALK, **more}
    head = json.dumps({name: value for name, value in said.items() if value or name == "server"})
    return f'{head[:-1]}, "records": [{", ".join(record.text for record in records)}]}}'.encode()


def hear(data: bytes) -> Exchanged:
    """What was said. Raises SwarmError for no such message, or one of more records than a page has."""
    # a later version may say more
    page = read_said(_Page, data, "an exchange of records cannot be read", others=True)
    if len(page.records) > _MOST_RECORDS:
        raise SwarmError(f"an exchange of {len(page.records)} records; at most {_MOST_RECORDS} are taken")
    return Exchanged(**vars(page) | {"records": tuple(map(read_record, page.records))})


def page_of(records: Iterable[Record], own: Record | None, after: str) -> tuple[list[Record], str]:
    """Return the page of ``records`` behind the subkey ``after``, and the subkey where the next begins, "" for none.

    The first page begins with the member's ``own``.
    """
    page = [own] if own is not None and not after else []
    room = PAGE_BYTES - sum(len(one.text) for one in page)
    for one in sorted((one for one in records if one.server > after), key=lambda one: one.server):
        if own is not None and one.server == own.server:
            continue
        if (room := room - len(one.text)) < 0 or len(page) == _MOST_RECORDS:
            return page, page[-1].server
        page.append(one)
    return page, ""


async def exchange(channel: Channel, access: Access, said: bytes, seconds: float = ANSWER_S) -> Exchanged:
    """One exchange; what the other says. Raises SwarmError when it does not answer, or nonsense."""
    import grpc

    codes = grpc.StatusCode
    try:
        told = hear(await channel.unary_unary(EXCHANGE)(said, timeout=seconds, metadata=access.headers))
    except grpc.aio.AioRpcError as error:
        if error.code() is codes.ALREADY_EXISTS:
            raise TwinError(error.details()) from error
        if error.code() is codes.DEADLINE_EXCEEDED:
            raise SwarmError(f"it did not answer within {seconds:g} s") from error
        if error.code() is codes.UNAVAILABLE:
            raise SwarmError(_unreached(error.details() or "", access)) from error
        raise SwarmError(error.details() or error.code().name) from error
    except grpc.aio.UsageError as error:
        raise SwarmError(f"the connection was closed: {error}") from error
    except asyncio.CancelledError:  # of the call, as somebody else has given its connection up, or of whoever asks
        if asyncio.current_task().cancelling():
            raise
        raise SwarmError("the connection was closed") from None
    if told.talk != TALK:
        raise SwarmError(f"it speaks version {told.talk} of records, not {TALK}: have one version on all members")
    return told


def _unreached(details: str, access: Access) -> str:
    """Why nobody was connected to, from gRPC's ``details``."""
    if "refused" in details:
        return "nobody listens there"
    if any(word in details.lower() for word in ("ssl", "handshake", "certificate", "tsi")):
        return f"TLS is not agreed on, see --tls-ca and the server's --tls-cert: {details}"
    if not access.secure:
        return f"it ends connections without TLS, or is no server of a swarm; one with TLS needs --tls-ca: {details}"
    return f"it is not reached: {details}"
