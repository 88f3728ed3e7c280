"""What a service is told before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firsttoken.study.errors import StageError


@dataclass(frozen=True)
class ServiceConfig:
    """A staged checkpoint, the wire it comes over, and the limits of the service.

    Each of the ``replicas`` loads ``folder`` by itself, over a link of its own of ``gbit_per_s`` (0: unshaped) that
    ``threads`` readers share. ``max_sessions`` is per replica; one request more is refused. Prompts of more than
    ``max_prompt_tokens`` and answers of more than ``max_new_tokens`` are refused as well.
    """

    folder: Path
    gbit_per_s: float = 0.0
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int = 64
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 512
    threads: int = 8

    def __post_init__(self) -> None:
        for key in ("replicas", "max_sessions", "max_prompt_tokens", "max_new_tokens", "threads"):
            if getattr(self, key) < 1:
                raise StageError(f"serve: {key} must be 1 or more, not {getattr(self, key)}")
        if not 1 <= self.port <= 65535:
            raise StageError(f"serve: the port must be 1 to 65535, not {self.port}")

    @property
    def model(self) -> str:
        """The name that clients know the model by: that of its folder."""
        return self.folder.resolve().name
