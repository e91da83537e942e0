"""Configuration: a frozen tree of tables, loaded from a file, the environment, flags and Python, in that order."""

from __future__ import annotations

from trencadis.config.defaults import check_defaults
from trencadis.config.load import ResolvedConfig, blocked_plugins, load_config
from trencadis.config.schema import Config
from trencadis.config.settings import ComponentClasses, Setting, Settings, settings_of, settings_of_table

__all__ = [
    "ComponentClasses",
    "Config",
    "ResolvedConfig",
    "Setting",
    "Settings",
    "blocked_plugins",
    "check_defaults",
    "load_config",
    "settings_of",
    "settings_of_table",
]
