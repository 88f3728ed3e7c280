"""Stands in for a process that is a copy of the warm one: ``warm_client.py SOCKET MODULE ARGUMENTS`` (see ``warm.py``).

Signals go to the copy, its exit status comes back; whoever started this notices no difference. Standard library only.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = {"module": sys.argv[2], "arguments": sys.argv[3:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    answers = server.makefile()
    copy = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(copy, number))
    status = int(answers.readline() or 1)
sys.exit(128 - status if status < 0 else status)
