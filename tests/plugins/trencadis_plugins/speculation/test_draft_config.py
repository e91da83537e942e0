from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis_plugins.speculation.draft_config import TREES, DraftModelConfig, ParallelDraftConfig


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        (DraftModelConfig, {"max_draft_tokens": 0}),
        (DraftModelConfig, {"sampling": "sometimes"}),
        (DraftModelConfig, {"tokenizer": "mine"}),
        (DraftModelConfig, {"tree": "oak"}),
        (DraftModelConfig, {"tree_width": 0}),
        (DraftModelConfig, {"tree_depth": 0}),
        (DraftModelConfig, {"tree_shape": ()}),
        (DraftModelConfig, {"tree_shape": (2, 0)}),
        (ParallelDraftConfig, {"mask_token_id": -2}),
    ],
)
def test_values_out_of_range_are_refused(table: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        table(**wrong)


@pytest.mark.parametrize("table", [DraftModelConfig, ParallelDraftConfig])
def test_defaults_are_the_demo_and_every_setting_says_what_it_is(table: Any) -> None:
    assert table().model.startswith("demo-")
    for field in attrs.fields(table):
        assert field.metadata["help"].endswith(".")
        assert "unit" in field.metadata
    assert {field.name: field.metadata.get("component") for field in attrs.fields(table)}["backend"] == "backend"


def test_every_kind_of_tree_can_be_named() -> None:
    assert [DraftModelConfig(tree=tree).tree for tree in TREES] == list(TREES)
