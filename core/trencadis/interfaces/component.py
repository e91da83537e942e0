"""What a register hook yields, and what a component's factory is handed."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
from attrs.validators import in_

from trencadis.clock import Clock
from trencadis.errors import ContractError
from trencadis.interfaces.vocabulary import Vocabulary
from trencadis.records import BucketLimits, ModelFacts, ModelSource, ParallelLayout

__all__ = ["Component", "ComponentContext", "NamedModel", "NoConfig", "Stability", "import_attribute"]

Stability = Literal["stable", "provisional", "experimental"]
"""How far one can rely on a component or a contract: see docs/why/stability.md."""


def import_attribute(path: str) -> Any:
    """Import ``package.module:Attribute`` and return the attribute.

    A module that is not installed is looked for in the current folder, which is then added to the end of ``sys.path``: the command
    ``trencadis`` does not have it there, unlike ``python -m trencadis``.

    Raises:
        ImportError: There is no such module.
        AttributeError: It has no such attribute.
        Exception: Whatever the module raises.
    """
    module_name, _, names = path.partition(":")
    top = module_name.partition(".")[0]
    folder = Path.cwd()
    if importlib.util.find_spec(top) is None and ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    found: Any = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@attrs.frozen(kw_only=True)
class NoConfig:
    """The config class of a component that has nothing to set."""


@attrs.frozen(kw_only=True, eq=False)
class NamedModel:
    """A model beside the engine's that a component's config names.

    Attributes:
        source: Where it is, to be loaded as the engine's own model is.
        vocabulary: ``vocabulary()`` reads its tokenizer's tokens, a ``Vocabulary``: takes up to seconds. From any thread.
    """

    source: ModelSource
    vocabulary: Callable[[], Vocabulary]


def _makes_nothing(noun: str, name: str) -> Any:
    raise ContractError(f"this context cannot make the {noun} component {name!r}: it was handed out without an engine.")


def _reads_nothing() -> Vocabulary:
    raise ContractError("this context knows no tokenizer: it was handed out without a model.")


def _finds_nothing(path: str) -> NamedModel:
    raise ContractError(f"this context finds no model {path!r}: it was handed out without a model.")


@attrs.frozen(kw_only=True)
class ComponentContext:
    """What a factory may know. Facts that are not known yet when a noun is built are None.

    Attributes:
        clock: The engine's clock; a component reads no other.
        seed: The engine's seed; a component derives its random numbers from it.
        label: Names the component that is being built, its distribution and version, for its messages; empty outside an engine.
        label_of: ``label_of(noun, name)`` names what ``make(noun, name)`` builds; empty outside an engine.
        budget_s: ``budget_s(noun)`` is how long a call of another component may take, seconds; infinity: any time.
        quarantine_s: ``cache.release_timeout_s``: a KV connector that holds blocks for longer is closed; infinity: none is.
        layout: Over how many ranks the model is divided.
        limits: Shape limits, for components built after the KV cache was sized.
        model: The loaded model, for components built after it was loaded.
        make: ``make(noun, name)`` builds another component: one that this one's config names in a field with the metadata
            ``component``, the noun. Its options are those of its own table. With an empty name, another one of the component
            that serves the noun in this engine.
        vocabulary: ``vocabulary()`` reads the tokenizer's tokens, a ``Vocabulary``: the first call takes up to seconds, so not before
            they are needed. From any thread.
        named_model: ``named_model(path)`` finds a model by directory, file, hub id or built-in name.
        replica: Which copy of the model this engine is, 0 .. num_replicas - 1.
        num_replicas: Copies of the model that share this machine, each an engine in a process of its own.
        own_process: No code but Trencadís' own and that of plugins runs in this process, as in those that its commands start: what no
            component needs may be left out of it.
    """

    clock: Clock
    seed: int
    label: str = ""
    label_of: Callable[[str, str], str] = lambda _, __: ""
    budget_s: Callable[[str], float] = lambda _: math.inf
    quarantine_s: float = math.inf
    layout: ParallelLayout = attrs.Factory(ParallelLayout)
    limits: BucketLimits | None = None
    model: ModelFacts | None = None
    make: Callable[[str, str], Any] = _makes_nothing
    vocabulary: Callable[[], Vocabulary] = _reads_nothing
    named_model: Callable[[str], NamedModel] = _finds_nothing
    replica: int = 0
    num_replicas: int = 1
    own_process: bool = False


def _check_name(_: object, __: attrs.Attribute[str], name: str) -> None:
    if not name or not name.replace("_", "").isalnum() or name != name.lower() or not name[0].isalpha():
        raise ValueError(f"component name {name!r} must be lower-case letters, digits and underscores")


def _names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"requires and provides are sets of capabilities: write {{{names!r}}}, not {names!r}")
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Component:
    """A named strategy that a plugin offers; nothing heavy is imported until its factory is called.

    Attributes:
        name: Lower-case with underscores; unique within its noun.
        factory: ``factory(config, context)`` returns the strategy; imports the heavy class inside.
        config: An attrs class; its fields become the config table ``[noun.name]``, flags and environment names.
        summary: One line for ``trencadis plugins``.
        interface_version: The ``INTERFACE_VERSION`` of the noun's interface that the plugin was written for.
        stability: ``stable``: its name, options and defaults stay, and before version 1.0 the changelog says what does not;
            ``provisional``: they may change with any version, and the changelog says so; ``experimental``: it may go away, and runs only with ``[plugins] experimental = true``.
        requires: Capabilities that some chosen component must provide, such as ``backend.tree_attention``.
        provides: Capabilities this component provides.
        prepare: ``prepare(config)`` is called in the engine's process before the factory of any component, so before torch is imported:
            for environment variables that a library reads when it is imported. Imports nothing heavy.
        preload: ``preload(config)`` is called, after ``prepare``, in a process that the ranks' processes are forked from: it imports what
            they will need, and touches no device and leaves no thread, neither of which a fork can take along. None: each rank starts
            in a fresh interpreter. Of backends.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[[Any, ComponentContext], Any]
    config: type[Any] = NoConfig
    summary: str
    interface_version: int
    stability: Stability = attrs.field(default="provisional", validator=in_(get_args(Stability)))
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    provides: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    prepare: Callable[[Any], None] = lambda _: None
    preload: Callable[[Any], None] | None = None
