"""Starts of `firsttoken serve` that something befalls at a random moment while clients ask.

A start is right where every answer is the model's own (of its weights, or of those that took their place, and not of a
mixture), and where in the end the service lives, or its process has ended with a line and without a signal of its own.
After SIGTERM and Ctrl-C whoever had sent a request is answered, and the status is 0.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from services import free_port, tiny_tokenizer
from small_models import small_model

from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan

FOLDERS = ("plain", "stages")
OPTIONS = ((), (), ("--torch-first",), ("--share-prefixes",))
MISFORTUNES = ("nothing", "kill", "term", "interrupt", "cut", "overwrite", "replace", "clock", "template")
PROMPTS = ("the inn", "in the hat")
SERVES = {(misfortune, folder) for misfortune in ("nothing", "clock") for folder in FOLDERS} | {("template", "plain")}
LATEST_S, PATIENCE_S, CLIENTS = 2.5, 180.0, 3
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
CLOCK = """import os, random, time
begun, real = time.monotonic(), time.time
moment, by = (float(number) for number in os.environ["SOAK_CLOCK"].split())
time.time = lambda: real() + (by if time.monotonic() - begun > moment else 0)
"""


@dataclass
class Start:
    """What befalls the start ``number``, so long after it began or, if ``listening``, its port opened, and what came of
    it."""

    number: int
    folder: str
    options: tuple[str, ...]
    misfortune: str
    moment_s: float
    listening: bool
    answers: Counter[str] = field(default_factory=Counter)
    fault: str = ""
    status: int | None = None

    def __str__(self) -> str:
        options = " ".join(self.options)
        begin = "its port" if self.listening else "its start"
        return (
            f"{self.number} {self.folder} {options} {self.misfortune} {self.moment_s:.2f} s after {begin}: {self.fault}"
        )


def draw(
    seed: int, number: int, misfortunes: Sequence[str] = MISFORTUNES, folders: Sequence[str] = FOLDERS
) -> Iterator[Start]:
    """So many starts, each of them of its own number and ``seed`` alone, of these kinds in turn."""
    for index in range(number):
        chance = random.Random(f"{seed} {index}")
        kinds = chance.choice(folders), chance.choice(OPTIONS), misfortunes[index % len(misfortunes)]
        yield Start(index, *kinds, chance.uniform(0, LATEST_S), chance.random() < 0.8)


class Models:
    """Two models of one shape below ``place``, each as a plain folder and in stages, and what they say."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name, seed in (("first", 3), ("second", 4)):
            model = small_model("Llama", vocab_size=260, bos_token_id=None, eos_token_id=None)
            numbers = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=numbers), alpha=0.1)
            for kind in FOLDERS:
                (place / name / kind).mkdir(parents=True)
            model.save_pretrained(place / name / "plain")
            tiny_tokenizer().save_pretrained(place / name / "plain")
            source = ModelSource(model, tiny_tokenizer(), Origin(name, f"{seed:x}" * 64, "real"))
            plan = staged(source.names, StagePlan.from_block(3, range(1, 3)))
            write_staged(source, plan, place / name / "whole")
            shutil.rmtree(place / name / "stages")
            (place / name / "whole").rename(place / name / "stages")
        self.said = {}

    def weights(self, name: str, kind: str) -> list[Path]:
        """The files of weights, in name order."""
        return sorted((self.place / name / kind).glob("**/*.safetensors"))

    def learn(self, name: str, kind: str) -> None:
        """Ask a service that nothing befalls; in stages every stage has answers of its own."""
        texts = self.said.setdefault((name, kind), {prompt: set() for prompt in PROMPTS})
        slow = ("--gbit-per-s", "0.0004") if kind == "stages" else ()
        with service(self.place / name / kind, slow) as (port, process):
            until = time.monotonic() + PATIENCE_S
            while (state := status(port)) != "complete":
                assert process.poll() is None and time.monotonic() < until, f"{name} {kind}: {state}"
                for prompt in PROMPTS:
                    if (answer := ask(port, prompt))[0] == 200:
                        texts[prompt].add(answer[1])
            for prompt in PROMPTS:
                texts[prompt].add(ask(port, prompt)[1])
                assert len(texts[prompt]) == (3 if kind == "stages" else 1), f"{name} {kind} says {texts[prompt]}"


@contextmanager
def service(
    folder: Path, options: tuple[str, ...] = (), more: Mapping[str, str] = {}
) -> Iterator[tuple[int, subprocess.Popen]]:
    """The port and the process of a service that has just been started; it is killed in the end."""
    port = free_port()
    command = [sys.executable, "-m", "firsttoken", "serve", str(folder), "--port", str(port), "--grace-s", "30"]
    with tempfile.TemporaryFile("w+") as errors:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, stderr=errors, text=True, env=environment
        )
        process.errors = errors
        try:
            yield port, process
        finally:
            process.kill()
            process.wait()


def ask(port: int, prompt: str) -> tuple[int, str, float]:
    """The status and text of an answer, and when it was sent; 0 without a connection, and -1 where that broke off."""
    sent_s = math.inf
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.connect()
    except OSError:
        return 0, "", sent_s
    try:
        connection.request("POST", "/v1/completions", body)
        sent_s = time.monotonic()
        answer = connection.getresponse()
        content = json.loads(answer.read())
        text = content["choices"][0]["text"] if answer.status == 200 else content["error"]["message"]
        return answer.status, text, sent_s
    except (OSError, http.client.HTTPException) as error:
        return -1, repr(error), sent_s
    finally:
        connection.close()


