from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import attrs
import pytest

from trencadis.config.schema import BucketingConfig, CacheConfig, Config, EngineConfig
from trencadis.engine.batching.warmup import check_misses
from trencadis.engine.cache.cache_size import without_sharing
from trencadis.engine.guard import Guarded
from trencadis.engine.speculation.components import check_speculation, with_drafter
from trencadis.engine.speculation.drafting import Speculation
from trencadis.errors import CapabilityError, ConfigValueError
from trencadis.interfaces import BackendCapabilities, BucketingStrategy, Executor
from trencadis.records import Bucket, ModelFacts
from trencadis_testing.doubles import AsManyAsMay, Matching, ScriptedSpeculator
from trencadis_testing.engines import ExactShapes

PLAIN = BackendCapabilities(layout="ragged", default_block_size=4)
MODEL = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    eos_token_ids=(0,),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=16,
)


def providing(*names: str) -> BackendCapabilities:
    return attrs.evolve(PLAIN, provides=frozenset(names))


def speculation(*, trees: bool, supports_trees: bool = True) -> Speculation:
    drafter, rule = ScriptedSpeculator(lambda tokens: []), Matching()
    drafter.drafts_trees, rule.supports_trees = trees, supports_trees
    return Speculation(speculator=drafter, length=AsManyAsMay(), acceptance=rule)


def test_prefix_caching_goes_off_where_no_block_is_shared() -> None:
    config = Config(cache=CacheConfig(prefix_caching=True))
    assert without_sharing(config, PLAIN) is config
    assert not without_sharing(config, attrs.evolve(PLAIN, shares_blocks=False)).cache.prefix_caching


def executor(capabilities: BackendCapabilities) -> Executor:
    return cast("Executor", SimpleNamespace(capabilities=capabilities))


def test_trees_need_a_backend_and_a_rule_that_take_them() -> None:
    able, plain = executor(providing("backend.tree_attention")), executor(PLAIN)
    check_speculation(None, plain)
    check_speculation(speculation(trees=False, supports_trees=False), plain)
    check_speculation(speculation(trees=True), able)
    with pytest.raises(CapabilityError, match=r"ScriptedSpeculator drafts trees.*backend\.tree_attention"):
        check_speculation(speculation(trees=True), plain)
    with pytest.raises(CapabilityError, match="Matching takes linear drafts only"):
        check_speculation(speculation(trees=True, supports_trees=False), able)


def test_what_a_drafter_keeps_is_taken_from_the_room_of_the_cache() -> None:
    class Keeping(ScriptedSpeculator):
        kv_bytes_per_token = 4  # type: ignore[assignment]

    assert with_drafter(MODEL, None) is MODEL
    assert with_drafter(MODEL, ScriptedSpeculator(lambda tokens: [])) is MODEL
    assert with_drafter(MODEL, Keeping(lambda tokens: [])).kv_bytes_per_token == 20


@pytest.mark.parametrize(("warmup", "why"), [(True, "lists no bucket"), (False, r"engine\.warmup is off")])
def test_an_engine_that_would_refuse_every_request_is_refused(warmup: bool, why: str) -> None:
    config = Config(
        engine=attrs.evolve(EngineConfig(), warmup=warmup), bucketing=BucketingConfig(name="x", on_miss="refuse")
    )
    guarded = Guarded(BucketingStrategy, "exact shapes", ExactShapes())
    with pytest.raises(ConfigValueError, match=why):
        check_misses(config, guarded, ())
    check_misses(config, guarded, (Bucket(1, 1, 1),))
    check_misses(Config(), guarded, ())
