"""What a client asks of a model that turns text into a vector, and what it gets."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from trencadis.records.arrays import Float32Array

__all__ = ["Embedding", "EmbeddingRequest"]


def _token_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen(kw_only=True)
class EmbeddingRequest:
    """One text to embed.

    Attributes:
        request_id: Unique among live requests.
        token_ids: At least one token id; not longer than the model takes.
    """

    request_id: str
    token_ids: tuple[int, ...] = attrs.field(converter=_token_ids, repr=False)


@attrs.frozen(kw_only=True)
class Embedding:
    """The vector of one text.

    Attributes:
        request_id: Id of the request.
        vector: float32 ``[embedding_size]``; empty if it failed.
        num_tokens: Tokens of the text.
        error: Reason of a failure, or empty.
    """

    request_id: str
    vector: Float32Array = attrs.field(eq=attrs.cmp_using(eq=np.array_equal), repr=False)
    num_tokens: int
    error: str = ""
