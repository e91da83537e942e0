"""A client whose grammar takes minutes to compile is refused, and the streams of others go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.server.openai_server import Running, running
from trencadis import AsyncLLM
from trencadis.client.factory import configure
from trencadis_server.config import ServerConfig


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tables = {
        "engine": {"placement": "process", "max_num_seqs": 8, "warmup": False},
        "cache": {"num_blocks": 512},
        "observer": {"names": []},
    }
    llm = AsyncLLM.from_config(*configure("demo", config_file=None, tables=tables))
    with running(llm, ServerConfig()) as made:
        yield made
    asyncio.run(llm.close())


@pytest.mark.nightly  # of the sampler alone: tests/plugins/trencadis_plugins/sampling/test_grammar.py
def test_a_stream_goes_on_while_anothers_grammar_is_compiled_until_that_is_refused(server: Running) -> None:
    refusals: list[openai.BadRequestError] = []

    def poison() -> None:
        body = {"guided_regex": ".*" * 10_000 + "x"}
        with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="demo", prompt="x", max_tokens=5, stream=True, extra_body=body)
        refusals.append(caught.value)

    thread = threading.Thread(target=poison)
    num_tokens = 0
    with server.client() as client:
        client.completions.create(model="demo", prompt="x", max_tokens=1)
        thread.start()
        while thread.is_alive():
            extra: Any = {"ignore_eos": True}
            for _ in client.completions.create(
                model="demo", prompt="The sea", max_tokens=50, stream=True, extra_body=extra
            ):
                num_tokens += thread.is_alive()
    thread.join()
    assert num_tokens >= 100
    (refusal,) = refusals
    assert refusal.param == "guided_regex"
    assert "it takes longer than 3 s to compile" in refusal.message
