"""What members say to each other about records, whom a member asks, and what it believes: a server's own word, said at
its own address."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from firsttoken.petals.access import Access, CallError, Channel, answer_of
from firsttoken.petals.addresses import check_kind, check_name, host_of, is_loopback, spot_of
from firsttoken.petals.fairness import TokenBuckets, remember
from firsttoken.petals.keys import ServerKey, check_signature, parse_foreign, signature_of
from firsttoken.petals.messages import EXCHANGE
from firsttoken.petals.records import (
    MOST,
    Record,
    Registry,
    StaleRecordError,
    TwinError,
    UnprovenRecordError,
    read_record,
    steady_s,
)
from firsttoken.study.errors import BusyError, SwarmError
from firsttoken.study.parsing.schema import digits, fits

# What members say to each other about records: one asks with its own, the other answers with a page of those it knows.
#
# A list of any length travels in pages of PAGE_BYTES, each a message that every member takes; who asks names the subkey
# behind which the next page begins.

TALK = 3  # the version of these messages
ANSWER_S = 2.0  # within which a member answers
PAGE_BYTES = 1 << 15  # of the records of one message: half of the smallest limit of a connection
MOST_PAGES = 32  # that are asked of one member
ASKED_BYTES = 4096  # of a message that asks, which holds one record at most
_MOST_RECORDS = 128  # of a page: a record is 500 bytes or more
_MOST_TEXT = 300  # characters of what is said of a record
_PROOF = b"firsttoken swarm proof 2\n"


_short = fits(
    lambda text: len(text) <= _MOST_TEXT and text.isprintable(), f"expected a line of {_MOST_TEXT} characters"
)
_Line = Annotated[str, _short]


@dataclass(frozen=True)
class Exchanged:
    """A message from one member to another: its own subkey ``server``, None for a client, and ``records``.

    The asking member gives a ``nonce``, and ``after``, the subkey behind which it wants to hear. The answering one
    signs the nonce, the ``proof`` that the key is there, and gives as ``after`` where the next page begins, "" behind
    the last one. It says why it has ``refused`` the record that it was told, "" where it has not, and what it holds
    against ``others``.
    """

    server: Annotated[str, digits(64)] | None
    records: tuple[Record, ...] = ()
    nonce: _Line = ""
    after: _Line = ""
    proof: Annotated[str, digits(128)] | None = None
    refused: _Line = ""
    others: Annotated[tuple[_Line, ...], fits(lambda lines: len(lines) <= 16, "expected 16 lines at most")] = ()
    talk: int = 1

    def check_proof(self, nonce: str) -> None:
        """Raise SwarmError unless who says this has the key of ``server``, and signed ``nonce`` and its record with
        it: what it said of itself once is not its word of now."""
        statement = _statement(self.server or "", nonce, self.speaker) | {"signature": self.proof or "0" * 128}
        check_signature(self.server or "", _PROOF, statement, f"the answer of {(self.server or '')[:8]}")

    @property
    def speaker(self) -> Record | None:
        """Return the record that the sender of this message gives of itself, None where there is none."""
        return next((record for record in self.records if record.server == self.server), None)


@dataclass(frozen=True)
class _Page(Exchanged):
    records: tuple[dict, ...] = ()  # what is wrong with one is said of the record


def line_of(text: str) -> str:
    """``text``, which may hold what strangers have written, as one line of characters that show as what they are, no
    longer than a message can carry."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 3] + "..."


def proof_of(key: ServerKey, record: Record, nonce: str) -> str:
    """The signature of ``nonce`` by the server of ``record``, which it says of itself now."""
    return signature_of(key, _PROOF, _statement(record.server, nonce, record))


def _statement(server: str, nonce: str, record: Record | None) -> dict[str, str]:
    return {"server": server, "nonce": nonce, "record": record.signature if record is not None else ""}


