"""Stands in for a process that is a copy of the warm one (``kernel_forkserver.py``).

It is called as ``warm_client.py SOCKET MODULE ARGUMENTS``.

Signals go to the copy, its exit status comes back, and it does not outlive whoever started this, who notices no
difference. Standard library only.
"""

import json
import os
import signal
import socket
import sys

copy = 0


def pass_on(number: int, _: object) -> None:
    """To the copy; before there is one, or before it is known, to end here closes the connection, which ends it."""
    os.kill(copy, number) if copy else sys.exit(128 + number)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, pass_on)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"module": sys.argv[2], "arguments": sys.argv[3:], "folder": os.getcwd(), "environment": dict(os.environ)}
    request["processors"] = sorted(os.sched_getaffinity(0))
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    received = b""
    while b"\n" not in received:
        received += server.recv(64) or sys.exit("firsttoken: the warm process is gone; run again")
    first, _, received = received.partition(b"\n")  # what comes next is the exit status, maybe already
    copy = int(first)
    parent = os.getppid()
    server.settimeout(1.0)
    while not received and os.getppid() == parent:  # to end here closes the connection, which ends the copy
        try:
            received = server.recv(64) or b"1"
        except TimeoutError:
            continue
status = int(received or 1)
sys.exit(128 - status if status < 0 else status)
