"""Configurations to compare, each with its plugins, plan hash and settings."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import attrs

from trencadis.api import Config, Registry, ResolvedConfig, load_with_plugins, resolve_plan
from trencadis.errors import ConfigError
from trencadis.files import is_file

__all__ = ["Candidate", "candidates_of", "check_different", "described", "restored", "sweep_points"]


@attrs.frozen(kw_only=True)
class Candidate:
    """A configuration under comparison.

    Attributes:
        name: Name in tables: that of the file without its suffix, or of the policy.
        config: Resolved configuration.
        registry: Plugins of the configuration.
        given: Values that were set, by dotted path, without defaults and secrets; sufficient to load the configuration again.
        plan_hash: Hash of components, versions, code and options.
        may_import: Whether ``given`` comes from the operator, so that import paths in it are followed.
    """

    name: str
    config: Config = attrs.field(repr=False)
    registry: Registry = attrs.field(repr=False, eq=False)
    given: Mapping[str, Any]
    plan_hash: str
    may_import: bool = False


def candidates_of(
    arguments: Sequence[str], *, base: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Return the configurations that a command line names.

    Args:
        arguments: Paths of TOML files; an argument that is no file is the name of a scheduling policy or an import path of one.
        base: Configuration file for arguments that are policies; None: defaults.
        overrides: Values by dotted path, for all configurations.

    Raises:
        ConfigError: There are fewer than two arguments, two are equal, or one cannot be used.
        PluginError: No plugin offers a component of that name.
    """
    if len(arguments) < 2:
        raise ConfigError(
            f"trencadis compare: {len(arguments)} configurations to compare.",
            hint="Name two or more: TOML files, or scheduling policies such as fcfs.",
        )
    if base is not None and all(map(is_file, arguments)):
        raise ConfigError(
            f"flag --config: {base} is the base of scheduling policies that are compared by name, and there are none.",
            hint="Name it as the first configuration, or leave it out.",
        )
    candidates = [_candidate(argument, base, overrides or {}) for argument in arguments]
    check_different(candidates)
    return candidates


def check_different(candidates: Sequence[Candidate]) -> None:
    """Refuse a comparison of a configuration with itself.

    Raises:
        ConfigError: Two configurations have the same name or the same settings.
    """
    for one, two in itertools.combinations(candidates, 2):
        if one.name == two.name:
            raise ConfigError(
                f'trencadis compare: two configurations are called "{one.name}".', hint="Name files differently."
            )
        if one.config == two.config:
            raise ConfigError(
                f'trencadis compare: "{one.name}" and "{two.name}" are the same configuration: nothing can differ.',
                hint="Change one of them, or leave it out.",
            )


def _candidate(argument: str, base: Path | None, overrides: Mapping[str, Any]) -> Candidate:
    path = Path(argument)
    file, _, member = argument.partition(":")
    if file.endswith(".py"):
        raise ConfigError(
            f"{argument}: a policy is named by its module and its class, not by its file.",
            hint=f"Write {Path(file).stem}:{member or 'Class'}, with the name of the class after the colon.",
        )
    if is_file(path):
        return _loaded(path.stem, path, {**overrides})
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(
            f"{argument}: no such config file.", hint="Name a TOML file, or a scheduling policy such as fcfs."
        )
    return _loaded(argument, base, {**overrides, "scheduling.name": argument}, policy=argument)


def _loaded(name: str, file: Path | None, overrides: Mapping[str, Any], policy: str = "") -> Candidate:
    resolved, registry = load_with_plugins(file=file, overrides=overrides)
    if policy:  # here the source of the name is known
        registry.select("scheduling", policy, source=f"argument {policy}, which is no file", may_import=True)
    return described(name, resolved, registry, may_import=True)


def restored(
    name: str,
    given: Mapping[str, Any],
    swept: Mapping[str, str] = MappingProxyType({}),
    *,
    may_import: bool = False,
) -> Candidate:
    """Return a configuration from recorded values, independent of files and environment.

    Args:
        name: Name in tables.
        given: Values that were set, by dotted path.
        swept: Text of a value by dotted path, as in a flag; overrides ``given``.
        may_import: Whether both come from the operator, and not from a received record.

    Raises:
        ImportPathRefusedError: A value that does not come from the operator is an import path.
        ConfigError: A value cannot be used.
        PluginError: No plugin offers a component of that name.
    """
    resolved, registry = load_with_plugins(
        environ={},
        flags=[f"--{path}={text}" for path, text in swept.items()],
        overrides={path: value for path, value in given.items() if path not in swept},
        may_import=may_import,
    )
    return described(name, resolved, registry, may_import=may_import)


def described(name: str, resolved: ResolvedConfig, registry: Registry, *, may_import: bool = True) -> Candidate:
    """Return the candidate of a loaded configuration.

    Args:
        name: Name in tables.
        resolved: Configuration with the source of each value.
        registry: Plugins of the configuration.
        may_import: Whether the values come from the operator, so that import paths in them are followed.

    Raises:
        PluginError: No plugin offers a component of that name.
    """
    secrets = {setting.path for setting in resolved.settings if setting.secret}
    given = {
        path: _plain(resolved.values[path])
        for path, source in sorted(resolved.sources.items())
        if source != "default" and path in resolved.values and path not in secrets
    }
    return Candidate(
        name=name,
        config=resolved.config,
        registry=registry,
        given=given,
        plan_hash=resolve_plan(resolved.config, registry).plan_hash,
        may_import=may_import,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    return value


def sweep_points(sweeps: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the values of swept settings; one empty combination if nothing is swept. Pure.

    Args:
        sweeps: Texts of the form ``table.key=value,value,…``.

    Raises:
        ConfigError: A text has another form.
    """
    axes = []
    for sweep in sweeps:
        path, equals, text = sweep.partition("=")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not equals or "." not in path or not values:
            raise ConfigError(
                f'flag --sweep: "{sweep}" sweeps nothing.', hint="Write a setting and its values: table.key=1,2,3."
            )
        axes.append([(path.strip().removeprefix("--").replace("-", "_"), value) for value in values])
    return [dict(point) for point in itertools.product(*axes)]