def encode_exchange(records: Iterable[Record], server: str | None = None, **more: object) -> bytes:
    """A message of ``records`` and of the fields ``more`` of a ``Exchanged``."""
    header = {"server": server, "talk": TALK, **more}
    head = json.dumps({name: value for name, value in header.items() if value or name == "server"})
    return f'{head[:-1]}, "records": [{", ".join(record.text for record in records)}]}}'.encode()


def decode_exchange(data: bytes) -> Exchanged:
    """Decode a message. Raises SwarmError for bytes that are none, or one of more records than a page has."""
    # a later version may say more
    page = parse_foreign(_Page, data, "an exchange of records cannot be read", others=True)
    if len(page.records) > _MOST_RECORDS:
        raise SwarmError(f"an exchange of {len(page.records)} records; at most {_MOST_RECORDS} are taken")
    return Exchanged(**vars(page) | {"records": tuple(map(read_record, page.records))})


def page_of(records: Iterable[Record], speaker: Record | None, after: str) -> tuple[list[Record], str]:
    """Return the page of ``records`` behind the subkey ``after``, and the subkey where the next begins, "" for none.

    The first page begins with the record of the ``speaker``, the member that sends it.
    """
    page = [speaker] if speaker is not None and not after else []
    room = PAGE_BYTES - sum(len(record.text) for record in page)
    for record in sorted((record for record in records if record.server > after), key=lambda record: record.server):
        if speaker is not None and record.server == speaker.server:
            continue
        if (room := room - len(record.text)) < 0 or len(page) == _MOST_RECORDS:
            return page, page[-1].server
        page.append(record)
    return page, ""


async def exchange(channel: Channel, access: Access, message: bytes, seconds: float) -> Exchanged:
    """Exchange messages once, and return the other's. Raises SwarmError when it does not answer, or nonsense."""
    try:
        data = await answer_of(channel.unary_unary(EXCHANGE), message, access.headers, seconds)
    except CallError as error:
        if error.code == "ALREADY_EXISTS":
            raise TwinError(str(error)) from error
        if error.code == "UNAVAILABLE":
            raise SwarmError(_unreached(str(error), access)) from error
        raise
    answer = decode_exchange(data)
    if answer.talk != TALK:
        raise SwarmError(f"it speaks version {answer.talk} of records, not {TALK}: have one version on all members")
    return answer


def _unreached(details: str, access: Access) -> str:
    """Why nobody was connected to, from gRPC's ``details``."""
    if "refused" in details:
        return "nobody listens there"
    if any(word in details.lower() for word in ("ssl", "handshake", "certificate", "tsi")):
        return f"TLS is not agreed on, see --tls-ca and the server's --tls-cert: {details}"
    if not access.secure:
        return f"it ends connections without TLS, or is no server of a swarm; one with TLS needs --tls-ca: {details}"
    return f"it is not reached: {details}"


# Whom a member asks, and what it believes.
#
# What somebody passes on is a hint where to ask. However many records name an address, each member that they were told
# to connects to it once, again after 2 s and 16 s, and then once a minute at most, until a server proves itself there.

PROVE_S = 1.5  # within which a server that is called back answers
_AGAIN_S, _AGAIN, _LONGEST_S = 2.0, 8, 60.0  # until an address that did not prove itself is asked again
_FIRST = 64  # addresses that one look asks for the first time
_AT_ONCE = 8  # servers that are called back at once
_MOST_SPOTS = 1 << 16  # addresses of which it is known when they were asked: all ports of loopback
_MOST_FAULTS = 64
_TOLD, _LATELY_S = 8, 60.0  # servers that were refused, as others are told


