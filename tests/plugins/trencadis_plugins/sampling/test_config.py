from __future__ import annotations

import pytest

from trencadis_plugins.sampling.config import ORDERS, StandardConfig


def test_the_default_order_is_that_of_vllm():
    assert StandardConfig().order == "vllm"


def test_an_unknown_order_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=ORDERS[-1]):
        StandardConfig(order="alphabetical")


def test_log_probabilities_are_the_models_own_unless_told_otherwise():
    assert StandardConfig().logprobs == "raw"
    assert StandardConfig(logprobs="processed").logprobs == "processed"
    with pytest.raises(ValueError, match="processed"):
        StandardConfig(logprobs="cooked")


def test_lists_of_processors_are_empty_unless_given():
    assert StandardConfig().chain == StandardConfig().processors == ()
