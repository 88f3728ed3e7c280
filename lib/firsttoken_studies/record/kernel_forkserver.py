"""Notebooks without their imports: each kernel is a copy of one process that has imported everything, and nothing more.

To import torch, transformers, peft and the plotting libraries takes 17 s of two AVX2 cores, for every notebook and for
the papermill that runs it. A process that has done so once, holds no tensor and has started no thread pool can be
forked in milliseconds, and a notebook is as alone in its copy as in a process of its own. What measures a cold start
starts fresh processes as before.

``python -m firsttoken_studies.record.kernel_forkserver pytest --nbval notebooks`` runs a command whose kernels start
so.
"""

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError
from firsttoken.study.machine import kernels_multiply
from firsttoken.study.progress import UNSEEN
from firsttoken.study.system.cgroup_limits import stay_on
from firsttoken.study.system.openmp import wait_policy
from firsttoken_studies.probes.sockets import remove_folder, socket_folder

SOCKET = "FIRSTTOKEN_WARM"  # the environment variable that names the socket of the warm process
CLIENT = Path(__file__).with_name("warm_client.py")
MODULES = (
    "firsttoken_studies.record.show",
    "transformers.models.llama.modeling_llama",
    "peft",
    "pandas",
    "seaborn",
    "datasets",
    "papermill.cli",
    "ipykernel.kernelapp",
    "firsttoken_studies.experiments",
    "firsttoken_studies.ledger:verdicts",  # reads ledger and record, which takes 0.8 s, for every notebook
)
_USUAL = {  # the folder that each program takes without the variable
    "JUPYTER_RUNTIME_DIR": ("~/.local/share/jupyter/runtime", "~/Library/Jupyter/runtime"),
    "IPYTHONDIR": ("~/.ipython", "~/.ipython"),
    "MPLCONFIGDIR": ("~/.config/matplotlib", "~/.matplotlib"),
    "HF_HOME": ("~/.cache/huggingface", "~/.cache/huggingface"),
}
_POLL_S = 0.05
_ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # glibc gives every large tensor back to the kernel and takes it anew, page by page: of a prefill of 2,048 tokens
    # on two AVX2 cores that was 1.3 of 10 CPU seconds, and up to a fifth of the wall clock
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}


def possible() -> bool:
    """Return whether processes can be copied: not on macOS, whose libraries do not survive it, nor beside a GPU."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


@contextmanager
def warmed(modules: Sequence[str] | None = None) -> Iterator[None]:
    """Run a process that has imported ``modules`` (None: ``MODULES``; "module:function" is called, too), for the time
    of the block; every process of :func:`command` and every Jupyter kernel called python3 is a copy of it. Where that
    is not possible, or it does not start, nothing changes. Raises StorageError as :func:`socket_folder`."""
    if SOCKET in os.environ or not possible():
        yield
        return
    folder = socket_folder()
    try:
        address, wanted = f"{folder}/warm", MODULES if modules is None else modules
        server = subprocess.Popen(
            [sys.executable, "-m", "firsttoken_studies.record.kernel_forkserver", "--serve", address, *wanted],
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for whoever asked for a copy
            env=surroundings() | _ENVIRONMENT,
        )
        before = {name: os.environ.get(name) for name in (SOCKET, "JUPYTER_PATH")}
        try:
            if server.stdout.readline():  # it listens
                _write_kernel(folder, address)
                os.environ[SOCKET] = address
                os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (str(folder), before["JUPYTER_PATH"])))
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            server.terminate()
            server.wait()
    finally:
        remove_folder(folder)


def surroundings() -> dict[str, str]:
    """The environment of a notebook: this process's, with its own folders, as a kernel starts in another one, and
    without need of a home."""
    ours = {"FIRSTTOKEN_OUT": str(paths.OUT), "FIRSTTOKEN_CACHE": str(paths.CACHE), UNSEEN: "1"}
    return os.environ | wait_policy(kernels_multiply()) | ours | kept_elsewhere(paths.CACHE / "home")


def kept_elsewhere(folder: Path) -> dict[str, str]:
    """Environment variables that put below ``folder`` what Jupyter, IPython, matplotlib and the Hub can't keep at home.

    Without its runtime folder no kernel starts; without the others each process makes its caches anew. A variable that
    is set already stays.
    """
    return {
        name: str(folder / name.lower().split("_")[0].removesuffix("configdir"))
        for name, usual in _USUAL.items()
        if name not in os.environ and not _writable(Path(os.path.expanduser(usual[sys.platform == "darwin"])))
    }


def _writable(folder: Path) -> bool:
    """Return whether ``folder`` takes files, or can be made."""
    # not Path.exists: it raises where a folder on the way may not be entered
    nearest = next(
        folder_above for folder_above in (folder, *folder.absolute().parents) if os.path.exists(folder_above)
    )
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of ``python -m module arguments``, as a copy of the warm process where there is one."""
    if address := os.environ.get(SOCKET):
        return [*_client(address), module, *arguments]
    return [sys.executable, "-m", module, *arguments]


