"""A server's Ed25519 key, kept in a file that nobody else can read, or made for one life; what is said with one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from firsttoken.study.errors import SwarmError
from firsttoken.study.parsing.json_text import parse_json
from firsttoken.study.parsing.schema import parse_as

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ServerKey: TypeAlias = "Ed25519PrivateKey"
"""What servers and clients sign with. The package that has it is imported when a key is made or read."""

Parsed = TypeVar("Parsed")


def server_key(path: Path | None) -> ServerKey:
    """The key in ``path``, made and written where there is none; without a path one that is not kept.

    Raises SwarmError for a file that holds no key, or cannot be read or written.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if path is None:
        return Ed25519PrivateKey.generate()
    try:
        if not path.exists():
            key = Ed25519PrivateKey.generate()
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key.private_bytes_raw())
            return key
        return Ed25519PrivateKey.from_private_bytes(path.read_bytes()[:33])
    except OSError as error:
        raise SwarmError(f"the key {path} cannot be read or written: {error.strerror}") from error
    except ValueError as error:
        raise SwarmError(f"{path} holds no Ed25519 key of 32 bytes: name a new file, to make one") from error


def public_hex(key: ServerKey) -> str:
    """Return the server's subkey: its public key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def signature_of(key: ServerKey, domain: bytes, fields: Mapping[str, Any]) -> str:
    """The signature (hex) of ``fields`` but for its own "signature"; ``domain`` is the kind of what is said."""
    return key.sign(_signed_bytes(domain, fields)).hex()


def check_signature(who: str, domain: bytes, fields: Mapping[str, Any], subject: str) -> None:
    """Raise SwarmError that names ``subject`` unless ``fields["signature"]`` is of the subkey ``who``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(who))
        public.verify(bytes.fromhex(fields["signature"]), _signed_bytes(domain, fields))
    except (InvalidSignature, ValueError) as error:
        raise SwarmError(f"{subject} is not signed by its key: it is forged") from error


def parse_foreign(kind: type[Parsed], data: bytes | str, subject: str, *, others: bool = False) -> Parsed:
    """Parse the JSON of a stranger as the dataclass ``kind``; ``others``: it may have more keys. Raises SwarmError that
    begins with ``subject`` for anything else."""
    try:
        return parse_as(kind, parse_json(data), others=others)
    except ValueError as error:
        raise SwarmError(f"{subject}: {error}") from error


def _signed_bytes(domain: bytes, fields: Mapping[str, Any]) -> bytes:
    signed = {name: value for name, value in fields.items() if name != "signature"}
    return domain + json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
