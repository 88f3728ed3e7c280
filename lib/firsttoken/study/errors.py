"""The exceptions that a user can mend. Each message names the thing and the mend in one line."""

from collections.abc import Iterator
from contextlib import contextmanager


class FirstTokenError(Exception):
    """Base of every error that the command line, and a notebook, show as one line instead of a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows of the error."""
        return [f"firsttoken: {self}"]


class AssetError(FirstTokenError):
    """An asset cannot be fetched, fails its hash, or is truncated."""


class ProfileError(FirstTokenError):
    """An unknown profile, or a key that no configuration has."""


class MechanismError(FirstTokenError):
    """A mechanism that a reader changed does not work, or this run does not show what the mechanism is there for."""


class ClaimsError(FirstTokenError):
    """The claims file is malformed: duplicate id, unknown experiment, unknown kind."""


class ModelError(FirstTokenError):
    """A model folder or Hub id cannot be loaded as named."""


class CorpusError(FirstTokenError):
    """A data file is missing, truncated, of another format, or too short for what is asked."""


class StageError(FirstTokenError):
    """A layer block, stage plan or adapter that does not fit the model."""


class CacheError(FirstTokenError):
    """A KV cache that belongs to another model or context, is torn, or finds no room."""


class LinkError(FirstTokenError):
    """A transfer broke off: the link died, or the file ended early."""


class OutputError(FirstTokenError):
    """A model computes something that is no number: its weights are damaged, or too large for the dtype that it
    computes in."""


class EngineError(FirstTokenError):
    """A step of the engine met what nobody foresaw, such as a device without memory left: no fault of a request."""


class RequestError(FirstTokenError):
    """A request asks for more than the server allows, or cannot be read."""


class LengthError(RequestError):
    """A prompt, or a prompt and the answer that is asked for, have more tokens than are taken."""


class BusyError(FirstTokenError):
    """The server has as many requests open as it takes; ask again later."""


class ClosedError(BusyError):
    """The server shuts down: it takes nothing new, or ended what was open."""


class StorageError(FirstTokenError):
    """A disk is full, or a folder cannot be written."""


class NotebookError(FirstTokenError):
    """A notebook that does not exist, or that failed while it ran."""


class SwarmError(FirstTokenError):
    """No chain of servers covers the layers, or what a server or client sent cannot be what was asked."""


class NotLean(Exception):
    """Why a model that may be fine is none that starts lean: one part of a sentence, "its ... is ..."."""


class PermanentFault(Exception):
    """Why a load fails each time: ``fault`` follows from files that do not change by themselves."""

    def __init__(self, fault: FirstTokenError) -> None:
        super().__init__(str(fault))
        self.fault = fault


@contextmanager
def permanent_faults() -> Iterator[None]:
    """Inside the block nothing is brought: what a user could mend there does not pass. Raises PermanentFault."""
    try:
        yield
    except FirstTokenError as error:
        raise PermanentFault(error) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, as much of it as fits a message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
