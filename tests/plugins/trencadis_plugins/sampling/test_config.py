from __future__ import annotations

import pytest

from trencadis_plugins.sampling.config import ORDERS, StandardConfig


def test_defaults_are_those_of_vllm_with_nothing_added():
    config = StandardConfig()
    assert (config.order, config.logprobs, config.chain, config.processors) == ("vllm", "raw", (), ())


def test_unknown_choices_are_refused_with_the_choices():
    with pytest.raises(ValueError, match=ORDERS[-1]):
        StandardConfig(order="alphabetical")
    with pytest.raises(ValueError, match="processed"):
        StandardConfig(logprobs="cooked")
