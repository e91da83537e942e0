"""What speculation needs of the other components, and what it asks of the engine before it is sized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from trencadis.engine.stage import EngineKinds, Made
from trencadis.errors import CapabilityError
from trencadis.interfaces import BackendCapabilities, Executor
from trencadis_stages.speculation.components import check_speculator
from trencadis_testing.doubles import Matching, ScriptedSpeculator
from trencadis_testing.engines import make_engine


def check(*provides: str, trees: bool, supports_trees: bool = True) -> None:
    """Check a speculator that drafts trees, or does not, with a backend and a rule that take them, or do not."""
    capabilities = BackendCapabilities(layout="ragged", default_block_size=4, provides=frozenset(provides))
    drafter, rule = ScriptedSpeculator(lambda tokens: []), Matching()
    drafter.drafts_trees, rule.supports_trees = trees, supports_trees
    executor = cast("Executor", SimpleNamespace(capabilities=capabilities))
    check_speculator(Made(label="drafter", component=drafter), rule, executor)


def test_trees_need_a_backend_and_a_rule_that_take_them() -> None:
    check(trees=False, supports_trees=False)
    check("backend.tree_attention", trees=True)
    with pytest.raises(CapabilityError, match=r"ScriptedSpeculator drafts trees.*backend\.tree_attention"):
        check(trees=True)
    with pytest.raises(CapabilityError, match="Matching takes linear drafts only"):
        check("backend.tree_attention", trees=True, supports_trees=False)


def test_what_a_drafter_keeps_is_taken_from_the_room_of_the_cache() -> None:
    class Keeping(ScriptedSpeculator):
        kv_bytes_per_token = 4  # type: ignore[assignment]

    stage = make_engine(speculator=Keeping(lambda tokens: [])).stage("speculation")
    kinds = EngineKinds(depth=2, kv_bytes_per_token=16, blocks=dict, passes=dict, policy=dict, scheduler=dict)
    composed = stage.compose(kinds)
    assert (composed.depth, composed.num_to_verify, composed.kv_bytes_per_token) == (1, 3, 20)
    assert composed.scheduler() == {"propose": stage.propose}
