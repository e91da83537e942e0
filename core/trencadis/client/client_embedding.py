"""What a client asked to embed as a whole: some texts, and the one answer to them all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from trencadis.errors import BackendError, TrencadisError
from trencadis.records import Embedding, EmbeddingRequest

__all__ = ["ClientEmbedding"]


class ClientEmbedding:
    """Collects the vectors of some texts, in their order.

    Args:
        request_id: The client's; texts are named ``id/0``, ``id/1`` ...
        token_ids: Of each text.
        future: Gets all vectors, or the first error.

    Attributes:
        request_id: The client's.
        requests: What the engine is asked, by text.
    """

    def __init__(self, request_id: str, token_ids: Sequence[tuple[int, ...]], future: Future[list[Embedding]]) -> None:
        self.request_id = request_id
        self.requests = tuple(
            EmbeddingRequest(request_id=f"{request_id}/{index}", token_ids=ids) for index, ids in enumerate(token_ids)
        )
        self._future = future
        self._vectors: dict[str, Embedding] = {}

    def add(self, embedding: Embedding) -> None:
        """Take one vector, or learn that its text failed."""
        if embedding.error:
            self.fail(BackendError(f"request {embedding.request_id!r} failed: {embedding.error}"))
            return
        self._vectors[embedding.request_id] = embedding
        self.finish_if_complete()

    def finish_if_complete(self) -> None:
        """Answer once every vector is there; without texts that is at once."""
        if len(self._vectors) == len(self.requests) and not self._future.done():
            self._future.set_result([self._vectors[request.request_id] for request in self.requests])

    def fail(self, error: TrencadisError) -> None:
        """Answer with an error; what comes later is dropped."""
        if not self._future.done():
            self._future.set_exception(error)
