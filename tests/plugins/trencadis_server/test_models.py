from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import trencadis
from trencadis_server.config import ServerConfig
from trencadis_server.errors import ApiError
from trencadis_server.routes.models import check_embeds, check_generates

NAMES = ServerConfig(model_name="house/main,short")


def test_every_name_is_listed_and_can_be_looked_up(serve: Any) -> None:
    async def use(api: Any) -> tuple[Any, list[Any]]:
        assert (await api.http.get("/version")).json() == {"version": trencadis.__version__}
        listed = (await api.http.get("/v1/models")).json()
        return listed, [(await api.http.get(f"/v1/models/{card['id']}")).json() for card in listed["data"]]

    listed, cards = serve(use, config=NAMES)
    assert listed == {"object": "list", "data": cards}
    assert [card["id"] for card in cards] == ["house/main", "short"]
    assert cards[1] == {
        "id": "short",
        "object": "model",
        "created": 7,
        "owned_by": "trencadis",
        "root": "house/main",
        "parent": None,
        "max_model_len": 256,
    }


def test_an_unknown_name_is_answered_with_those_there_are(serve: Any) -> None:
    async def use(api: Any) -> Any:
        response = await api.http.get("/v1/models/house/mian")
        return response.status_code, response.json()["error"]

    status, error = serve(use, config=NAMES)
    assert (status, error["code"]) == (404, "model_not_found")
    assert '"house/main", "short"' in error["message"]
    assert 'Did you mean "house/main"?' in error["message"]


def test_the_answer_has_the_name_the_client_asked_for(serve: Any) -> None:
    answer = serve(lambda api: api.ok("/v1/completions", model="short", prompt=[5], max_tokens=1), config=NAMES)
    assert answer["model"] == "short"


CALLS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/embeddings": {"input": [5]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


def test_the_model_may_be_left_out_of_every_request_and_the_document_says_so(serve: Any) -> None:
    async def use(api: Any) -> tuple[Any, Any]:
        answers = [
            (path, await api.http.post(path, json={**body, **named}))
            for named in ({}, {"model": None}, {"model": ""})
            for path, body in CALLS.items()
        ]
        return answers, api.app.openapi()

    answers, document = serve(use, config=NAMES)
    for path, answer in answers:
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", "house/main") == "house/main"
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    assert set(CALLS) == set(posts)
    for operation in posts.values():
        content = operation["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]
        assert "model" not in schema.get("required", [])
        assert "left out" in schema["properties"]["model"]["description"]


def test_an_encoder_is_said_not_to_generate_and_another_model_not_to_embed() -> None:
    encoder: Any = SimpleNamespace(model=SimpleNamespace(generates=False, embedding_size=8, architecture="Encoder"))
    decoder: Any = SimpleNamespace(model=SimpleNamespace(generates=True, embedding_size=0, architecture="Decoder"))
    with pytest.raises(ApiError, match=r"\(Encoder\) is an encoder"):
        check_generates(encoder)
    with pytest.raises(ApiError, match=r"\(Decoder\) cannot embed"):
        check_embeds(decoder)
    check_generates(decoder)
    check_embeds(encoder)
