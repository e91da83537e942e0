"""Configuration: a frozen tree of tables, loaded from a file, the environment, flags and Python, in that order."""

from __future__ import annotations

from trencadis.config.builder import check_defaults
from trencadis.config.load import ConfigFile, ResolvedConfig, load_config, plugin_rules, read_config_file
from trencadis.config.schema import Config
from trencadis.config.settings import ComponentClasses, Setting, Settings, settings_of, settings_of_table

__all__ = [
    "ConfigFile",
    "ComponentClasses",
    "Config",
    "ResolvedConfig",
    "Setting",
    "Settings",
    "check_defaults",
    "load_config",
    "plugin_rules",
    "read_config_file",
    "settings_of",
    "settings_of_table",
]