class Contacts:
    """The knowledge of one member: the ``registry`` of the proven members, ``faults`` of others by address.

    ``near`` and ``far`` are the addresses it takes: of loopback, and of other machines. ``own`` is its own address.
    """

    def __init__(self, registry: Registry, access: Access, width: int) -> None:
        self.registry, self.access, self.width = registry, access, width
        self.near, self.far, self.own = True, access.secure, ""
        self.faults: dict[str, str] = {}
        self.others: dict[str, tuple[str, ...]] = {}  # by who says it, what it holds against others
        self._refused: dict[str, tuple[str, float]] = {}  # by address, of who said so itself: why, and when
        self._hints: dict[str, list[Record]] = {}  # by who passed them on
        self._failures: dict[str, tuple[int, float]] = {}  # by spot: how often in vain, and when again
        self._whys: dict[str, str] = {}  # by spot: why it was called back in vain
        self._stranger_tokens = TokenBuckets(16, 4.0)
        self._calling = asyncio.Semaphore(_AT_ONCE)

    def serve_at(self, address: str) -> None:
        """Note that this member is a server at ``address``, so that others must have addresses of the same kind."""
        self.own = address
        self.near = is_loopback(host_of(address))
        self.far = self.access.secure and not self.near

    async def ask(
        self, channel: Channel, address: str, limit_s: float, record: Record | None = None
    ) -> tuple[Exchanged, float]:
        """Hear all that the member at ``address`` knows: its first answer, and the seconds until that came; ``record``
        is what this one says of itself.

        Its own record is believed, of others what renews known ones; the rest are hints. Raises SwarmError where nobody
        answers within ``limit_s`` seconds, or nonsense.
        """
        nonce, first, hints, after, seconds = secrets.token_hex(16), None, [], "", 0.0
        records = [record] if record is not None else []
        server = record.server if record is not None else None
        try:
            for _ in range(MOST_PAGES):
                more = {"after": after} if after else {"nonce": nonce}
                begun = time.perf_counter()
                exchanged = await exchange(
                    channel, self.access, encode_exchange([] if after else records, server, **more), limit_s
                )
                if first is None:
                    first, seconds = exchanged, time.perf_counter() - begun
                    self._believe_speaker(address, exchanged, nonce)
                hints += self._take_hints(exchanged)
                if exchanged.after <= after:
                    break
                after = exchanged.after
        except SwarmError as error:
            if not isinstance(error, TwinError):
                self.fault(address, str(error))
            if first is None:
                raise
        else:
            self.faults.pop(address, None)
        remember(self.others, address, first.others, _MOST_FAULTS)
        remember(self._hints, address, hints[:MOST], _MOST_FAULTS)
        return first, seconds

    def due(self, contacted: set[str]) -> list[str]:
        """The addresses to ask now beside those ``contacted``: what others have named since, of each in turn."""
        lists, due = list(self._hints.values()), []
        self._hints.clear()
        for rank in range(max(map(len, lists), default=0)):
            for address in (hints[rank].address for hints in lists if rank < len(hints)):
                if len(due) + len(contacted) < _FIRST and address not in contacted and self._may_ask(address):
                    self.note_attempt(address)
                    due.append(address)
        return due

    def _may_ask(self, address: str) -> bool:
        spot = spot_of(address)
        if spot == spot_of(self.own) or self.registry.at(address, steady_s()) is not None:
            return False
        try:
            check_kind(address, self.near, self.far)
        except SwarmError as error:
            self.fault(address, str(error))
            return False
        return self._failures.get(spot, (0, 0.0))[1] <= time.monotonic()

    def note_attempt(self, address: str) -> None:
        """Note that this address is asked now; if it does not prove itself, it is left alone for a while."""
        spot, now = spot_of(address), time.monotonic()
        times, _ = self._failures.get(spot, (0, 0.0))
        again_s = now + min(_AGAIN_S * _AGAIN ** min(times, 8), _LONGEST_S)
        remember(self._failures, spot, (times + 1, again_s), _MOST_SPOTS)

    async def receive(self, record: Record, source: str) -> str:
        """Hear from ``source`` that it is the server of ``record``; return why it is not believed, "" if it is.

        A new server is called back. Raises TwinError as the registry.
        """
        now = steady_s()
        try:
            if not self.registry.knows(record, now) or not self._stranger_tokens.has_token(source):
                self._stranger_tokens.spend(source)
            await self._check(record, source, now)
        except TwinError:
            raise
        except StaleRecordError:
            return ""  # what is known of it is later
        except (SwarmError, BusyError) as error:
            remember(self._refused, record.address, (line_of(str(error)), time.monotonic()), _MOST_FAULTS)
            return line_of(str(error))
        self._refused.pop(record.address, None)
        return ""

    def reported_by_others(self) -> list[str]:
        """Return a line for each server that another member refuses though it announced itself there, and why."""
        return [f"{teller} refuses {line}" for teller, lines in self.others.items() for line in lines]

    def refused(self) -> list[str]:
        """Return a line for each server that announced itself lately and was refused, and why, the latest last."""
        lately = time.monotonic() - _LATELY_S
        lines = [line_of(f"{address}: {why}") for address, (why, when) in self._refused.items() if when > lately]
        return lines[-_TOLD:]

    async def _check(self, record: Record, source: str, now: float) -> None:
        if self.registry.knows(record, now):
            try:
                return self.registry.renew(record, now)
            except StaleRecordError:
                raise
            except UnprovenRecordError:  # another run of it, or it stood still meanwhile: it is called back
                self._stranger_tokens.spend(source)
            except SwarmError:
                self._stranger_tokens.spend(source)  # forged: the next one costs this source, too
                raise
        record.check_life()
        check_kind(record.address, self.near, self.far)
        if spot_of(record.address) == spot_of(self.own):
            raise SwarmError(f"{record.address} is this server's own address: name your own with --address")
        self.registry.check(record, now)
        if not (record.span or record.counted()):
            return  # who leaves, and was never known
        _, due = self._failures.get(spot := spot_of(record.address), (0, 0.0))
        if due > time.monotonic():
            why = self._whys.get(spot, f"{record.address} has not answered yet")
            raise SwarmError(f"{why} (it is called back again in {due - time.monotonic():.0f} s)")
        self.note_attempt(record.address)
        try:
            await self._call_back(record)
        except SwarmError as error:
            remember(self._whys, spot, str(error), _MOST_FAULTS)
            raise

    async def _call_back(self, record: Record) -> None:
        address = record.address
        try:
            async with asyncio.timeout(PROVE_S):
                async with self._calling:
                    await check_name(address)
                    async with self.access.channel(address, self.width) as channel:
                        exchanged, _ = await self.ask(channel, address, PROVE_S)
        except TimeoutError:
            raise SwarmError(f"{address} did not answer within {PROVE_S:g} s when it was called back") from None
        except SwarmError as error:
            raise SwarmError(f"{address} does not answer when it is called back: {error}") from error
        if exchanged.server != record.server or not self.registry.knows(record, steady_s()):
            raise SwarmError(f"another server than {record.server[:8]} answers at {address}: mend --address")

    def _believe_speaker(self, address: str, exchanged: Exchanged, nonce: str) -> None:
        """Believe the record that the member at ``address`` gives of itself, if that is its address."""
        if exchanged.server is None:
            return
        exchanged.check_proof(nonce)
        if (speaker := exchanged.speaker) is None or spot_of(speaker.address) != spot_of(address):
            return
        try:
            self.registry.accept(speaker, steady_s())
        except StaleRecordError:
            if not self.registry.knows(speaker, steady_s()):
                raise
        self._failures.pop(spot_of(address), None)

    def _take_hints(self, exchanged: Exchanged) -> list[Record]:
        wrong = self.registry.accept_all(exchanged.records, steady_s())
        for record in exchanged.records:
            error = wrong.get(record.server)
            if error is not None and not isinstance(error, UnprovenRecordError | StaleRecordError):
                self.fault(record.address, str(error))
        return [record for record in exchanged.records if isinstance(wrong.get(record.server), UnprovenRecordError)]

    def fault(self, address: str, reason: str) -> None:
        """Note that the member at ``address`` does not count, and the ``reason``."""
        remember(self.faults, address, line_of(reason), _MOST_FAULTS)
