"""``pytest --trencadis-conform noun=target``: a noun's suite against any class, without a test file.

    noun=package.module:Class                     a class or a function, as by import path in the configuration
    noun=name                                     an installed component
    noun=target,key=value,key=value               with options of the component
    noun=target,suite.attribute=value             with an attribute of the suite, such as suite.may_refuse=true

``--scheduling=target`` and ``--eviction=target`` are short for it, and so is ``--kv-connector=target`` where no path is given.

Imported by the pytest plugin when the option is used, and only then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import load_config
from trencadis.errors import ConfigError, ContractError, TrencadisError, did_you_mean
from trencadis.hookspecs import NOUNS
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import BucketLimits, ModelFacts, ModelSource
from trencadis.registry import Registry
from trencadis.text import resolve_model_path

__all__ = ["Conformance", "ConformanceModule", "items_of", "maker_of", "parse", "suite_class"]

_SUITES = {
    noun: (f"trencadis_testing.{noun}", f"{noun.title().replace('_', '').replace('Kv', 'KV')}Conformance")
    for noun in NOUNS
}
_FURTHER_SUITES = {"kv_connector": ("trencadis_testing.kv_fault_cases", "KVFaultConformance")}

_SERVING = {"kv_policy": "always", "kv_codec": "none"}
"""What a component is given that asks for the one that serves the engine: under a suite, whatever can be loaded is loaded."""

_LIMITS = BucketLimits(
    block_size=4,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_batch_size=2,
    num_blocks=64,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)
_MODEL = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    eos_token_ids=(0,),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=16,
)
"""What a component is told of engine and model: those of the suites' fake backend."""


@attrs.frozen(kw_only=True)
class Conformance:
    """One value of the option.

    Attributes:
        text: Value of the option.
        noun: Which suite.
        target: Import path, or name of an installed component.
        options: Options of the component, as text.
        attributes: Attributes of the suite, as text.
    """

    text: str
    noun: str
    target: str
    options: Mapping[str, str]
    attributes: Mapping[str, str]


def parse(text: str) -> Conformance:
    """Read one value of the option. Pure.

    Raises:
        ConfigError: It is not of the form ``noun=target``, or there is no such noun.
    """
    first, *rest = text.split(",")
    noun, _, target = (part.strip() for part in first.partition("="))
    if not noun or not target:
        raise ConfigError(
            f"--trencadis-conform {text}: no noun and target.",
            hint="Write --trencadis-conform noun=package.module:Class, or noun=name of an installed component.",
        )
    if noun not in NOUNS and noun not in _installed().nouns:
        nouns = _installed().nouns
        raise ConfigError(
            f"--trencadis-conform {text}: there is no noun {noun!r}.{did_you_mean(noun, nouns)} Choose one of: {', '.join(nouns)}."
        )
    options: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for part in rest:
        key, has_value, value = (piece.strip() for piece in part.partition("="))
        if not has_value:
            raise ConfigError(f"--trencadis-conform {text}: {part!r} is no option.", hint="Write key=value.")
        if key.startswith("suite."):
            attributes[key.removeprefix("suite.")] = value
        else:
            options[key] = value
    return Conformance(text=text, noun=noun, target=target, options=options, attributes=attributes)


def suite_class(asked: Conformance) -> type[Any]:
    """Return the noun's suite, made to test the target. Imports the target and, but for an import path, every plugin.

    Raises:
        TrencadisError: The target cannot be imported or is not of the noun's contract, or an option does not exist.
    """
    return _suite_class(asked, _suite_of(asked.noun))


def _suite_of(noun: str) -> tuple[str, str]:
    """Return module and class of a noun's suite."""
    if noun in _SUITES:
        return _SUITES[noun]
    module, _, name = _installed().nouns[noun].suite.partition(":")
    if not name:
        raise ConfigError(f"--trencadis-conform {noun}: the plugin that offers this noun names no suite.")
    return module, name


def _suite_classes(asked: Conformance) -> list[type[Any]]:
    further = _FURTHER_SUITES.get(asked.noun)
    return [suite_class(asked), *([_suite_class(asked, further)] if further else [])]


def _suite_class(asked: Conformance, home: tuple[str, str]) -> type[Any]:
    module, name = home
    suite = getattr(importlib.import_module(module), name)
    body: dict[str, Any] = {"make": maker_of(asked), "__doc__": suite.__doc__, "__module__": module}
    if asked.noun == "kv_connector":
        body["has_threads"] = True  # what is installed may have some; one that has none only takes longer
    if asked.noun in ("sampling", "acceptance"):
        body["tensor"] = staticmethod(_tensor)
    if asked.noun == "backend":
        body["source"] = ModelSource(path=resolve_model_path("demo"))
    body |= {key: _attribute(suite, key, value, asked) for key, value in asked.attributes.items()}
    body["__reduce__"] = lambda made: (_suite_again, (asked.text, home), vars(made))
    return type(name, (suite,), body)


def _suite_again(text: str, home: tuple[str, str]) -> Any:
    """Return an instance of the class that is made of this value of the option: how other processes get it."""
    return _suite_class(parse(text), home)()


