"""Several replicas: Ray Serve on this machine, from the first to the last."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from firsttoken.study.dtypes import check_device
from firsttoken.study.errors import FirstTokenError, StageError
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
    if config.device != "cpu":
        check_device(config.device)
    ray, serve = import_ray()
    usable = cores()
    start_node(ray, max(usable, config.replicas))
    with ExitStack() as exits:
        exits.callback(ray.shutdown)
        try:
            http = {"host": config.host, "port": config.port}
            serve.start(http_options=http, proxy_location="HeadOnly", logging_config={"log_level": "ERROR"})
            # lets a replica close its engine, also one that was interrupted before it had started; serve.shutdown()
            # would print an error of its own
            exits.callback(serve.delete, "firsttoken")
            serve.run(_application(config, usable, serve), name="firsttoken")
        except (RuntimeError, TimeoutError) as error:
            cause = getattr(error, "cause", None) or error  # Ray's own text is a traceback of another process
            raise StageError(f"the service did not start: {' '.join(str(cause).split())}") from error
        with _watched(config, broken):
            yield


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


def import_ray() -> tuple[ModuleType, ModuleType]:
    """ray and ray.serve. The node is told to stay on loopback, behind a token of its own, and to report nothing to
    anybody. Raises StageError where ray is missing, or runs."""
    if sys.modules.get("ray") and os.environ.get(_LOOPBACK) != "0":
        raise StageError("ray was imported before and would listen on every interface: serve from a fresh process")
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
