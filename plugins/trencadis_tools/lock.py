"""The plan lock: everything that decides what an engine computes, written down so that another start can be held to it.

config + registry ▶ lock_of ▶ PlanLock ◀▶ trencadis.lock (JSON) ─ differences ▶ words
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

import trencadis
from trencadis.api import (
    Choice,
    Config,
    Provenance,
    Registry,
    ResolvedPlan,
    Settings,
    dump_config,
    dump_options,
    origin,
    resolve_model_path,
    resolve_plan,
    show,
)
from trencadis.errors import ConfigError, PlanLockError
from trencadis.files import read_json

__all__ = ["PlanLock", "check_lock", "differences", "lock_from", "lock_of", "read_lock"]

_FORMAT = 1
_PACKAGES = ("numpy", "tokenizers", "torch", "transformers")
"""Packages beside the plugins' own whose version can change what is computed."""

_FREE_TABLES = frozenset({"log", "plugins"})
_FREE_SETTINGS = frozenset({"model.path", "model.tokenizer", "parallel.replica"})
"""What may differ between two machines that compute the same: files of the model are compared, not where they lie."""

_TEXT_SUFFIXES = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
_WEIGHT_SUFFIXES = frozenset({".bin", ".gguf", ".pt", ".safetensors"})
_MOST_NAMED = 10
_KEYS_OF_PLUGINS = {"distribution", "version", "module"}
_KEYS_OF_COMPONENTS = {"component", "noun", "plugin"}


@attrs.frozen(kw_only=True)
class PlanLock:
    """What an engine was made of.

    Attributes:
        plan_hash: Hash of the resolved plan.
        versions: Versions of Python, Trencadís and packages whose version can change what is computed; one that is not installed is absent.
        plugins: ``distribution``, ``version`` and ``module`` of each loaded plugin, by the name under which it can be blocked.
        files: SHA-256 of each source file of the core and of the packages of plugins, by path from the folder that holds the package.
        components: ``component``, ``noun`` and ``plugin`` of each component of the plan, by dotted path of the setting that names it.
        settings: Values by dotted path: tables of the core but ``[log]`` and ``[plugins]``, and options of the components; secrets as ``***``.
        model: Files of a model in a directory: SHA-256 of configuration and tokenizer, sizes of weights. Of a hub id: the id and the revision.
        tokenizer: The same for ``model.tokenizer``; empty if the model's own is used.
    """

    plan_hash: str
    versions: Mapping[str, str]
    plugins: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str]
    components: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, Any]
    model: Mapping[str, str]
    tokenizer: Mapping[str, str]

    def as_json(self) -> str:
        """Return the content of a lock file: sorted, so that equal locks have equal bytes. Pure."""
        return (
            json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        )


