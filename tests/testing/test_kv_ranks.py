"""The suite for connectors among ranks passes a right one and fails each wrong one for its reason."""

from __future__ import annotations

import attrs
import pytest

from trencadis.interfaces import ComponentContext
from trencadis_kv.store import identity, store_scheduler
from trencadis_kv.store.journal import KeyIndex
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.kv_faults import DictStore
from trencadis_testing.kv_ranks import KVRanksConformance


class Suite(KVRanksConformance):
    has_threads = True

    def __init__(self, *, private=False):
        self.outlives_ranks = not private
        self._objects = {}
        self._is_private = private

    def make(self):
        context = ComponentContext(clock=self.clock, seed=0)
        objects, on_change = {} if self._is_private else self._objects, []
        watch = on_change.append if self._is_private else None

        class Store(DictStore):
            def put(self, keys, pieces):
                num_kept = super().put(keys, pieces)
                for key in keys[:num_kept]:
                    for call in on_change:
                        call(key, True)
                return num_kept

        return store_connector(lambda: Store(objects), StoreSettings(), context, name="shelf", watch=watch)


@pytest.fixture
def suite():
    made = []

    def make(**options):
        made.append(Suite(**options))
        return made[-1]

    yield make
    for one in made:
        one.teardown_method()


@pytest.mark.parametrize("private", [False, True])
def test_a_right_connector_passes(suite, private):
    suite(private=private).test_what_ranks_saved_is_loaded_bit_for_bit_on_each("layers and heads over two")
    suite(private=private).test_block_that_a_rank_did_not_save_is_loaded_nowhere("heads over two")
    suite(private=private).test_ranks_that_are_started_again_load_what_is_there_and_nothing_else()
    suite(private=private).test_what_ranks_do_is_counted_once()


def test_keys_that_do_not_name_the_heads_are_noticed(suite, monkeypatch):
    real = identity.compat_id
    monkeypatch.setattr(
        "trencadis_kv.store.description.compat_id",
        lambda layout, **more: real(attrs.evolve(layout, first_head=0, last_head=2), **more),
    )
    monkeypatch.setattr(
        "trencadis_kv.store.objects.key_prefix", lambda namespace, *, compat, layout: f"kv1/{namespace}/{compat.hex()}/"
    )
    # Which rank's bytes are read depends on which wrote last.
    with pytest.raises(AssertionError, match=r"rank [01], heads (0 to 1|2 to 3), .* has not the bytes that were saved"):
        suite().test_what_ranks_saved_is_loaded_bit_for_bit_on_each("heads over two")


def test_what_ranks_had_that_are_gone_is_not_found(suite, monkeypatch):
    monkeypatch.setattr(KeyIndex, "clear", lambda self, prefix: None)
    with pytest.raises(AssertionError):
        suite(private=True).test_ranks_that_are_started_again_load_what_is_there_and_nothing_else()


def test_tokens_that_are_counted_by_each_rank_are_noticed(suite, monkeypatch):
    real = store_scheduler.repeat
    monkeypatch.setattr(
        store_scheduler, "repeat", lambda message, state, *, is_first: real(message, state, is_first=True)
    )
    with pytest.raises(AssertionError):
        suite().test_what_ranks_do_is_counted_once()


def test_a_connector_whose_sides_share_memory_is_told_what_it_lacks():
    one = KVRanksConformance()
    one.make = LoopConnector().pair
    with pytest.raises(AssertionError, match="worker side does not inherit SupportsRemoteScheduler"):
        one.test_what_ranks_do_is_counted_once()
