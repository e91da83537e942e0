from __future__ import annotations

import base64
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from trencadis.text import Tokenizer
from trencadis_server.protocol.embeddings import EmbeddingList
from trencadis_server.protocol.json_body import json_response

PATH = "/v1/embeddings"


def test_base64_is_the_same_vectors_as_little_endian_float32(serve: Any, tokenizer: Tokenizer) -> None:
    texts = ["Hello there", "Good day"]

    async def use(api: Any) -> tuple[Any, Any, int, Any]:
        size = api.llm.model.embedding_size
        numbers = await api.ok(PATH, input=texts, dimensions=size)
        packed = await api.ok(PATH, input=texts, encoding_format="base64")
        return numbers, packed, size, await api.error(PATH, input=["x", "y " * 300])

    numbers, packed, size, (status, error) = serve(use)
    assert (status, error["param"], error["code"]) == (400, "input[1]", "context_length_exceeded")
    msgspec.convert(numbers, EmbeddingList)
    for index, (one, other) in enumerate(zip(numbers["data"], packed["data"], strict=True)):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert decoded.shape == (size,)
        np.testing.assert_array_equal(decoded, np.array(one["embedding"], np.float32))
        assert one["index"] == other["index"] == index
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert numbers["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_text_and_its_token_ids_have_one_vector(serve: Any, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("Hello there"))

    async def use(api: Any) -> list[Any]:
        answers = [await api.ok(PATH, input=value) for value in ("Hello there", ["Hello there"], ids, [ids])]
        return [answer["data"][0]["embedding"] for answer in answers]

    first, *others = serve(use)
    assert others == [first] * 3


def test_many_vectors_are_written_beside_the_event_loop_each_by_itself(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trencadis_server.routes import embeddings

    written: list[tuple[int, set[type]]] = []

    def noted(answer: EmbeddingList) -> Any:
        written.append((threading.get_ident(), set(map(type, answer.data))))
        return json_response(answer)

    monkeypatch.setattr(embeddings, "json_response", noted)

    async def use(api: Any) -> tuple[int, Any]:
        return threading.get_ident(), [
            await api.ok(PATH, input=[[5]]),
            await api.ok(PATH, input=[[5]] * 300),
        ]

    loop, (one, many) = serve(use)
    assert [thread == loop for thread, _ in written] == [True, False]
    assert [kinds for _, kinds in written] == [{msgspec.Raw}] * 2
    assert [item["embedding"] for item in many["data"]] == [one["data"][0]["embedding"]] * len(many["data"])
