"""Configuration and plugins of engines on a fake backend whose KV store is a dictionary that goes wrong on command."""

from __future__ import annotations

import types
from typing import Any

import attrs

from trencadis.config import Config
from trencadis.config.schema import CacheConfig, EngineConfig, FixedNounConfig, ModelConfig, ObserverConfig
from trencadis.hookspecs import NOUNS, hookimpl
from trencadis.interfaces import Component, ComponentContext, ConnectorPair
from trencadis.registry import Registry
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.kv_faults import DictStore, Faults, FaultyStore

__all__ = ["VOCAB_SIZE", "Shelf"]

VOCAB_SIZE = 4096


class Shelf:
    """What engines keep their blocks on.

    Attributes:
        objects: By key.
        faults: Of every connection.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults = Faults()

    def connector(self, context: ComponentContext, **settings: Any) -> ConnectorPair:
        return store_connector(
            lambda: FaultyStore(DictStore(self.objects), self.faults), StoreSettings(**settings), context, name="shelf"
        )

    def house(self, *, key: str = "", **settings: Any) -> tuple[Config, Registry]:
        """Return a configuration and its plugins."""
        made = {
            "backend": lambda _: FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256),
            "executor": lambda _: FakeExecutor(),
            "sampling": lambda _: ArgmaxSampler(),
            "kv_connector": lambda context: self.connector(context, **settings),
        }
        plugin = types.ModuleType("shelf")
        for noun, make in made.items():
            component = Component(
                name="fake",
                factory=lambda _, context, make=make: make(context),
                summary="Fake.",
                interface_version=1,
            )
            setattr(plugin, NOUNS[noun], hookimpl(specname=NOUNS[noun])(lambda component=component: [component]))
        base = Config()
        config = Config(
            model=ModelConfig(path="demo"),
            engine=EngineConfig(warmup=False),
            cache=CacheConfig(num_blocks=256, block_size=4, prefix_caching=False, key=key),
            observer=ObserverConfig(names=()),
            tables={"kv_policy": FixedNounConfig(name="always")},
            **{noun: attrs.evolve(getattr(base, noun), name="fake") for noun in made},
        )
        return config, Registry.discover(extra_plugins=(plugin,))
