"""New plugin packages: ``trencadis new-plugin NOUN NAME`` writes one that installs and passes its tests."""

from __future__ import annotations

from trencadis_tools.new_plugin.names import PluginNames
from trencadis_tools.new_plugin.nouns import STAGE, STARTS
from trencadis_tools.new_plugin.package import new_plugin

__all__ = ["STAGE", "STARTS", "PluginNames", "new_plugin"]
