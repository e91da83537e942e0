from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from trencadis.client.client_embedding import ClientEmbedding
from trencadis.errors import BackendError, InvalidRequestError
from trencadis.records import Embedding


def vector(name: str, error: str = "") -> Embedding:
    return Embedding(request_id=name, vector=np.zeros(0 if error else 2, np.float32), num_tokens=1, error=error)


def test_vectors_come_in_the_order_of_the_texts_whichever_is_done_first() -> None:
    future: Future[list[Embedding]] = Future()
    client = ClientEmbedding("a", [(1,), (2,), (3,)], future)
    assert [request.request_id for request in client.requests] == ["a/0", "a/1", "a/2"]
    for name in ("a/2", "a/0"):
        client.add(vector(name))
        assert not future.done()
    client.add(vector("a/1"))
    assert [one.request_id for one in future.result()] == ["a/0", "a/1", "a/2"]


def test_one_failure_fails_them_all_and_what_comes_later_is_dropped() -> None:
    future: Future[list[Embedding]] = Future()
    client = ClientEmbedding("a", [(1,), (2,)], future)
    client.add(vector("a/1", error="the device is on fire"))
    with pytest.raises(BackendError, match=r"'a/1' failed: the device is on fire"):
        future.result(0)
    client.add(vector("a/0"))
    client.fail(InvalidRequestError("late"))
    with pytest.raises(BackendError):
        future.result(0)


def test_no_texts_are_answered_at_once() -> None:
    future: Future[list[Embedding]] = Future()
    ClientEmbedding("a", [], future).finish_if_complete()
    assert future.result(0) == []
