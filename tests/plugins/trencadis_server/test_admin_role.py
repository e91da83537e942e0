"""The role of an engine through the administration, and what a client of another role is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from support.server.server_doubles import OneEngine, make_context
from support.strategies.hostile_policies import house
from trencadis.client.async_llm import AsyncLLM
from trencadis.config.load import ResolvedConfig
from trencadis.config.settings import settings_of
from trencadis.errors import WrongRoleError
from trencadis.registry import resolve_plan
from trencadis_server.errors import as_api_error
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.routes.admin import make_admin_app


def administer(use: Callable[[httpx.AsyncClient, AsyncLLM], Awaitable[None]], **tables: Any) -> None:
    config, registry = house(**tables)

    async def main() -> None:
        async with AsyncLLM.from_config(config, registry) as llm:
            app = make_admin_app(
                make_context(OneEngine(llm)),
                supervisor=Supervisor(lambda: None, max_restarts=0),
                registry=registry,
                plan=resolve_plan(config, registry),
                resolved=ResolvedConfig(config=config, sources={}, values={}, settings=settings_of()),
            )
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
                await asyncio.wait_for(use(client, llm), timeout=60)

    asyncio.run(main())


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_role_is_shown_changed_and_felt(placement: str) -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM) -> None:
        assert (await client.get("/admin/role")).json() == {"role": "both", "num_live": 0}
        answer = await client.post("/admin/role", json={"role": "prefill"})
        assert (answer.status_code, answer.json()) == (200, {"role": "prefill", "previous": "both", "num_live": 0})
        with pytest.raises(WrongRoleError, match="role of this engine is prefill"):
            async for _ in llm.generate([1, 2, 3]):
                pass
        await client.post("/admin/role", json={"role": "both"})
        assert [output async for output in llm.generate([1, 2, 3])][-1].finished

    administer(use, engine={"placement": placement}, kv_connector={"name": "host_offload"})


def test_change_that_is_none_is_refused_in_words() -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM) -> None:
        for table in ({"role": "router"}, {"role": "prefill"}, {}, {"role": None}):
            answer = await client.post("/admin/role", json=table)
            assert answer.status_code == 400
            assert "role" in answer.json()["error"]["message"]
        assert (await client.post("/admin/role", content=b"x")).status_code == 415
        assert (await client.get("/admin/role")).json()["role"] == "both"

    administer(use)


def test_client_of_the_wrong_role_is_answered_with_503_and_need_not_come_again() -> None:
    error = as_api_error(WrongRoleError("request 'r' was refused: the role of this engine is prefill."))
    assert (error.status, error.code, error.headers["x-should-retry"]) == (503, "wrong_role", "false")
