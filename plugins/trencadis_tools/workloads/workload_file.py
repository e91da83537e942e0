"""Workload files: TOML that describes a workload completely, seed included.

``base = "azure_conv"`` extends another file or a built-in workload; keys in the file override those of the base.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from trencadis.errors import ConfigError, ConfigValueError, UnknownKeyError, did_you_mean, must_be_one_of
from trencadis.files import is_file, read_toml
from trencadis_tools.workloads.arrivals import stretch
from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.recipe import Recipe
from trencadis_tools.workloads.workload import Workload
from trencadis_tools.workloads.written import is_written, parse_written

__all__ = ["builtin_names", "depends_on_seed", "load_workload", "read_recipe", "trace_file"]

_BUILTINS = Path(__file__).parent / "builtin"
_NUM_LOOKED_AT = 50

Table = dict[str, Any]


def builtin_names() -> list[str]:
    """Return the names of the workloads that come with the package, sorted."""
    return sorted(file.stem for file in _BUILTINS.glob("*.toml"))


def load_workload(
    name_or_path: str, *, seed: int | None = None, rate: float | None = None, limit: int | None = None
) -> Workload:
    """Return a workload.

    Args:
        name_or_path: Built-in name, or path of a TOML workload file, a trace file in a known format, or a file written by
            ``trencadis workload --write``.
        seed: Seed in place of the file's; None: the file's.
        rate: Rate in place of the file's ``[arrivals] rate``, requests per second, such as for a sweep; lengths stay. None: the
            file's.
        limit: Limit in place of the file's; None: the file's.

    Raises:
        ConfigError: The workload or file does not exist, or cannot be used.
    """
    given = {"seed": seed, "limit": limit, "arrivals": None if rate is None else {"rate": rate}}
    changes = {key: value for key, value in given.items() if value is not None}
    file = _builtin(name_or_path) or Path(name_or_path)
    if file.suffix != ".toml":
        _check_exists(file)
        recipe = _recipe({"trace": {"file": str(file)}, **changes}, file.stem, str(file))
        return _changed(parse_written(file), recipe, seed) if is_written(file) else recipe.make()
    return read_recipe(str(file), changes=changes).make()


def depends_on_seed(name_or_path: str, workload: Workload) -> bool:
    """Return whether another seed gives other requests; false for a trace without draws, and for a written workload.

    Args:
        name_or_path: Built-in name or path, as for :func:`load_workload`.
        workload: Workload loaded from it; the first requests of its seed and of the next one are compared.

    Raises:
        ConfigError: The file can no longer be read.
    """
    limit = min(_NUM_LOOKED_AT, len(workload.requests))
    one, other = (
        load_workload(name_or_path, seed=seed, limit=limit).requests for seed in (workload.seed, workload.seed + 1)
    )
    return one != other


def trace_file(name_or_path: str) -> Path:
    """Return the trace file of a built-in workload; any other argument is returned as a path.

    Raises:
        ConfigError: The built-in workload has no trace.
    """
    file = _builtin(name_or_path)
    if file is None:
        return Path(name_or_path)
    trace = _read(file, ()).get("trace", {})
    if not trace.get("file"):
        names = [name for name in builtin_names() if _read(_BUILTINS / f"{name}.toml", ()).get("trace", {}).get("file")]
        raise ConfigError(f"{name_or_path}: a workload without a trace.", hint=f"Those with one: {', '.join(names)}.")
    return Path(trace["file"])


def read_recipe(name_or_path: str, *, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe of a workload file or a built-in workload.

    Args:
        name_or_path: Built-in name, or path of a file.
        changes: Keys and tables that replace the file's; None: none.

    Raises:
        ConfigError: The file cannot be read, or has unknown or invalid keys.
    """
    file = _builtin(name_or_path) or Path(name_or_path)
    return _recipe(_merged(_read(file, ()), changes or {}), file.stem, str(file))


