from __future__ import annotations

import attrs
import pytest

from trencadis.config.schema import BucketingConfig, CacheConfig, Config, EngineConfig
from trencadis.engine.batching.warmup import check_misses
from trencadis.engine.cache.cache_size import without_sharing
from trencadis.engine.guard import Guarded
from trencadis.errors import ConfigValueError
from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import Bucket, ModelFacts
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


def test_prefix_caching_goes_off_where_no_block_is_shared() -> None:
    config = Config(cache=CacheConfig(prefix_caching=True))
    assert without_sharing(config, PLAIN) is config
    assert not without_sharing(config, attrs.evolve(PLAIN, shares_blocks=False)).cache.prefix_caching


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
