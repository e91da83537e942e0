"""The examination: every check in order, each with the valid results of the checks before it.

installation ▶ plugins (loadable ones) ▶ configuration (valid values) ▶ model ▶ components ▶ checks of plugins
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from trencadis.api import Config, ConfigFile, PluginLoader, Registry, rules_or_defaults
from trencadis.interfaces import HealthCheck, Severity
from trencadis_tools.doctor.components import check_components
from trencadis_tools.doctor.configuration import check_configuration
from trencadis_tools.doctor.distributions import check_distributions
from trencadis_tools.doctor.division import check_division
from trencadis_tools.doctor.findings import Findings
from trencadis_tools.doctor.installation import check_installation
from trencadis_tools.doctor.loading import check_loading
from trencadis_tools.doctor.model import check_model
from trencadis_tools.doctor.plugins import check_plugins

__all__ = ["examine"]


def examine(*, file: ConfigFile, plugins: PluginLoader, flags: Sequence[str], environ: Mapping[str, str]) -> Findings:
    """Run all checks and return the findings; raises nothing.

    Imports torch and the tokenizer's library, builds every active component, and loads a configured model; takes some seconds.
    Their output goes to standard error.

    Args:
        file: Content of the configuration file.
        plugins: Installed plugins, loaded; owned by the examination from now on.
        flags: Config flags, each as ``--table.key=value``, or without a value.
        environ: Environment variables.
    """
    found = Findings()
    with contextlib.redirect_stdout(sys.stderr):
        found.run("installation", check_installation)
        found.run("installation", check_distributions)
        rules = rules_or_defaults(file, flags, environ)
        registry = found.run("plugins", check_plugins, rules, plugins) or Registry.discover(entry_points=())
        resolved = found.run("configuration", check_configuration, registry, file, flags, environ)
        config = resolved.config if resolved is not None else Config()
        facts = found.run("model", check_model, config, resolved.sources if resolved else {})
        found.run("components", check_components, registry, config, resolved.sources if resolved else {}, facts)
        if facts is not None and not found.count(Severity.FAIL):
            found.run("model", check_division, config, registry)
        if resolved is not None and not found.count(Severity.FAIL):
            found.run("model", check_loading, config, registry, resolved.sources, facts)
        for plugin in registry.plugins:
            for check in found.run("plugins", _checks_of, registry, plugin) or ():
                found.run(check.name, _run_check, check, config)
    return found


def _checks_of(_: Findings, registry: Registry, plugin: str) -> list[HealthCheck]:
    return registry.health_checks_of(plugin)


def _run_check(found: Findings, check: HealthCheck, config: Config) -> None:
    found.add(check.run(config))
