"""What each endpoint refuses, with its answer whole. A line of the file: path, body (a text: as it is), status, field, code, message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REFUSALS = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").read_text("utf-8").splitlines()]


def test_what_cannot_be_done_is_refused_in_words_and_leaves_nothing_behind(serve: Any) -> None:
    async def use(api: Any) -> tuple[list[Any], tuple[int, int]]:
        found = []
        for path, body, *_ in REFUSALS:
            if isinstance(body, str):
                response = await api.http.post(path, content=body, headers={"content-type": "application/json"})
            else:
                response = await api.post(path, **body)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            found.append([path, body, response.status_code, error["param"], error["code"], error["message"]])
        return found, await api.until_idle()

    found, (num_used, _) = serve(use)
    assert found == REFUSALS
    assert num_used == 0
