"""The service, up for the time of a block or until it is told to end: for the command line, tests and notebooks."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from firsttoken.assets.model_config import read_config
from firsttoken.assets.positions import shortened
from firsttoken.study.errors import FirstTokenError, NotLean, StageError
from firsttoken.study.extensions import extension, registered
from firsttoken.study.machine import kernels_multiply
from firsttoken.study.system.compiled import build_beside
from firsttoken.study.system.importing import without_collector
from firsttoken.study.system.openmp import set_wait_policy
from firsttoken_serve.chat.chat_template import ChatTemplate, read_template
from firsttoken_serve.served_model import BEFORE_TORCH, check_model, start_before_torch
from firsttoken_serve.service_config import ServiceConfig, listening

POLL_S = 0.2
_EXAMPLE = (
    """curl -N {url}/v1/completions -d '{{"prompt": "The capital of France is", "max_tokens": 32, "stream": true}}'"""
)


@contextmanager
def running(config: ServiceConfig, broken: Callable[[FirstTokenError], None] = lambda error: None) -> Iterator[str]:
    """The service, up and answering /health while its weights arrive, for the time of the block; its URL.

    One replica is this process; several are processes of their own behind Ray Serve.
    ``broken`` is told when this process can never answer. Raises ModelError for a folder
    that cannot be served, and StageError when what serves is not installed, when the port is taken, or when something
    does not start.
    """
    config = replace(config, folder=config.folder.resolve())  # replicas may have another working directory
    check_model(config)
    if config.one_process:
        serving = _one_process(config, broken)
    else:
        from firsttoken_serve.http.ray_replicas import replicas

        _try_template(config.model, read_template(config.folder))
        serving = replicas(config, broken)
    with serving:
        yield config.url


def _try_template(model: str, template: ChatTemplate) -> None:
    if fault := template.trial():
        print(f"firsttoken: {model}: {fault}; /v1/completions is served", file=sys.stderr, flush=True)


@contextmanager
def _one_process(config: ServiceConfig, broken: Callable[[FirstTokenError], None]) -> Iterator[None]:
    """One replica, under uvicorn, answers on its port for the time of the block, in which the model begins to load.

    ``broken`` as of the replica. At its end nothing new is taken, and those that run have the configuration's
    ``grace_s`` seconds to end. Raises StageError when uvicorn is missing or does not start.
    """
    with ExitStack() as starting, listening(config) as listener:
        starting.enter_context(without_collector())
        early_start = start_before_torch(config)  # beside the imports of what serves
        try:
            import uvicorn

            from firsttoken_serve.http.app import build_replica
            from firsttoken_serve.http.unread import SILENT_S, limited_protocol
        except ImportError as error:
            raise StageError('serve needs uvicorn and starlette: pip install -e ".[serve]" in the clone') from error
        app = build_replica(config, "replica-0", broken, early_start)
        del early_start  # it holds the weights, of which the engine will have its own
        settings = uvicorn.Config(
            app,
            http=limited_protocol(app.state.unread, config.body_s),
            ws="none",  # who offers another protocol is answered over this one
            timeout_keep_alive=SILENT_S,
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
                    raise StageError(f"the service did not start on {config.address}: choose another --port")
                time.sleep(0.005)
            trial = (config.model, app.state.template)  # which is another process, and nothing waits for it
            threading.Thread(target=_try_template, args=trial, name="template", daemon=True).start()
            starting.close()
            app.state.begin()
            yield
            app.state.gate.close()
            app.state.gate.wait(config.grace_s)
        finally:
            app.state.close()  # whoever is open is told, and no connection has to be waited for
            server.should_exit = True
            thread.join()


def serve_forever(config: ServiceConfig) -> None:
    """Serve until Ctrl-C or SIGTERM, then let what runs end, as ``grace_s`` of the configuration allows, and shut down;
    a second one ends at once. One that comes during the start waits until whoever has connected can be answered, but
    interrupts Ray's. Raises as :func:`running`, and StageError when it cannot go on."""
    ended = SimpleQueue[FirstTokenError | None]()  # whose put, unlike an event's set, may interrupt its own get
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    set_wait_policy(_runs_by_kernels(config))

    def end(number: int, frame: object) -> None:
        signal.signal(number, before[number])  # a second time it ends at once, whatever is still being imported
        ended.put(None)

    def interrupt(number: int, frame: object) -> None:
        ended.put(None)  # what starts may swallow the exception: a service behind Ray once went on without an end
        raise KeyboardInterrupt

    for number, handler in before.items():
        if config.one_process:  # its port opens long before it has started, and who has connected then is answered
            signal.signal(number, end)
        elif handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        with build_beside(), running(config, ended.put):
            if not config.one_process:
                for number in before:
                    signal.signal(number, end)
            if ended.empty():
                _announce(config)
            if (fault := _wait_for_end(ended)) is not None:
                raise fault
            print("shutting down", flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(config: ServiceConfig) -> None:
    if not config.loopback and config.api_key is None:
        reach = (
            "every machine that reaches this one"
            if config.host in ("0.0.0.0", "::")
            else f"whoever reaches {config.url}"
        )
        print(
            f"firsttoken: {reach} can ask this service; --api-key-file FILE asks for a key", file=sys.stderr, flush=True
        )
    print(f"{config.model} is served at {config.url}; Ctrl-C ends it. Try:", flush=True)
    print(f"  {_EXAMPLE.format(url=config.url)}", flush=True)
    if less := shortened(read_config(config.folder), config.folder.name):
        print(less, flush=True)


def _runs_by_kernels(config: ServiceConfig) -> bool:
    """Return whether the layers of the service's model are run by the kernels, as far as can be told without torch."""
    with suppress(FirstTokenError, NotLean):
        if kernels_multiply() and config.device == "cpu" and registered(BEFORE_TORCH):
            return extension(BEFORE_TORCH, "config")(config.folder) is not None
    return False


def _wait_for_end(ended: SimpleQueue[FirstTokenError | None]) -> FirstTokenError | None:
    """Return the first item of the queue. Python runs the handler of a signal when its main thread next runs: one that
    another thread took, or that came as the wait began, was never answered by a wait without an end (1 of 15 ends under
    load)."""
    while True:
        with suppress(Empty):
            return ended.get(timeout=POLL_S)
