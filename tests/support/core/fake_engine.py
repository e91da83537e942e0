"""A configuration and plugins that run the whole engine without a model: the tokens are a known function of the prompt."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

import trencadis_kv
import trencadis_stages
from support.nouns import HOOKS
from trencadis.config import Config
from trencadis.config.schema import CacheConfig, EngineConfig, FixedNounConfig, ModelConfig, ObserverConfig
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component
from trencadis.records import PARAMETER_GROUPS
from trencadis.registry import Registry
from trencadis.text import Tokenizer, load_tokenizer
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.doubles import AsManyAsMay, Matching
from trencadis_testing.engines import ExactShapes, OldestFirst, ServeInOrder
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

__all__ = ["VOCAB_SIZE", "fake_house", "tokenizer"]

VOCAB_SIZE = 4096


OF_KV = ("kv_codec", "kv_policy")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the model in the package: byte-level, 4096 tokens."""
    return load_tokenizer("demo")


@pytest.fixture
def fake_house() -> Callable[..., tuple[Config, Registry]]:
    """Makes a configuration and a registry whose only backend is fake, for the demo's tokenizer."""

    def make(
        *,
        policy: Callable[[], Any] = ServeInOrder,
        bucketing: Callable[[], Any] = ExactShapes,
        speculator: Callable[[], Any] | None = None,
        connector: Callable[[], Any] | None = None,
        sampling: str = "fake",
        tokenizer: str = "",
        **backend: Any,
    ) -> Any:
        options = {"vocab_size": VOCAB_SIZE, "eos": -1, "max_model_len": 256, **backend}
        factories = {
            "bucketing": bucketing,
            "scheduling": policy,
            "eviction": OldestFirst,
            "sampling": ArgmaxSampler,
            "backend": lambda: FakeBackend(**options),
            "executor": FakeExecutor,
            "draft_length": AsManyAsMay,
            "acceptance": Matching,
            "kv_codec": IdentityCodec,
            "kv_policy": KVPolicy,
        }
        if speculator is not None:
            factories["speculation"] = speculator
        if connector is not None:
            factories["kv_connector"] = connector
        plugin = types.ModuleType("fake_house")
        for noun, factory in factories.items():
            hook = hookimpl(specname=HOOKS[noun])(lambda noun=noun, factory=factory: [_component(noun, factory)])
            setattr(plugin, HOOKS[noun], hook)
        config = Config(
            model=ModelConfig(path="demo", tokenizer=tokenizer),
            engine=EngineConfig(warmup=False),
            cache=CacheConfig(num_blocks=512, block_size=4),
            observer=ObserverConfig(names=()),
            **{
                noun: type(getattr(Config(), noun))(name=sampling if noun == "sampling" else "fake")
                for noun in factories
                if noun not in OF_KV
            },
            tables={noun: FixedNounConfig(name="fake") for noun in OF_KV},
        )
        return config, Registry.discover(entry_points=(), extra_plugins=(trencadis_kv, trencadis_stages, plugin))

    return make


def _component(noun: str, factory: Callable[[], Any]) -> Component:
    def make(config: Any, context: Any) -> Any:
        made = factory()
        if noun == "sampling":
            made.honours = frozenset(PARAMETER_GROUPS)  # requests of tests may set any, whatever it does with them
        return made

    return Component(name="fake", factory=make, summary="Fake.", interface_version=1)
