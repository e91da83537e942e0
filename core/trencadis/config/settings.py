"""The catalogue of settings: every value that can be configured, derived from the attrs classes.

Nothing here is written by hand twice: a field of a config class gives the key, the flag, the environment name, the type,
the default, the unit and the meaning. Values and their sources live in ``load.py``.

    attrs class ▶ Setting("bucketing.exponential.limit") ─ key          [bucketing.exponential] limit
                                                         ├ flag         --bucketing.exponential.limit
                                                         └ environment  TRENCADIS_BUCKETING__EXPONENTIAL__LIMIT
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from trencadis.config.schema import Config, FixedNounConfig, ObserverConfig
from trencadis.interfaces.noun import Noun

__all__ = [
    "CORE_TABLES",
    "ENVIRONMENT_PREFIX",
    "NAMES_OF_COMPONENTS",
    "ComponentClasses",
    "Setting",
    "Settings",
    "settings_of",
    "settings_of_table",
    "with_nouns",
]

ENVIRONMENT_PREFIX = "TRENCADIS_"

ComponentClasses = Mapping[str, Mapping[str, type[Any]] | type[Any]]
"""Config classes that plugins bring: by noun, those of its components by name; by any other name, that of a table of its own."""

CORE_TABLES = tuple(field.name for field in attrs.fields(Config) if field.name != "tables")
"""Tables of the schema, in its order."""

_OF_NOUNS = (FixedNounConfig, ObserverConfig)
"""Classes of the tables of nouns."""

NAMES_OF_COMPONENTS = frozenset({"name", "fallback", "shadow", "names"})
"""Keys of a noun's table that name components."""


@attrs.frozen(kw_only=True)
class Setting:
    """One value that can be configured.

    Attributes:
        path: Dotted path, such as ``engine.max_num_seqs``.
        type: Resolved type annotation.
        default: Value if it is not set; ``attrs.NOTHING`` if it must be set.
        help: One sentence: what it means.
        unit: Such as ``tokens``; empty for none.
        secret: The value is never printed.
        attribute: The attrs field that it comes from.
        of_noun: A key of a noun's own table that names components.
    """

    path: str
    type: Any
    default: Any
    help: str
    unit: str
    secret: bool
    attribute: Any
    of_noun: bool = False

    @property
    def table(self) -> str:
        """Dotted path of the table that holds the key."""
        return self.path.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The key within its table."""
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Dots between tables, dashes in the key: ``--engine.max-num-seqs``."""
        return f"--{self.table}.{self.key.replace('_', '-')}"

    @property
    def environment(self) -> str:
        """Two underscores between tables: ``TRENCADIS_ENGINE__MAX_NUM_SEQS``."""
        return ENVIRONMENT_PREFIX + self.path.upper().replace(".", "__")

    @property
    def names_component(self) -> bool:
        """Whether it names components: a noun's own key, or a field that says so."""
        return self.of_noun or bool(self.attribute.metadata.get("component"))


class Settings:
    """All settings by path, and the tables they lie in. Read-only once made by :func:`settings_of`."""

    def __init__(self, classes: Mapping[str, type[Any]], settings: Mapping[str, Setting]) -> None:
        self._classes = classes
        self._settings = settings

    @functools.cached_property
    def nouns(self) -> tuple[str, ...]:
        """Tables of nouns, of the core and of plugins, in order."""
        return tuple(table for table, kind in self._classes.items() if "." not in table and issubclass(kind, _OF_NOUNS))

    def __iter__(self) -> Iterator[Setting]:
        """Yield settings, table by table."""
        return iter(self._settings.values())

    def get(self, path: str) -> Setting | None:
        """Return the setting at a dotted path, or None. Pure."""
        return self._settings.get(path)

    def tables(self) -> Mapping[str, type[Any]]:
        """Return the config class of each table by its dotted path, in order. Pure."""
        return self._classes

    def keys_of(self, table: str) -> list[str]:
        """Return the keys of one table, in the order of its class. Pure."""
        return [setting.key for setting in self if setting.table == table]

    def tables_of_plugins(self) -> list[str]:
        """Return the names of the tables that belong to plugins, those of their nouns among them. Pure."""
        return [table for table in self._classes if "." not in table and table not in CORE_TABLES]

    def components_of(self, noun: str) -> list[str]:
        """Return the names of a noun's component tables, sorted. Pure."""
        return sorted(
            table.split(".")[1] for table in self._classes if table.startswith(f"{noun}.") and table.count(".") == 1
        )


