"""The arrivals of layers: told by whoever brings them, asked and waited for by whoever computes."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from firsttoken.progressiveserve.loading.loader import StageLoad


class LayerArrivals:
    """The ends of a model and its ``depth`` layers, which come in this order."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.over: Future[None] = Future()  # done when nothing more will come: all is here, or the load failed
        self._parts = 0  # the ends and layers that are here
        self._failure: Exception | None = None
        self._change = threading.Condition()

    @property
    def layers(self) -> int:
        """Return the number of layers that are here: [0, layers). Raises what ended the load."""
        with self._change:
            self._raise()
            return max(0, self._parts - 1)

    def come(self, parts: int = 1) -> None:
        """Note that ``parts`` more parts are in their places; the model's ends count as the first part."""
        with self._change:
            self._parts += parts
            self._change.notify_all()
            complete = self._parts > self.depth
        if complete:
            self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the arrivals with ``error``, after which nothing more will come."""
        with self._change:
            self._failure = error
            self._change.notify_all()
        self.over.set_result(None)

    def wait(self, layers: int = 0) -> None:
        """Wait for the ends and so many layers. Raises what ended the load before."""
        with self._change:
            self._change.wait_for(lambda: self._failure is not None or self._parts > layers)
            self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


def follow(load: StageLoad, depth: int) -> LayerArrivals:
    """The arrivals of a ``load`` whose parts are the ends and ``depth`` layers, as ``ends_first`` stages them."""
    arrivals = LayerArrivals(depth)

    def watch() -> None:
        try:
            for part in range(depth + 1):
                load.await_part(part)
                arrivals.come()
        except Exception as error:
            arrivals.fail(error)

    threading.Thread(target=watch, name="firsttoken-arrivals", daemon=True).start()
    return arrivals
