from __future__ import annotations

import pytest
from pydantic import ValidationError

from trencadis_server.protocol.tokenization import DetokenizeRequest, TokenizeRequest


def test_a_model_need_not_be_named() -> None:
    assert TokenizeRequest.model_validate({"prompt": "x"}).model is None
    assert DetokenizeRequest.model_validate({"tokens": []}).tokens == []


def test_tokens_are_whole_numbers_from_zero() -> None:
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate({"tokens": [-1]})