def status(port: int) -> str:
    """What the service says of itself, "" where it does not answer."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/stage")
        return json.loads(connection.getresponse().read())["state"]
    return ""


def run(start: Start, models: Models, scratch: Path) -> Start:
    """Start a service of a copy of the folder, let it happen, and judge what came of it."""
    folder = scratch / f"{start.number}" / "model"
    shutil.copytree(models.place / "first" / start.folder, folder)
    chance = random.Random(start.number)
    victim = chance.choice(sorted(folder.glob("**/*.safetensors")))
    other = models.place / "second" / start.folder / victim.relative_to(folder)
    more = {}
    if start.misfortune == "template":
        (folder / "chat_template.jinja").write_text(SLOW)
    if start.misfortune == "clock":
        (scratch / "clock").mkdir(exist_ok=True)
        (scratch / "clock" / "sitecustomize.py").write_text(CLOCK)
        path = os.pathsep.join([str(scratch / "clock"), *sys.path])
        more = {"PYTHONPATH": path, "SOAK_CLOCK": f"{start.moment_s} {chance.choice((-3600, -30, 30, 3600))}"}
    with service(folder, start.options, more) as (port, process):
        over, faults, listens, befell_s = threading.Event(), list[str](), False, math.inf

        def client(number: int) -> None:
            while not over.is_set() and process.poll() is None:
                prompt = PROMPTS[number % len(PROMPTS)]
                code, text, sent_s = ask(port, prompt)
                names = ("first", "second") if start.misfortune in ("overwrite", "replace") else ("first",)
                if code == 200 and not any(text in models.said[name, start.folder][prompt] for name in names):
                    faults.append(f"said {text!r} to {prompt!r}")
                if code == -1 and sent_s < befell_s and start.misfortune in ("term", "interrupt"):
                    faults.append(f"a client that had sent before was not answered: {text}")
                start.answers[str(code)] += 1
                time.sleep(0.02)

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(client, number) for number in range(CLIENTS)]
            while start.listening and not (listens := _listens(port)) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(start.moment_s)
            listened = listens or _listens(port)
            befell_s = time.monotonic()
            if start.misfortune in ("kill", "term", "interrupt"):
                names = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
                process.send_signal(names[start.misfortune])
            elif start.misfortune == "cut":
                os.truncate(victim, chance.randrange(victim.stat().st_size))
            elif start.misfortune == "overwrite":
                with victim.open("r+b") as opened:
                    opened.write(other.read_bytes())
            elif start.misfortune == "replace":
                shutil.copyfile(other, folder / "coming")
                os.replace(folder / "coming", victim)
            faults += _settled(start, port, process, listened)
            over.set()
            for future in asking:
                future.result()
        if process.poll() is None and not faults:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            if process.returncode not in ((0, 2) if start.misfortune == "cut" else (0,)):
                faults.append(f"ended with {process.returncode} when it was told to")
        process.errors.seek(0)
        text = process.errors.read()
        start.status = process.returncode
        early = start.misfortune == "interrupt" and not listened  # Python's own, of what it was importing
        if ("Traceback" in text and not early) or (start.status == 2 and not text.strip()):
            faults.append(f"status {start.status}, and on its terminal: {text[-2000:]}")
        start.fault = "; ".join(faults)
    shutil.rmtree(folder.parent)
    return start


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _settled(start: Start, port: int, process: subprocess.Popen, listened: bool) -> Iterator[str]:
    """Wait until the process has ended as it should, or says what has become of it; what is wrong with that."""
    until = time.monotonic() + PATIENCE_S
    if start.misfortune in ("kill", "term", "interrupt"):
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        allowed = {"kill": (-signal.SIGKILL,), "term": (0,), "interrupt": (0,)}[start.misfortune]
        # before its handlers, where an import may also swallow the interrupt
        early = () if listened else (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT, None)
        if process.returncode not in (*allowed, *early):
            yield f"ended with {process.returncode}"
        return
    while (state := status(port)) not in ("complete", "failed", "degraded") and process.poll() is None:
        if time.monotonic() > until:
            yield f"is {state or 'silent'} after {PATIENCE_S:g} s"
            return
        time.sleep(0.05)
    if process.poll() not in (None, 2):
        yield f"ended with {process.returncode}"
    elif state != "complete" and (start.misfortune, start.folder) in SERVES:
        yield f"is {state or 'not there'}"


def soak(starts: Iterable[Start], at_once: int = 2) -> list[Start]:
    """Run all of ``starts``, so many ``at_once``."""
    starts = list(starts)
    pairs = [(name, kind) for kind in {start.folder for start in starts} for name in ("first", "second")]
    with tempfile.TemporaryDirectory(prefix="starts-") as scratch, ThreadPoolExecutor(at_once) as pool:
        models = Models(Path(scratch) / "models")
        list(pool.map(lambda pair: models.learn(*pair), pairs))
        running = [pool.submit(run, start, models, Path(scratch)) for start in starts]
        return [_shown(future.result()) for future in running]


def _shown(start: Start) -> Start:
    if start.fault:
        print("WRONG", start, flush=True)
    return start
