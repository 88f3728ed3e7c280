"""Several replicas: Ray Serve on this machine, from the first to the last, or on a cluster that runs already."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from firsttoken.study.dtypes import check_device
from firsttoken.study.errors import FirstTokenError, StageError, first_line
from firsttoken.study.system.cgroup_limits import cores
from firsttoken_serve.chat.text import read_vocabulary
from firsttoken_serve.service_config import ServiceConfig, listening

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ENVIRONMENT = {
    _LOOPBACK: "0",  # no cluster, so Ray's own servers bind to 127.0.0.1; by default it is every interface
    # and the one port that Serve binds to every interface all the same, to unpickle what comes in, asks for a token
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 puts a replica behind everything else on the machine
    # patience, as a process of Ray's takes seconds to start on a quiet machine and ten times as long on a busy one
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
_LATE = "timed out during startup"  # Ray gives its helpers 15 s to report their ports, which nothing can change
_ANSWER_S = 5.0
_POLL_S = 1.0
_STARTS = 3  # the next time they are in the page cache
_OBJECTS_BYTES = 80 << 20  # nothing is kept in Ray's object store, which would take 30 % of the memory


@contextmanager
def replicas(config: ServiceConfig, broken: Callable[[FirstTokenError], None] = lambda error: None) -> Iterator[None]:
    """Answers on its port for the time of the block, by as many replicas as ``config`` says. What a replica fails at is
    said on this terminal, and ``broken`` is told of what leaves it no hope.

    Raises ModelError for a folder without a tokenizer, and StageError when ray is missing or runs already, or when a
    replica or Ray itself does not start.
    """
    read_vocabulary(config.folder, config.max_prompt_tokens)  # for an error of it to be this process's
    with listening(config):  # to know that it can be had, before seconds are spent
        pass
    if config.cluster is not None:
        check_cluster(config.cluster)
    elif config.device != "cpu":
        check_device(config.device)
    ray, serve = import_ray(config.cluster is None)
    usable = cores()
    if config.cluster is None:
        start_node(ray, max(usable, config.replicas))
    else:
        join(ray, config.cluster)
    with ExitStack() as exits:
        exits.callback(ray.shutdown)
        try:
            _start(serve, config)
            exits.callback(_stop, ray, serve, config)  # also what was interrupted before it had started
            serve.run(_application(config, usable, serve), name="firsttoken")
        except (RuntimeError, TimeoutError) as error:
            cause = getattr(error, "cause", None) or error  # Ray's own text is a traceback of another process
            raise StageError(f"the service did not start: {' '.join(str(cause).split())}") from error
        with _watched(config, broken):
            yield


def _start(serve: ModuleType, config: ServiceConfig) -> None:
    """Ray Serve on the service's address. A cluster in which it ran for nobody before does not keep what has failed."""
    from ray.serve.context import _get_global_client

    others = _get_global_client(False) is not None  # None where no controller runs
    try:
        http = {"host": config.host, "port": config.port}
        serve.start(http_options=http, proxy_location="HeadOnly", logging_config={"log_level": "ERROR"})
        check_address(config)
    except (RuntimeError, TimeoutError):  # such as a port that another program took a moment ago
        if not others:
            _quietly(serve.shutdown)
        raise


def _quietly(end: Callable[[], None]) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        end()


def _stop(ray: ModuleType, serve: ModuleType, config: ServiceConfig) -> None:
    """Serve nothing more, and on a cluster give the port back, unless Ray Serve answers there for others too."""
    serve.delete("firsttoken")  # lets a replica close its engine; serve.shutdown() would print an error of its own
    if config.cluster is not None and not serve.status().applications:
        _quietly(serve.shutdown)
        _quietly(ray.shutdown)


@contextmanager
def _watched(config: ServiceConfig, broken: Callable[[FirstTokenError], None]) -> Iterator[None]:
    """Replicas have no terminal: for the time of the block a thread asks them how they are."""
    ended, states = threading.Event(), dict[str, str | None]()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"{replace(config, host=host).url}/stage"

    def watch() -> None:
        while not ended.wait(_POLL_S):
            with suppress(OSError, ValueError, KeyError):
                with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                    status = json.load(answer)
                name, fault = status["replica"], status["error"]
                if fault and fault != states.get(name):
                    print(f"firsttoken: replica {name}: {fault}", file=sys.stderr, flush=True)
                states[name] = fault
                if status["state"] == "failed":
                    broken(StageError(fault))
                    return

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def start_node(ray: ModuleType, usable: int) -> None:
    """A node of this machine's own, of ``usable`` cores. Raises StageError when it does not come up in time."""
    for tried in range(1, _STARTS + 1):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                num_cpus=usable,
                object_store_memory=_OBJECTS_BYTES,
            )
            return
        except Exception as error:  # Ray has no kind of its own for it
            ray.shutdown()
            if _LATE not in str(error):
                raise
            if tried == _STARTS:
                raise StageError(f"Ray did not start in {tried} tries: is this machine very busy? Try again") from error


def check_cluster(address: str) -> None:
    """Raises StageError for what is no HOST:PORT, and where nobody listens: Ray would try for half a minute."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise StageError(f"serve: a cluster is HOST:PORT, as `ray start --head` prints it, not {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass
    except OSError as error:
        raise StageError(f"serve: no Ray cluster answers at {address} ({error.strerror or error})") from error


def check_address(config: ServiceConfig) -> None:
    """Raises StageError where Ray Serve runs already and answers at another address: it has one for all it serves."""
    from ray.serve.context import _get_global_client

    running = _get_global_client().http_config
    if (running.host, running.port) != (config.host, config.port):
        raise StageError(
            f"serve: Ray Serve runs in this cluster already, and answers at {running.host}:{running.port}; end what it "
            "serves there, or take another cluster"
        )


def join(ray: ModuleType, address: str) -> None:
    """Be a client of the cluster at ``address``. Raises StageError when it does not take us."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # as above
        ray.shutdown()
        raise StageError(f"serve: the Ray cluster at {address} does not take us: {first_line(error)}") from error


def _application(config: ServiceConfig, usable: int, serve: ModuleType) -> Any:
    def build() -> Any:  # called in the process of each replica
        from ray.serve import get_replica_context

        from firsttoken_serve.http.app import build_replica

        app = build_replica(config, get_replica_context().replica_id.unique_id)
        app.state.begin()
        return app

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="replica",
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": max(1, usable // config.replicas)},  # also the threads that torch computes with
        max_ongoing_requests=256,  # Serve would queue what is above; the engine refuses, so that a client can decide
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=config.grace_s + 5,  # new requests go elsewhere meanwhile, or find nobody
        graceful_shutdown_wait_loop_s=0.2,
    )
    return deployment.bind()


def import_ray(alone: bool) -> tuple[ModuleType, ModuleType]:
    """ray and ray.serve. A node of our own, ``alone``, is told to stay on loopback, behind a token of its own, and to
    report nothing to anybody; a cluster has settled that by itself. Raises StageError where ray is missing, or runs.
    """
    if alone and sys.modules.get("ray") and os.environ.get(_LOOPBACK) != "0":
        raise StageError("ray was imported before and would listen on every interface: serve from a fresh process")
    if alone:
        os.environ.update(_ENVIRONMENT)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise StageError('serve needs ray for replicas: pip install -e ".[serve]" in the clone') from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if ray.is_initialized():
        raise StageError("ray runs in this process already: end it with ray.shutdown() first")
    return ray, serve