def settings_of(components: ComponentClasses | None = None, nouns: Iterable[Noun] = ()) -> Settings:
    """Return the catalogue of the schema and of the given components' config classes. Pure.

    Args:
        components: Config classes that plugins bring; none: the schema's own tables only.
        nouns: Nouns of plugins; the table of one comes after that of the noun which it helps.

    Raises:
        NameError: An annotation of a config class cannot be resolved.
    """
    components = components or {}
    classes: dict[str, type[Any]] = {}
    settings: dict[str, Setting] = {}
    root = Config()
    tables = {name: getattr(root, name) for name in CORE_TABLES}
    for name in with_nouns(CORE_TABLES, nouns := tuple(nouns)):
        table = tables.get(name) or FixedNounConfig(name=next(noun.default for noun in nouns if noun.name == name))
        _add_table(name, type(table), table, classes, settings)
        of_noun = components.get(name, {})
        assert isinstance(of_noun, Mapping), f"[{name}] is a table of the core"
        for component, config_class in sorted(of_noun.items()):
            _add_table(f"{name}.{component}", config_class, None, classes, settings)
    for name, own in components.items():
        if isinstance(own, type):
            _add_table(name, own, None, classes, settings)
    return Settings(classes, settings)


def with_nouns(names: Iterable[str], nouns: Iterable[Noun]) -> list[str]:
    """Return names with those of plugins' nouns: each after the noun that it helps, else at the end. Pure."""
    found = list(names)
    for noun in reversed(tuple(nouns)):
        found.insert(found.index(noun.helps) + 1 if noun.helps in found else len(found), noun.name)
    return found


def settings_of_table(table: str, config_class: type[Any]) -> Settings:
    """Return the catalogue of one table and those within it. Pure.

    Args:
        table: Dotted path, such as ``bucketing.exponential``.
        config_class: An attrs class.

    Raises:
        NameError: An annotation of the class cannot be resolved.
    """
    classes: dict[str, type[Any]] = {}
    settings: dict[str, Setting] = {}
    _add_table(table, config_class, None, classes, settings)
    return Settings(classes, settings)


def _add_table(
    table: str, config_class: type[Any], instance: Any, classes: dict[str, type[Any]], settings: dict[str, Setting]
) -> None:
    classes[table] = config_class
    hints = _hints_of(config_class)  # type: ignore[arg-type] # mypy doubts that any class can be a key
    nested: list[tuple[str, type[Any]]] = []
    for field in attrs.fields(config_class):
        path = f"{table}.{field.name}"
        if not field.init or (issubclass(config_class, _OF_NOUNS) and field.name == "components"):
            continue
        if attrs.has(hints[field.name]):
            nested.append((path, hints[field.name]))
            continue
        settings[path] = Setting(
            path=path,
            type=hints[field.name],
            default=_default(field) if instance is None else getattr(instance, field.name),
            help=str(field.metadata.get("help", "")),
            unit=str(field.metadata.get("unit", "")),
            secret=bool(field.metadata.get("secret", False)),
            attribute=field,
            of_noun=issubclass(config_class, _OF_NOUNS) and field.name in NAMES_OF_COMPONENTS,
        )
    for path, nested_class in nested:
        _add_table(path, nested_class, None, classes, settings)


@functools.lru_cache(maxsize=512)
def _hints_of(config_class: type[Any]) -> Mapping[str, Any]:
    """Return the resolved annotations of a class: each is compiled from its text, and start-up asks for all of them many times."""
    return typing.get_type_hints(config_class)


def _default(field: Any) -> Any:
    if not isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]  # a class at run time, a function to mypy
        return field.default
    return attrs.NOTHING if field.default.takes_self else field.default.factory()
