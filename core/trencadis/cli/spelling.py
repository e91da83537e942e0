"""Flags as people type them: without the table where the key alone is clear, and under the names of other engines.

--max-num-seqs 64          ▶ --engine.max-num-seqs 64
--tensor-parallel-size 2   ▶ an error that says: --parallel.tensor 2
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from trencadis.config import Setting, Settings
from trencadis.config.sources import is_config_flag
from trencadis.errors import ConfigError
from trencadis.other_engines import Counterpart, counterparts, listed, spelt

__all__ = ["clear_keys", "refuse_foreign_flags", "whole_flags"]

_NUMBER = re.compile(r"-\d")


def whole_flags(
    arguments: Sequence[str], own: Collection[str], settings: Callable[[], Settings], *, command: str
) -> list[str]:
    """Return a command line whose config flags all have their table; what follows ``--`` is left alone. Pure.

    A flag whose key is in one table only gets that table. One that another engine has with another meaning does not.

    Args:
        arguments: The command line.
        own: Flags of the command itself.
        settings: Makes the catalogue of settings; called only if there is a flag that the command does not have.
        command: For the error, such as ``trencadis serve``.

    Raises:
        ConfigError: The key of a flag is in several tables.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    whole = []
    for word in arguments[:end]:
        name, equals, value = word.partition("=")
        is_open = name.startswith("--") and not is_config_flag(name) and name not in own
        found = _setting_of(name, settings(), command) if is_open else None
        whole.append(word if found is None else f"{found.flag}{equals}{value}")
    return [*whole, *arguments[end:]]


def _setting_of(name: str, settings: Settings, command: str) -> Setting | None:
    key = name.removeprefix("--").replace("-", "_")
    found = [setting for setting in settings if setting.key == key]
    foreign = counterparts(name)
    if not found or any(setting.secret for setting in found):
        return None
    if foreign:
        same = [row for row in foreign if row.is_same and [setting.path for setting in found] == [*row.settings]]
        return found[0] if same else None
    if len(found) > 1:
        raise ConfigError(
            f"{command}: {name} is a key of several tables. Write one of: {', '.join(one.flag for one in found)}."
        )
    return found[0]


def clear_keys(settings: Settings) -> list[str]:
    """Return the flags that may be written without their table. Pure."""
    count = Counter(setting.key for setting in settings)
    clear = [setting.key for setting in settings if count[setting.key] == 1 and not setting.secret]
    return [f"--{_dashed(key)}" for key in clear]


def refuse_foreign_flags(
    arguments: Sequence[str], own: Collection[str], settings: Callable[[], Settings], *, command: str
) -> None:
    """Raise if a command line has flags of other engines; what follows ``--`` is no flag. Pure.

    Args:
        arguments: The command line without config flags.
        own: Flags of the command itself.
        settings: Makes the catalogue of settings; called only for the error.
        command: For the error, such as ``trencadis serve``.

    Raises:
        ConfigError: There are some; it says what each is called here, with the value that was given.
    """
    words = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    answers: list[str] = []
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not word.startswith("-") or _NUMBER.match(word) or name in own:
            continue
        following = words[position + 1] if position + 1 < len(words) else ""
        if not equals and (not following.startswith("-") or _NUMBER.match(following)):
            value = following
        answers += _answers(name, value, own, settings)
    if answers:
        several = "flags of other engines:" if len(answers) > 1 else ""
        raise ConfigError(f"{command}: {several}" + "\n  ".join([*([""] if several else []), *answers]))


def _answers(name: str, value: str, own: Collection[str], settings: Callable[[], Settings]) -> Iterator[str]:
    """Yield what each meaning of a flag is called here; nothing, if no engine has it."""
    rows, flag = counterparts(name), spelt(name)
    if not rows and flag.startswith("--no-"):
        flag = f"--{flag.removeprefix('--no-')}"
        rows = [row for row in counterparts(flag) if _is_switch(row, settings())]
        value = "false"
    if not rows:
        secret = [one for one in settings() if one.secret and f"--{one.key.replace('_', '-')}" == flag]
        yield from (f"{name}: {_how_to_give(one.path)}" for one in secret)
    for row in rows:
        yield f"{name} is a flag of {listed(row.engines(flag))}. {_here(row, value, own, settings())}"


def _here(row: Counterpart, value: str, own: Collection[str], settings: Settings) -> str:
    note = f" ({row.said})" if row.note else ""
    if row.flag in own and row.flag:
        return f"Here it is {_with_value(row.flag, value)}{note}."
    if row.flag:
        where = row.said or "of trencadis generate, run and chat; over HTTP a request has it as a field"
        return f"Here it is {row.flag} {where}."
    if not row.settings:
        return f"Here there is none: {row.said}."
    found = settings.get(row.settings[0])
    if found is not None and found.secret:
        return _how_to_give(found.path)
    is_switch = _is_switch(row, settings)
    if row.value:
        shown = row.value
    elif is_switch:
        shown = value if value in {"true", "false"} else ""
    else:
        shown = str(row.scaled(value)) if value else "VALUE"
    flags = [_with_value(f"--{path.rpartition('.')[0]}.{_dashed(path)}", shown) for path in row.settings]
    return f"Here it is {' or '.join(flags)}{note}."


def _how_to_give(path: str) -> str:
    table, _, key = path.rpartition(".")
    variable = f"TRENCADIS_{path.replace('.', '__').upper()}"
    return (
        "All users of a machine can read its command lines, so keys are given elsewhere: "
        f"set the variable {variable}, or [{table}] {key} in a config file."
    )


def _is_switch(row: Counterpart, settings: Settings) -> bool:
    found = settings.get(row.settings[0]) if row.settings else None
    return found is not None and found.type is bool


def _dashed(path: str) -> str:
    return path.rpartition(".")[2].replace("_", "-")


def _with_value(flag: str, value: str) -> str:
    if re.search(r"\s", value):
        value = f'"{value}"'
    return f"{flag} {value}".rstrip()
