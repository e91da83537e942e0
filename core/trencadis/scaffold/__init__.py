"""New plugin packages: ``trencadis new-plugin NOUN NAME`` writes one that installs, and passes its tests, as it is."""

from __future__ import annotations

from trencadis.scaffold.names import PluginNames
from trencadis.scaffold.package import new_plugin

__all__ = ["PluginNames", "new_plugin"]
