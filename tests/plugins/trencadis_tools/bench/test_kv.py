from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trencadis.config import Config
from trencadis.errors import ConfigValueError, InvalidRequestError, StepFailedError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ConnectorPair, SchedulingPolicy
from trencadis.registry import Registry
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.doubles import LoopConnector, _LoopScheduler, _LoopWorker
from trencadis_tools.bench import NO_CONNECTOR, KVResult, KVWorkload, measure_kv

WORKLOAD = KVWorkload(num_tokens=42, num_pairs=3)


@attrs.frozen(kw_only=True)
class Options:
    required: bool = False


def house_of(fake_house: Callable[..., Any], connector: Callable[[Options], Any], **house: Any) -> Any:
    """Return configuration and registry with a connector ``mine``."""
    plugin = types.ModuleType("connectors")
    parts = {
        "trencadis_kv_connectors": Component(
            name="mine", factory=lambda config, context: connector(config), config=Options, summary="Mine.", interface_version=1
        ),
        "trencadis_kv_policies": Component(
            name="always", factory=lambda config, context: KVPolicy(), summary="All.", interface_version=1
        ),
        "trencadis_kv_codecs": Component(
            name="none", factory=lambda config, context: IdentityCodec(), summary="As is.", interface_version=1
        ),
    }  # fmt: skip
    for hook, component in parts.items():
        setattr(plugin, hook, hookimpl(specname=hook)(lambda component=component: [component]))
    config, registry = fake_house(**house)
    registry.register(plugin)
    return config, registry


def measured(house: tuple[Config, Registry], workload: KVWorkload = WORKLOAD, name: str = "mine") -> KVResult:
    (result,) = measure_kv(*house, workload, connectors=[name])
    return result


def shared() -> Callable[[Options], ConnectorPair]:
    """Return a maker of connectors over one dictionary."""
    store = LoopConnector().store
    return lambda _: ConnectorPair(scheduler=_LoopScheduler(store, 4), worker=_LoopWorker(store, 4))


def test_a_second_engine_loads_what_the_first_one_saved(fake_house):
    result = measured(house_of(fake_house, shared()))
    # 42 tokens are ten full blocks of four, and all of them were saved.
    assert (result.num_tokens, result.num_loaded_tokens, result.reader) == (42, 40, "second engine")
    assert (result.num_pairs, result.num_same_texts) == (3, 3)
    assert result.computed_s > 0
    assert result.loaded_s > 0
    assert sorted(result.ratio_quartiles) == list(result.ratio_quartiles)
    # The fake model has 16 bytes of KV a token.
    assert result.load_bytes_per_s == pytest.approx(40 * 16 / result.loaded_s)


def test_a_store_of_the_engines_own_is_read_by_its_writer(fake_house):
    result = measured(house_of(fake_house, lambda _: LoopConnector().pair()))
    assert (result.num_loaded_tokens, result.reader, result.num_same_texts) == (40, "same engine", 3)


def test_without_a_connector_nothing_is_loaded_and_the_noise_is_measured(fake_house):
    result = measured(house_of(fake_house, shared()), name=NO_CONNECTOR)
    assert (result.connector, result.num_loaded_tokens, result.load_bytes_per_s) == (NO_CONNECTOR, 0, 0)
    assert result.num_same_texts == 3


def test_a_connector_that_loads_wrong_blocks_is_told_by_its_texts(fake_house):
    class Shifted(_LoopWorker):
        def _copy_in(self, blocks, hashes):
            super()._copy_in(blocks, [hashes[0]] * len(hashes))

    store = LoopConnector().store

    def make(_: Options) -> ConnectorPair:
        return ConnectorPair(scheduler=_LoopScheduler(store, 4), worker=Shifted(store, 4))

    result = measured(house_of(fake_house, make, strict=False))
    assert result.num_same_texts == 0


def test_the_store_is_required(fake_house):
    def make(options: Options) -> ConnectorPair:
        if options.required:
            raise ConfigValueError("there is no store")
        return LoopConnector().pair()

    with pytest.raises(ConfigValueError, match="there is no store"):
        measured(house_of(fake_house, make))


def test_prompts_are_as_long_as_the_model_takes_and_what_does_not_fit_is_refused_before_anything_is_measured(
    fake_house,
):
    house = house_of(fake_house, shared())
    assert measured(house, attrs.evolve(WORKLOAD, num_tokens=0, num_pairs=1)).num_tokens == 256 - 8
    with pytest.raises(InvalidRequestError, match="at most 248"):
        measured(house, attrs.evolve(WORKLOAD, num_tokens=249))
    with pytest.raises(InvalidRequestError, match="is an encoder"):
        measured(house_of(fake_house, shared(), generates=False))
    for fields in ({"num_tokens": -1}, {"num_pairs": 0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            KVWorkload(**fields)


def test_a_request_that_fails_ends_the_measurement(fake_house):
    class Refuses(SchedulingPolicy):
        def order(self, view):
            raise RuntimeError("no order today")

    with pytest.raises(StepFailedError, match="no order today"):
        measured(house_of(fake_house, shared(), policy=Refuses))
