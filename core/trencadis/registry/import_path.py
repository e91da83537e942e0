"""Components by import path, ``name = "my_package.module:Policy"``: for a strategy that is in no plugin yet.

The attribute is a class of the noun's contract, or a function that says by its annotation that it returns one: anything else is refused
before it is called. It is called with what ``[noun.options]`` holds as keyword arguments; a parameter named ``context`` receives the
``ComponentContext``. Such a component states neither requirements nor an interface version: those take a plugin.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.config.messages import spot
from trencadis.errors import ConfigValueError, ContractError, PluginLoadError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces.component import Component, ComponentContext, import_attribute
from trencadis.interfaces.noun import Noun
from trencadis.log import adopt_package
from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.provenance import of_import_path

__all__ = ["import_component"]


def import_component(noun: Noun, path: str, *, key: str, source: str) -> RegisteredComponent:
    """Import ``package.module:Attribute`` and return it as a component of a noun.

    Args:
        noun: The noun.
        path: The import path.
        key: Dotted path of the setting that holds it, for messages.
        source: Who set it, for messages.

    Raises:
        PluginLoadError: The module cannot be imported, or has no such attribute.
        ContractError: The attribute is neither a class of the noun's contract nor a function that says that it returns one.
    """
    where = spot(key, path, source)
    made = _attribute(path, where)
    contract = noun.contract
    adopt_package(path)
    returned = _returned_by(made)
    if not (isinstance(returned, type) and issubclass(returned, contract)):
        raise ContractError(
            f"{where}: is no subclass of {contract.__name__}, and was not called.",
            hint=f"Derive it from {_public(contract)}, or name a function that is annotated as returning one: "
            f"def make() -> {contract.__name__}.",
        )
    component = Component(
        name="by_import_path",
        factory=_factory(made, noun.name),
        config=dict,
        summary=_summary(made),
        interface_version=noun.interface_version,
    )
    return RegisteredComponent(noun=noun.name, name=path, component=component, provenance=of_import_path(path))


def _public(contract: type[Any]) -> str:
    """Return where authors import a contract from: the package, for one of the core's."""
    package = contract.__module__.rpartition(".")[0]
    return f"{package}.{contract.__name__}"


def _attribute(path: str, where: str) -> Any:
    module_name, _, names = path.partition(":")
    hint = "Correct the import path: package.module:Class, installed, on PYTHONPATH or in the current folder."
    if not module_name or not names:
        raise ConfigValueError(f"{where}: is no import path.", hint=hint)
    try:
        return import_attribute(path)
    except BaseException as error:
        reraise_interrupt(error)
        raise PluginLoadError(f"{where}: cannot be imported: {as_words(error)}.", hint=hint) from error


def _returned_by(made: Any) -> Any:
    """Return what a call of a class or an annotated Python function gives; None if nothing says it. Calls neither."""
    if isinstance(made, type):
        return made
    if not inspect.isfunction(made):
        return None
    try:
        return typing.get_type_hints(made).get("return")
    except Exception:  # an annotation that names what is not there says nothing
        return None


def _factory(made: Callable[..., Any], noun: str) -> Callable[[Any, ComponentContext], Any]:
    def factory(options: Mapping[str, Any], context: ComponentContext) -> Any:
        parameters = inspect.signature(made).parameters
        extra = {"context": context} if "context" in parameters else {}
        try:
            inspect.signature(made).bind(**options, **extra)
        except TypeError as error:
            known = ", ".join(name for name in parameters if name != "context") or "none"
            given = ", ".join(options) or "none"
            raise ConfigValueError(
                f"[{noun}.options]: {getattr(made, '__qualname__', made)} cannot be called with them: {error}.",
                hint=f"Given: {given}. It takes: {known}.",
            ) from error
        return made(**options, **extra)

    return factory


def _summary(made: Any) -> str:
    text = inspect.getdoc(made) or ""
    return text.splitlines()[0] if text else "By import path."
