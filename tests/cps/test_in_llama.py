"""What a client of llama.cpp's server sees of a request: how much it says, and how it ends."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from firsttoken.study.errors import FirstTokenError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb24_who_is_preempted import in_llama

SAID = 'data: {"tokens": [1, 2]}'
ENDS = {
    "whole": ([SAID, SAID, 'data: {"tokens": [], "stop": true, "truncated": false}'], 200, "whole", 4, False),
    "forgot": ([SAID, SAID, 'data: {"tokens": [], "stop": true, "truncated": true}'], 200, "whole", 4, True),
    "cut": ([SAID, 'data: {"stop": true, "truncated": true}', "data: [DONE]"], 200, "cut", 2, False),
    "failed": ([SAID, 'error: {"code": 500, "message": "Context size has been exceeded."}'], 200, "failed", 2, False),
    "failed as data": ([SAID, 'data: {"error": {"code": 500}}'], 200, "failed", 2, False),
    "refused": (['{"error": {"code": 400}}'], 400, "failed", 0, False),
}


@pytest.mark.parametrize(("lines", "status", "ending", "said", "forgot"), ENDS.values(), ids=ENDS)
def test_how_a_request_ends(lines, status, ending, said, forgot) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["prompt"], body["n_predict"]) == ([5, 6, 7], 4)
            self.send_response(status)
            self.end_headers()
            self.wfile.write("\n\n".join([*lines, ""]).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        end = in_llama.asked(server.server_port, 4, [5, 6, 7])
    assert end == {"prompt_tokens": 3, "said_tokens": said, "ending": ending, "forgot": forgot}


def test_without_llama_its_set_up_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(in_llama, "PYTHON", tmp_path / "python")
    with pytest.raises(FirstTokenError, match=r"run env/clients/setup\.sh"):
        in_llama.llama_full(load_profile("full"))
