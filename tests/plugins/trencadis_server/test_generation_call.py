from __future__ import annotations

import json
from typing import Any

import pytest

from support.kv.echo_connector import EchoConnector


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": [[5], [6]]}),
    ],
)
def test_transfer_parameters_go_both_ways_for_the_first_prompt(serve: Any, path: str, body: Any) -> None:
    async def use(api: Any) -> tuple[Any, list[Any], Any]:
        asked = {**body, "max_tokens": 3, "kv_transfer_params": {"a": 1}}
        whole = (await api.post(path, **asked)).json()
        text = (await api.post(path, **asked, stream=True, n=2)).text
        plain = (await api.post(path, **body, max_tokens=3)).json()
        return whole, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")], plain

    whole, events, plain = serve(use, connector=EchoConnector())
    assert whole["kv_transfer_params"]["asked"] == {"a": 1}
    assert "kv_transfer_params" not in plain
    (event,) = [event for event in events if "kv_transfer_params" in event]
    assert event["kv_transfer_params"] == whole["kv_transfer_params"]
    assert [(one["index"], one["finish_reason"]) for one in event["choices"]] == [(0, "length")]
    assert {event["system_fingerprint"] for event in events} == {whole["system_fingerprint"]}