def _client(address: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(CLIENT), address]


def _write_kernel(folder: Path, address: str) -> None:
    """A kernel called python3, found before the environment's own."""
    kernel_folder = folder / "kernels" / "python3"
    kernel_folder.mkdir(parents=True)
    argv = [*_client(address), "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3 (warm)", "language": "python"}
    (kernel_folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def serve(address: str, modules: Sequence[str]) -> None:
    """Import ``modules``, then make a copy for each client of the socket ``address``, until a signal ends it or whoever
    started it is gone."""
    parent = os.getppid()
    for wanted in modules:
        module, _, function = wanted.partition(":")
        with suppress(ImportError, FirstTokenError):  # what fails here is not needed, or fails where it is
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
            listening.bind(address)
            listening.listen()
            selector.register(listening, selectors.EVENT_READ)
            print("listening", flush=True)
            while os.getppid() == parent:
                for key, _ in selector.select(_POLL_S):
                    if key.fileobj is listening:
                        client, _ = listening.accept()
                        if (child := _copy(client, listening, selector)) is not None:
                            children[child] = client
                            selector.register(client, selectors.EVENT_READ, child)
                    else:  # clients say nothing more: this one is gone
                        selector.unregister(key.fileobj)
                        _end(key.data, signal.SIGTERM)
                _report(children, selector)
    finally:
        for child in children:
            _end(child, signal.SIGKILL)


def _copy(client: socket.socket, listening: socket.socket, selector: selectors.BaseSelector) -> int | None:
    """Fork for ``client``: the child runs the module that it asks for, the parent gets its process id."""
    with suppress(OSError, ValueError):
        message, handles, _, _ = socket.recv_fds(client, 1 << 20, 3)
        request = json.loads(message)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the child must not end as this process would
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            for handle in handles:
                os.close(handle)
            with suppress(OSError):  # a client that is gone already is noticed by serve(), which ends its copy
                client.sendall(f"{child}\n".encode())
            return child
        status = 1
        try:
            for opened in (selector, listening, client):
                opened.close()
            status = _become(request, handles)
        finally:
            os._exit(status)
    client.close()
    return None


def _become(request: dict, handles: Sequence[int]) -> int:
    """In the child: take on the client's streams, folder, environment and processors and run its module; returns its
    status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where all this runs in a background
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.stdin = sys.stdout = sys.stderr = None  # those of the warm process know of its files where they can be read
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    stay_on(request["processors"])
    if "torch" in sys.modules:  # which has counted those of the warm process
        sys.modules["torch"].set_num_threads(len(request["processors"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is looked for anew
    os.environ.pop("JPY_PARENT_PID", None)  # a kernel that is not its frontend's child takes it for dead
    sys.argv, sys.path[0] = ["", *request["arguments"]], request["folder"]  # as python -m has them
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        traceback.print_exc()
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _report(children: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell the clients of children that have ended with which status they did."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        client = children.pop(child)
        with suppress(KeyError):
            selector.unregister(client)
        with suppress(OSError):
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        client.close()


def _end(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        with warmed():
            sys.exit(subprocess.run([sys.executable, "-m", *sys.argv[1:]], check=False).returncode)
