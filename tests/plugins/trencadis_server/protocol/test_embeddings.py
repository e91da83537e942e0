from __future__ import annotations

import pytest
from pydantic import ValidationError

from trencadis_server.protocol.embeddings import EmbeddingsRequest


def test_an_encoding_is_one_of_two() -> None:
    for encoding in (None, "float", "base64"):
        EmbeddingsRequest.model_validate({"model": "m", "input": "x", "encoding_format": encoding})
    with pytest.raises(ValidationError):
        EmbeddingsRequest.model_validate({"model": "m", "input": "x", "encoding_format": "binary"})
