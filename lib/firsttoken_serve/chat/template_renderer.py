"""Renders a model's chat template in a process of its own, within limits of time, memory and size.

A template is a program that came with the model: nested loops never end, and one product of text takes gigabytes. The
system ends a process at its processor time wherever it is, also within one long operation, which no thread can do to
another. This file is run by itself and so imports the standard library alone, and Jinja where it is asked for.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

CPU_S = 2.0  # of one rendering, which takes 1 ms
MEMORY_BYTES = 1 << 29  # of addresses; Python and Jinja take 30 MB
MOST_CHARS = 1 << 24

Json = dict[str, Any]


class TemplateRefusal(Exception):
    """A template, or Jinja, refuses itself or a conversation; the text is its own."""


class TemplateLimit(Exception):
    """A template has reached a limit, which the text names as the end of a sentence."""


class TemplateRenderer:
    """A process that renders one conversation after another; it is started when it is asked for, and anew when it was
    ended. It ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def render(self, template: str, names: Mapping[str, Any] | None) -> str:
        """The text that ``template`` makes of ``names``; without them it is only compiled.

        Raises TemplateRefusal and TemplateLimit, and BusyError where the system starts no process now.
        """
        line = json.dumps([template, names]).encode() + b"\n"
        with self._turn:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            if not reply.endswith(b"\n"):
                status = process.wait()
                self._forget()
                late = status == -signal.SIGPROF
                raise TemplateLimit(f"takes more than {CPU_S:g} s" if late else f"ended its process ({status})")
        answer: Json = json.loads(reply)
        if "limit" in answer:
            raise TemplateLimit(answer["limit"])
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return answer["text"]

    def close(self) -> None:
        """End the process, if there is one."""
        if (process := self._process) is not None:
            process.kill()
            with self._turn:  # whoever waits for an answer hears of it first
                if self._process is process:
                    process.wait()
                    self._forget()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # somebody has ended it
            self._forget()
        if self._process is None:
            command = [sys.executable, "-P", __file__]  # -P: its folder is no place for the names of libraries
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            try:
                self._process = subprocess.Popen(command, **pipes)
            except OSError as error:
                from firsttoken.study.errors import BusyError  # not at the top: the file is run by itself, too

                raise BusyError(f"no process can be started that renders a chat ({error}); ask again") from error
        return self._process

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # by what was not flushed
            self._process.stdin.close()
        self._process = None


RENDERER = TemplateRenderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.__init__)  # type: ignore[misc]  # its answers are for the parent


# What runs in the process.


def main() -> None:
    """Answer line by line until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for who started it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    room = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (room, most))
    compiled: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        template, names = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = _answer(compiled, template, names)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(compiled: dict[str, Any], template: str, names: Json | None) -> Json:
    try:
        if template not in compiled:
            compiled[template] = template_environment().from_string(template)
        text = "" if names is None else compiled[template].render(names)
    except MemoryError:
        return {"limit": f"takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # the template came with the model, and both it and its compiler raise many kinds
        return {"refusal": (str(error).splitlines() or [type(error).__name__])[0][:300]}
    if len(text) > MOST_CHARS:
        return {"limit": f"writes more than {MOST_CHARS:,} characters"}
    return {"text": text}


def template_environment() -> Any:
    """Return the Jinja environment of a template, as in transformers; sandboxed, as it came with the model."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks for a training what the model says; the text is the same."""

        tags = frozenset(["generation"])

        def parse(self, parser: Parser) -> nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("unmarked"), [], [], body).set_lineno(line)

        def unmarked(self, caller: Any) -> str:
            return caller()

    class PublicNamespace(Namespace):
        """A namespace without underscored names, by which a template could reach Python."""

        def __init__(*values: Any, **names: Any) -> None:
            self, *pairs = values
            attributes = dict(*pairs, **names)
            for name in attributes:
                _check(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            Namespace.__setitem__(self, name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the name {name!r} begins with an underscore")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda shape: datetime.now().strftime(shape),
        "namespace": PublicNamespace,
    }
    return environment


if __name__ == "__main__":
    main()
