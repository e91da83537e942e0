from __future__ import annotations

import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigError
from trencadis.registry import Registry
from trencadis_plugins.draft_length.config import GoodputConfig


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


def load(text, file):
    file.write_text(text)
    return load_config(file=file, settings=Registry.discover().settings, environ={}).config.draft_length


def test_a_table_comes_from_a_list_in_a_file_and_a_gap_in_it_is_an_error_with_the_value_and_the_file(tmp_path):
    file = tmp_path / "serve.toml"
    table = load('[draft_length]\nname = "table"\n[draft_length.table]\nsizes = ["1-4:2", "5-:0"]\n', file)
    assert table.components["table"].sizes == ("1-4:2", "5-:0")
    with pytest.raises(ConfigError, match=r"draft_length\.table\] sizes = .*6-:0.*serve\.toml"):
        load('[draft_length.table]\nsizes = ["1-4:2", "6-:0"]\n', file)
