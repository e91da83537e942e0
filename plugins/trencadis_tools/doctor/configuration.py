"""The sources of the configuration: each value that is wrong, each variable without effect, and where valid values come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trencadis.api import ConfigFile, Registry, ResolvedConfig, check_sources
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_configuration"]


def check_configuration(
    found: Findings, registry: Registry, file: ConfigFile, flags: Sequence[str], environ: Mapping[str, str]
) -> ResolvedConfig:
    """Check file, environment and flags; returns the configuration that the valid values make.

    Args:
        found: Takes the findings.
        registry: Of the plugins that can be loaded: their tables are known.
        file: The content of the configuration file.
        flags: Config flags.
        environ: The environment.
    """
    check = check_sources(registry.settings, file=file, flags=flags, environ=environ)
    for error in check.errors:
        found.fail_with(error)
    for name, advice in check.unknown.items():
        found.warn(f"environment {name}: has no effect", advice)
    texts = [f"{number} from {name}" for name, number in check.counts.items()]
    found.ok(f"valid values: {', '.join(texts) if texts else 'defaults only'}")
    return check.resolved