def lock_of(config: Config, registry: Registry, plan: ResolvedPlan | None = None) -> PlanLock:
    """Return the lock of a configuration. Reads the files of packages and of the model; builds nothing and downloads nothing.

    Args:
        config: The configuration.
        registry: The plugins.
        plan: Plan of this configuration; None: it is resolved here.

    Raises:
        PluginError: The configuration names a component that does not exist or does not fit the others.
        ConfigError: A component that it names cannot be used so.
    """
    plan = resolve_plan(config, registry) if plan is None else plan
    choices = dict(plan.named_choices()) | {f"bucketing.name[{layout}]": one for layout, one in plan.by_layout.items()}
    core = Provenance(plugin="", module="trencadis", distribution="trencadis", version=trencadis.__version__)
    owners = [core, *registry.plugins.values(), *(choice.component.provenance for choice in choices.values())]
    return PlanLock(
        plan_hash=plan.plan_hash,
        versions=_versions(),
        plugins={
            name: {"distribution": one.distribution, "version": one.version, "module": one.module}
            for name, one in registry.plugins.items()
        },
        files={name: digest for one in owners for name, digest in one.code_files.items()},
        components={
            path: {"component": one.name, "noun": one.noun, "plugin": one.provenance.plugin}
            for path, choice in choices.items()
            for one in [choice.component]
        },
        settings=_settings_of(config, registry, choices.values()),
        model=_model(config.model.path, config.model.revision),
        tokenizer=_model(config.model.tokenizer, "") if config.model.tokenizer not in ("", "none") else {},
    )


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "trencadis": trencadis.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _settings_of(config: Config, registry: Registry, choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the values of the core's tables and the options of components, as JSON gives them back."""
    tree = dump_config(config)
    found: dict[str, Any] = {}
    for setting in registry.settings:
        if _is_locked(setting, registry.settings):
            found[setting.path] = (
                "***" if setting.secret and tree[setting.table][setting.key] else tree[setting.table][setting.key]
            )
    for choice in choices:
        noun = choice.component.noun
        found |= {
            f"{noun}.{_options_table(choice.component.name)}.{key}": value
            for key, value in dump_options(choice.options).items()
        }
    return dict(json.loads(json.dumps(found, default=str)))


def _is_locked(setting: Any, settings: Settings) -> bool:
    """Return whether a setting of the core's tables is part of a lock; components are compared themselves. Pure."""
    table = setting.table
    of_core = "." not in table and table not in settings.tables_of_plugins() and table not in _FREE_TABLES
    return of_core and not setting.of_noun and setting.path not in _FREE_SETTINGS


def _model(path: str, revision: str) -> dict[str, str]:
    """Return what tells a model from others without reading its weights."""
    place = Path(resolve_model_path(path))
    files = [place] if place.is_file() else sorted(place.iterdir()) if place.is_dir() else []
    found = {file.name: f"{file.stat().st_size} bytes" for file in files if file.suffix in _WEIGHT_SUFFIXES}
    texts = [file for file in files if file.suffix in _TEXT_SUFFIXES and file.is_file()]
    found |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in texts}
    return found if files else {"hub": path, "revision": revision}


def read_lock(file: Path) -> PlanLock:
    """Return the lock that a file holds.

    Raises:
        ConfigError: There is no such file, or it is no lock of this format.
    """
    hint = "trencadis lock writes one."
    try:
        content = read_json(file, allows_infinity=True)
    except OSError as error:
        raise ConfigError(f"lock file {file}: {error.strerror or error}.", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"lock file {file}: cannot be read: {error}.", hint=hint) from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ConfigError(f"lock file {file}: it is no plan lock of format {_FORMAT}.", hint=hint)
    try:
        return lock_from(content)
    except ValueError as error:
        raise ConfigError(f"lock file {file}: it is no plan lock of format {_FORMAT}: {error}.", hint=hint) from error


def lock_from(content: object) -> PlanLock:
    """Return the lock of a parsed table, without its ``format``, once every value in it is of the type that it has to be. Pure.

    Raises:
        ValueError: It is none.
    """
    fields = {field.name for field in attrs.fields(PlanLock)}
    if not isinstance(content, dict) or content.keys() != fields:
        raise ValueError(f"it has not just {', '.join(sorted(fields))}")
    try:
        lock = msgspec.convert(content, PlanLock)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    for table, keys in (("plugins", _KEYS_OF_PLUGINS), ("components", _KEYS_OF_COMPONENTS)):
        for name, one in getattr(lock, table).items():
            if not keys <= one.keys():
                raise ValueError(f"{table}: {name} has not {', '.join(sorted(keys))}")
    return lock


def check_lock(file: Path, config: Config, registry: Registry) -> None:
    """Refuse a configuration that is not the one of a lock file.

    Raises:
        PlanLockError: Something differs; the message names the first differences.
        ConfigError: The file cannot be used.
        PluginError: See :func:`lock_of`.
    """
    found = differences(read_lock(file), lock_of(config, registry), registry.sources)
    if not found:
        return
    more = f"\n  and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    listed = "".join(f"\n  {one}" for one in found[:_MOST_NAMED])
    raise PlanLockError(
        f"{file} locks another plan than this one:{listed}{more}\n",
        hint="Undo the changes; or, if they are meant, write the lock anew: trencadis lock.",
    )


