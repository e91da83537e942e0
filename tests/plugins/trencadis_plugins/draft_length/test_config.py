from __future__ import annotations

import attrs
import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigError
from trencadis_plugins.draft_length.config import FixedConfig, GoodputConfig, TableConfig


@pytest.fixture
def load():
    from trencadis.registry import Registry

    settings = Registry.discover().settings

    def _load(text, tmp_path):
        file = tmp_path / "serve.toml"
        file.write_text(text)
        return load_config(file=file, settings=settings, environ={}).config.draft_length

    return _load


@pytest.mark.parametrize("config_class", [FixedConfig, TableConfig, GoodputConfig])
def test_every_setting_has_a_default_a_help_and_a_unit(config_class):
    config_class()
    for field in attrs.fields(config_class):
        assert field.metadata["help"]
        assert field.metadata["unit"]


@pytest.mark.parametrize(
    "values",
    [
        {"smoothing": 0.0},
        {"smoothing": 1.0},
        {"prior_weight": 0.0},
        {"margin_ratio": -0.1},
        {"margin_ratio": 1.1},
        {"probe_steps": 0},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        GoodputConfig(**values)


def test_a_table_comes_from_a_list_in_a_file(load, tmp_path):
    table = load('[draft_length]\nname = "table"\n[draft_length.table]\nsizes = ["1-4:2", "5-:0"]\n', tmp_path)
    assert table.components["table"].sizes == ("1-4:2", "5-:0")


def test_a_gap_in_a_table_is_an_error_with_the_value_and_the_file(load, tmp_path):
    with pytest.raises(ConfigError) as error:
        load('[draft_length.table]\nsizes = ["1-4:2", "6-:0"]\n', tmp_path)
    for part in ("draft_length.table", "sizes", "6-:0", "serve.toml"):
        assert part in str(error.value)
