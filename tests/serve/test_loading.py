"""A service whose stages are on their way, in this process: loads that fail, and clients that leave."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from dying_link import DyingLink
from services import COMPLETIONS, ENDLESS, LIMITS

from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken_serve.chat.text import read_vocabulary
from firsttoken_serve.http.app import Replica, build_app
from firsttoken_serve.retrying_server import StagedService
from firsttoken_serve.service_config import ServiceConfig


class TestLoading:
    @pytest.fixture
    def broken(self, tiny, tmp_path) -> Path:
        """One byte of a shard of stage 1 differs."""
        folder = tmp_path / "tiny"
        shutil.copytree(tiny, folder)
        shard = sorted((folder / "1-A").glob("*layer*"))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        return folder

    @staticmethod
    def served(folder: Path, link: Link, ask) -> Any:
        """What ``ask`` finds of a replica that loads over ``link``, in this process."""
        config = ServiceConfig(folder, **LIMITS)
        limits = RequestLimits(max_prompt_tokens=64, max_new_tokens=config.max_new_tokens)
        server = StagedService(folder, [link], limits, retry_s=0.05)
        app = build_app(Replica(server, read_vocabulary(folder, 64), config, "the-replica"), server, config)
        server.start()

        async def run() -> Any:
            transport = httpx.ASGITransport(app=app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client,
            ):
                return await ask(client)

        return asyncio.run(run())

    def test_that_fails_is_a_503_with_its_reason(self, broken):
        async def ask(client):
            answer = await client.post(COMPLETIONS, json={"prompt": "the", "stream": True})
            return answer, await client.get("/health"), await client.get("/stage")

        answer, health, stage = self.served(broken, Link(), ask)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading_failed" and "layer" in answer.json()["error"]["message"]
        assert health.status_code == 503 and health.json()["stage"] == 0 and "layer" in health.json()["error"]
        assert stage.status_code == 200 and stage.json()["replica"] == "the-replica"

    def test_gives_the_place_of_a_request_that_is_cancelled_back(self, tiny):
        """Ray ends what a client has left so; whoever computes on would hold the place to the end of the answer."""

        async def ask(client):
            answer = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": ENDLESS, "max_tokens": 9000}))
            while (await client.get("/stage")).json()["sessions"] == 0:
                await asyncio.sleep(0.02)
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer
            return (await client.get("/metrics")).text

        assert re.search(r'outcome="cancelled"} 1\.0', self.served(tiny, Link(), ask))

    def test_that_dies_after_stage_1_leaves_a_healthy_degraded_service(self, tiny):
        async def ask(client):
            while (health := await client.get("/health")).json()["state"] != "degraded":
                await asyncio.sleep(0.02)
            return health, await client.post(COMPLETIONS, json={"prompt": "the", "max_tokens": 4})

        health, answer = self.served(tiny, DyingLink(120_000), ask)
        assert health.status_code == 200 and health.json()["stage"] == 1 and "link died" in health.json()["error"]
        assert answer.status_code == 200 and answer.json()["stage"] == 1
