from __future__ import annotations

from support.nouns import ALL_NOUNS
from trencadis.registry import resolve_plan
from trencadis.registry.listing import rows_of


def test_every_component_has_a_row_and_the_plan_says_which_are_active(fake_house):
    config, registry = fake_house()
    rows = list(rows_of(registry, resolve_plan(config, registry)))
    active = ["bucketing", "scheduling", "eviction", "sampling", "backend", "executor"]
    idle = ["draft_length", "acceptance", "kv_codec", "kv_policy"]  # nobody drafts, and no block leaves the engine
    assert [(row.noun, row.name, row.role) for row in rows] == [
        (noun, "fake", "active" if noun in active else "") for noun in ALL_NOUNS if noun in active + idle
    ]
    assert {row.default for row in rows} == {False}