def _builtin(name: str) -> Path | None:
    file = _BUILTINS / f"{name}.toml"
    return file if name.isidentifier() and file.is_file() else None


def _check_exists(file: Path) -> None:
    if not is_file(file):
        names = builtin_names()
        raise ConfigError(
            f"{file}: no such workload.{did_you_mean(str(file), names)}",
            hint=f"Give a file, or one of: {', '.join(names)}.",
        )


def _changed(workload: Workload, recipe: Recipe, seed: int | None) -> Workload:
    """Return a written workload with another seed for tokens, stretched times or fewer requests, without draws. Pure."""
    requests = workload.requests[: recipe.limit or None]
    factor = stretch([one.arrival_s for one in requests if not one.after], recipe.arrivals.rate)
    return attrs.evolve(
        workload,
        requests=tuple(attrs.evolve(one, arrival_s=one.arrival_s * factor) for one in requests),
        seed=workload.seed if seed is None else seed,
    )


# ------------------------------------------------------------------------------------------------ reading


def _read(file: Path, seen: tuple[Path, ...]) -> Table:
    """Return the tables of a file, merged over those of its base."""
    _check_exists(file)
    if file.resolve() in seen:
        raise ConfigError(f"{file}: is its own base.", hint="Remove base.")
    try:
        table = read_toml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.", hint="Write TOML.") from error
    trace = table.get("trace")
    if isinstance(trace, dict) and isinstance(trace.get("file"), str):
        trace["file"] = str(file.parent / trace["file"])
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigValueError(f"base = {base!r} (from {file}) must be text.", hint="Name a workload.")
    below = _builtin(base) or file.parent / base
    return _merged(_read(below, (*seen, file.resolve())), {"name": file.stem} | table)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    """Merge two tables recursively; ``above`` wins. Pure."""
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        merged[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    return merged


def _recipe(table: Table, name: str, source: str) -> Recipe:
    recipe: Recipe = _structure(Recipe, {"name": name} | table, "", source)
    return recipe


def _structure(kind: Any, value: Any, where: str, source: str) -> Any:
    """Return a value of TOML as an instance of ``kind``; ``where`` is the path of its key."""
    if attrs.has(kind):
        if kind is Distribution and isinstance(value, int | float) and not isinstance(value, bool):
            return Distribution(mean=value)
        if isinstance(value, Mapping):
            return _class_of(kind, value, where, source)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [
            one
            for one in typing.get_args(kind)
            if (attrs.has(one) and not isinstance(value, str))
            or (typing.get_origin(one) is Literal and isinstance(value, str))
        ]
        if found:
            return _structure(found[0], value, where, source)
    elif typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value in choices:
            return value
        raise ConfigValueError(f"{where} = {value!r} (from {source}): {must_be_one_of(str(value), choices)}")
    elif typing.get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(_structure(typing.get_args(kind)[0], one, where, source) for one in value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigValueError(f"{where} = {value!r} (from {source}) must be {_in_words(kind)}.")


def _class_of(kind: Any, table: Mapping[str, Any], where: str, source: str) -> Any:
    types_of = typing.get_type_hints(kind)
    fields = [field.name for field in attrs.fields(kind)]
    values = {}
    for key, value in table.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise UnknownKeyError(
                f"{path} (from {source}): no such key of a workload file.{did_you_mean(key, fields)}",
                hint=f"Known here: {', '.join(fields)}.",
            )
        values[key] = _structure(types_of[key], value, path, source)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        reason = str(error.args[0]) if error.args else str(error)
        raise ConfigValueError(f"[{where}] (from {source}): {reason}." if where else f"{source}: {reason}.") from error


def _in_words(kind: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind in plain:
        return plain[kind]
    if attrs.has(kind):
        return "a number or a table" if kind is Distribution else "a table"
    if typing.get_origin(kind) is tuple:
        return "a list"
    return " or ".join(_in_words(one) for one in typing.get_args(kind) if one is not type(None)) or "text"