def differences(locked: PlanLock, found: PlanLock, sources: Mapping[str, str] | None = None) -> list[str]:
    """Return in words what differs from a lock, one sentence for each difference; empty: nothing does. Pure.

    Files of a package whose version differs are not compared, nor options of a component that only one of the two has.

    Args:
        locked: The lock.
        found: Lock of the present plan.
        sources: Who set each value that is there now, by dotted path.
    """
    sources = {} if sources is None else sources
    lines = [_words(name, then, now) for name, then, now in _changes(locked.versions, found.versions)]
    lines += _of_plugins(locked, found)
    of_one = _option_tables(locked) ^ _option_tables(found)
    settings = [
        one for one in _changes(locked.settings, found.settings, show) if one[0].rpartition(".")[0] not in of_one
    ]
    for path, then, now in [*_changes(locked.components, found.components, _named), *settings]:
        lines.append(_words(path, then, now, source=sources.get(path.partition("[")[0], "")))
    for what, before, after in (("model", locked.model, found.model), ("tokenizer", locked.tokenizer, found.tokenizer)):
        lines += [_words(f"{name} of the {what}", then, now) for name, then, now in _changes(before, after, _short)]
    replaced = _replaced_packages(locked, found)
    for name, then, now in _changes(locked.files, found.files, _short):
        if name.partition("/")[0] not in replaced:
            lines.append(_words(f"the file {name}", then, now))
    if not lines and locked.plan_hash != found.plan_hash:
        lines.append(f"{_words('the plan hash', locked.plan_hash, found.plan_hash)}: a value that is secret differs")
    return lines


def _of_plugins(locked: PlanLock, found: PlanLock) -> Iterator[str]:
    """Yield a sentence for each change of a distribution, which names all of its plugins."""
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, then, now in _changes(locked.plugins, found.plugins, _distribution):
        alike[then, now].append(name)
    for (then, now), names in alike.items():
        several = "s" if len(names) > 1 else ""
        yield _words(f"the plugin{several} {', '.join(names)}", then, now, absent="not loaded")


def _replaced_packages(locked: PlanLock, found: PlanLock) -> set[str]:
    """Return the packages of which only the version is compared: it says that their files differ."""
    both = (locked.plugins, found.plugins)
    names = {name for name in locked.plugins.keys() | found.plugins.keys() if both[0].get(name) != both[1].get(name)}
    replaced = {one[name]["module"].partition(".")[0] for one in both for name in names & one.keys()}
    if locked.versions.get("trencadis") != found.versions.get("trencadis"):
        replaced.add("trencadis")
    return replaced


def _changes(
    then: Mapping[str, Any], now: Mapping[str, Any], in_words: Callable[[Any], str] = str
) -> Iterator[tuple[str, str, str]]:
    """Yield name, locked and present value of what differs, in words, by name; an empty text for what one of the two lacks."""
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now or then[name] != now[name]:
            yield name, in_words(then[name]) if name in then else "", in_words(now[name]) if name in now else ""


def _option_tables(lock: PlanLock) -> set[str]:
    """Return the tables of the components of a lock. Pure."""
    return {f"{one['noun']}.{_options_table(one['component'])}" for one in lock.components.values()}


def _options_table(component: str) -> str:
    return "options" if ":" in component else component


def _words(subject: str, then: str, now: str, *, source: str = "", absent: str = "absent") -> str:
    present = f"{now}{origin(source)}" if now else absent
    verb = "are" if subject.startswith("the plugins ") else "is"
    return f"{subject} {verb} {present}, {f'locked {then}' if then else 'not in the lock'}"


def _named(one: Mapping[str, str]) -> str:
    return f"{show(one['component'])} of the plugin {show(one['plugin'])}"


def _distribution(one: Mapping[str, str]) -> str:
    return f"{one['distribution']} {one['version']}".strip() or f"{one['module']}, given in code"


def _short(value: str) -> str:
    """Return the beginning of a digest; any other text as it is."""
    return f"sha256 {value[:12]}…" if len(value) == 64 else value
