"""One replica: the application in this process, under uvicorn."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from firsttoken.service.service_config import ServiceConfig
from firsttoken.study.errors import FirstTokenError, StageError


@contextmanager
def one_process(config: ServiceConfig, broken: Callable[[FirstTokenError], None]) -> Iterator[None]:
    """Answers on its port for the time of the block, in which the model begins to load. ``broken`` as of the replica.
    At its end nothing new is taken, and those that run have the configuration's ``grace_s`` seconds to end.

    Raises StageError when uvicorn is missing or does not start."""
    try:
        import uvicorn

        from firsttoken.service.app import build_replica
        from firsttoken.service.unread import MOST_HEAD_BYTES, limited_protocol
    except ImportError as error:
        raise StageError('serve needs uvicorn and starlette: pip install "firsttoken[serve]"') from error
    with listening(config) as listener:
        app = build_replica(config, "replica-0", broken)
        settings = uvicorn.Config(
            app,
            http=limited_protocol(app.state.unread, config.body_s),
            h11_max_incomplete_event_size=2 * MOST_HEAD_BYTES,  # the protocol's own limit comes first
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise StageError(f"the service did not start on {config.host}:{config.port}: choose another --port")
                time.sleep(0.005)
            app.state.begin()
            yield
            app.state.doors.close()
            app.state.doors.wait(config.grace_s)
        finally:
            app.state.close()  # whoever is open is told, and no connection has to be waited for
            server.should_exit = True
            thread.join()


@contextmanager
def listening(config: ServiceConfig) -> Iterator[socket.socket]:
    """A socket on the port of ``config``. Raises StageError for one that cannot be had.

    What is sent and not taken for ``stalled_s`` ends its connection, by the kernel and where it can: a client that
    reads nothing holds no place for longer.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise StageError(f"cannot listen on {config.host}:{config.port} ({error.strerror}): choose --port") from error
    with listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * config.stalled_s))
        yield listener
