"""Checks of the configuration's sources: wrong values, variables without effect, and the source of each valid value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trencadis.api import ConfigFile, Registry, ResolvedConfig, check_sources
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_configuration"]


def check_configuration(
    found: Findings, registry: Registry, file: ConfigFile, flags: Sequence[str], environ: Mapping[str, str]
) -> ResolvedConfig:
    """Check file, environment and flags; return the configuration of the valid values.

    Args:
        found: Findings to add to.
        registry: Registry of the plugins that can be loaded, whose tables are checked.
        file: Content of the configuration file.
        flags: Config flags.
        environ: Environment variables.
    """
    check = check_sources(registry.settings, file=file, flags=flags, environ=environ)
    for error in check.errors:
        found.fail_with(error)
    for name, advice in check.unknown.items():
        found.warn(f"environment {name}: has no effect", advice)
    texts = [f"{number} from {name}" for name, number in check.counts.items()]
    found.ok(f"valid values: {', '.join(texts) if texts else 'defaults only'}")
    return check.resolved
