from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.observer.config import LogObserverConfig, PrometheusObserverConfig


def test_interval_is_explained_in_seconds_and_refuses_zero():
    (field,) = attrs.fields(LogObserverConfig)
    assert (field.name, field.metadata["unit"], LogObserverConfig().interval_s) == ("interval_s", "s", 5.0)
    assert field.metadata["help"].endswith(".")
    with pytest.raises(ValueError, match="interval_s"):
        LogObserverConfig(interval_s=0.0)


def test_the_models_name_is_left_to_the_server_and_their_names_are_shown():
    config = PrometheusObserverConfig()
    assert (config.model_name, config.vllm_names) == ("", True)
    assert all(field.metadata["help"].endswith(".") for field in attrs.fields(PrometheusObserverConfig))
