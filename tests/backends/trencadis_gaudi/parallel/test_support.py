"""The table of what the backend's settings do among several ranks."""

from __future__ import annotations

import attrs
import pytest

from support.backends import gaudi_ranks
from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.parallel.support import FEATURES

ASKING = {
    "mode": "lazy",
    "capture": "budgeted",
    "layout": "unified",
    "contiguous": True,
    "merged_prefill": True,
    "fused_kernels": True,
    "fp8": "dynamic",
    "kv_cache_dtype": "fp8",
    "warmup_required": 4,
}
"""A value of each setting that asks for the feature."""
KEYS = [one.setting.rpartition(".")[2] for one in FEATURES]


def test_every_row_is_of_a_setting_and_asked_for():
    fields = attrs.fields_dict(GaudiConfig)
    for feature, key in zip(FEATURES, KEYS, strict=True):
        assert feature.setting == f"backend.gaudi.{key}"
        assert key in fields
        assert feature.is_asked(ASKING[key])


@pytest.mark.representatives(1)
@pytest.mark.parametrize("key", KEYS)
def test_joining_others_works_as_the_table_says_and_stages_are_refused_before_any_setting(ranks, key):
    options = {"max_prefill_batch_size": 2} if key == "merged_prefill" else {}
    started = ranks(lambda groups: groups, 2)
    joined = started.call(lambda groups: gaudi_ranks.make_gaudi(**options, **{key: ASKING[key]}).join(groups))
    assert joined == [None, None]
    (error, _) = ranks(lambda groups: groups, 1, pipeline=2).errors(
        lambda groups: gaudi_ranks.make_gaudi(**options, **{key: ASKING[key]}).join(groups)
    )
    assert isinstance(error, BackendError)
    assert str(error).startswith("[parallel] pipeline = 2: the backend gaudi has no stages.")
