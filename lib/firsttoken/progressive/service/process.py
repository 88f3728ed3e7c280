"""One replica: the application in this process, under uvicorn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from firsttoken.progressive.service.config import ServiceConfig
from firsttoken.study.errors import StageError


@contextmanager
def one_process(config: ServiceConfig) -> Iterator[None]:
    """Answers on its port for the time of the block. Raises StageError when uvicorn is missing or does not start."""
    try:
        import uvicorn

        from firsttoken.progressive.service.app import build_replica
    except ImportError as error:
        raise StageError('serve needs uvicorn and fastapi: pip install "firsttoken[serve]"') from error
    app = build_replica(config, "replica-0")
    settings = uvicorn.Config(
        app, config.host, config.port, log_level="error", access_log=False, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, name="http", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise StageError(f"the service did not start on {config.host}:{config.port}: choose another --port")
            time.sleep(0.005)
        yield
    finally:
        app.state.close()  # whoever is open is told, and no connection has to be waited for
        server.should_exit = True
        thread.join()