def maker_of(asked: Conformance) -> Callable[..., Any]:
    """Return the suite's method ``make``.

    Raises:
        TrencadisError: The target cannot be made.
    """
    by_path = ":" in asked.target
    noun, target = asked.noun, asked.target
    alone = (
        by_path and noun in NOUNS and noun != "kv_connector"
    )  # which asks for the policy and the codec that serve the engine
    registry = Registry.discover(entry_points=()) if alone else _installed()
    flags = [f"--{noun}.{'options' if by_path else target}.{key}={value}" for key, value in asked.options.items()]
    registered = registry.select(noun, target, source="--trencadis-conform", may_import=True)
    # The configuration reads the options, so that their types, and errors in words, are those of a config file.
    name = {f"{noun}.names": (target,)} if noun == "observer" else {f"{noun}.name": target}
    config = load_config(settings=registry.settings, environ={}, flags=flags, overrides=name).config
    options = config.noun(noun).components.get(target, {})

    def make_inner(noun: str, name: str) -> Any:
        name = name or _SERVING.get(noun, "")
        inner = registry.select(noun, name, source="--trencadis-conform", may_import=True)
        return registry.build(inner, config.noun(noun).components.get(name, {}), context)

    context = ComponentContext(clock=SimulatedClock(), seed=0, limits=_LIMITS, model=_MODEL, make=make_inner)
    made = _attribute_of(target) if by_path else None
    if noun == "bucketing" and made is not None and "context" not in inspect.signature(made).parameters:
        # As ``make = Fibonacci`` in a test: called with the limits themselves.
        return lambda _, limits: made(limits, **options)

    def make(suite: object, limits: BucketLimits = _LIMITS) -> Any:
        clock = getattr(suite, "clock", context.clock)
        given = _own_namespace(suite, options) if "namespace" not in asked.options else options
        return registry.build(registered, given, attrs.evolve(context, limits=limits, clock=clock))

    # Once before any test: what cannot be made at all is a mistake on the command line.
    first = make(None)
    try:
        _close(first)
    except Exception as error:
        raise ContractError(
            f"{registered}: close() raised {type(error).__name__}: {error}.",
            hint="It must close right after it was made.",
        ) from error
    return make


def _own_namespace(suite: object, options: Any) -> Any:
    """Return a KV connector's options with a namespace of the test's own: what earlier tests left in a store is not there."""
    if suite is None or not attrs.has(type(options)) or "namespace" not in attrs.fields_dict(type(options)):
        return options
    values = vars(suite)
    return attrs.evolve(options, namespace=values.setdefault("_namespace", f"conformance-{secrets.token_hex(8)}"))


@functools.cache
def _installed() -> Registry:
    """Return every installed plugin; found once, for a suite makes a connector in each of its tests."""
    return Registry.discover()


def _close(made: Any) -> None:
    if isinstance(made, ConnectorPair):
        made.scheduler.close()
        made.worker.close()
    else:
        getattr(made, "close", lambda: None)()


def _attribute_of(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _tensor(array: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.from_numpy(array)


def _attribute(suite: type[Any], key: str, text: str, asked: Conformance) -> Any:
    """Return the value of a suite's attribute, read as the type it has."""
    names = [name for name, value in vars(suite).items() if not name.startswith("_") and not callable(value)]
    if key not in names:
        known = f"It has: {', '.join(names)}." if names else "It has none."
        raise ConfigError(
            f"--trencadis-conform {asked.text}: {suite.__name__} has no attribute {key!r}.{did_you_mean(key, names)} {known}"
        )
    before = getattr(suite, key)
    try:
        if isinstance(before, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(before, int):
            return int(text)
    except (KeyError, ValueError):
        wanted = "true or false" if isinstance(before, bool) else "a whole number"
        raise ConfigError(f"--trencadis-conform {asked.text}: {key} = {text!r} must be {wanted}.") from None
    if isinstance(before, frozenset):
        return frozenset(word for word in text.split("+") if word)
    return ModelSource(path=text) if isinstance(before, ModelSource) else text


class ConformanceModule(pytest.Module):
    """Collects a noun's suites; its node id is the option's value, so that ids say what was tested.

    Made by :meth:`of`.
    """

    suites: list[type[Any]]

    @classmethod
    def of(cls, session: pytest.Session, asked: Conformance) -> ConformanceModule:
        """Return the collector of one value of the option.

        Raises:
            pytest.UsageError: The value cannot be used; says why.
        """
        try:
            suites = _suite_classes(asked)
        except TrencadisError as error:
            raise pytest.UsageError(str(error)) from error
        home = suites[0].__module__
        path = Path(str(importlib.import_module(home).__file__))
        collector: ConformanceModule = cls.from_parent(session, path=path, nodeid=asked.text)
        collector.suites = suites
        module = ModuleType(home)
        for suite in suites:
            setattr(module, suite.__name__, suite)
        collector.obj = module
        return collector

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Yield the suites' classes."""
        for suite in self.suites:
            yield pytest.Class.from_parent(self, name=suite.__name__)


def items_of(session: pytest.Session, values: Iterable[str]) -> list[pytest.Item]:
    """Return the tests of all values of the option.

    Raises:
        pytest.UsageError: A value cannot be used; says why.
    """
    here = str(session.config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)
    found: list[pytest.Item] = []
    for text in values:
        try:
            asked = parse(text)
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error
        found.extend(session.genitems(ConformanceModule.of(session, asked)))
    return found
