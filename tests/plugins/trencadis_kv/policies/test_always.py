from __future__ import annotations

import math

from trencadis_kv.interfaces import FailureView, SaveView, SourceView
from trencadis_kv.policies.always import Always
from trencadis_kv.testing import KVPolicyConformance
from trencadis_kv.testing.kv_policy import load_view


class TestAlways(KVPolicyConformance):
    make = Always


def test_everything_is_moved_however_long_it_takes():
    policy = Always()
    assert policy.admits_load(load_view(1, load_s=1e6, compute_s=1e-6, timeout_s=7.0)) == 7.0
    assert policy.admits_save(SaveView(num_blocks=9, num_bytes=9, staged_fraction=1.0)) == 9


def test_the_source_with_the_most_is_chosen_and_the_first_of_equals():
    sources = [SourceView(name=str(n), num_tokens=n, load_s=math.nan) for n in (16, 64, 64, 32)]
    assert Always().choose_source(sources) == 1


def test_what_fails_is_computed():
    view = FailureView(cause="lost", num_valid_tokens=0, num_lost_tokens=16, num_attempts=1)
    assert Always().on_failure(view) == "compute"
