"""Whether a component's config class can serve, seen when it is registered: at the next load it would stop every command."""

from __future__ import annotations

import attrs

from trencadis.config.builder import ConfigBuilder
from trencadis.config.convert import WrongValueError, describe_type, has_classes, is_readable, structure
from trencadis.config.messages import DEFAULT, value_error
from trencadis.config.settings import Setting, Settings
from trencadis.errors import ConfigValueError

__all__ = ["check_defaults"]


def check_defaults(settings: Settings, table: str) -> None:
    """Refuse settings that no source could give, and defaults that their validators refuse. Pure but for what defaults make.

    Args:
        settings: Settings of one component's config class.
        table: Dotted path of the table, such as ``bucketing.exponential``.

    Raises:
        ConfigValueError: A type is none that configuration can hold, or a default is of another type or refused by the class.
    """
    for setting in settings:
        _check_type(setting)
    ConfigBuilder(settings, {}).component(table)


def _check_type(setting: Setting) -> None:
    if not is_readable(setting.type):
        raise ConfigValueError(
            f"[{setting.table}] {setting.key}: its type is {describe_type(setting.type)}, which no configuration can hold."
        )
    is_converted = setting.attribute.converter is not None
    if setting.default is attrs.NOTHING or is_converted or has_classes(setting.type):
        return
    try:
        structure(setting.type, setting.default)
    except WrongValueError as error:
        raise value_error(setting.path, setting.default, DEFAULT, str(error), secret=setting.secret) from error
