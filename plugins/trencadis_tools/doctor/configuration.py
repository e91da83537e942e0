"""Checks of the configuration's sources: wrong values, variables without effect, and the source of each valid value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trencadis.api import ConfigFile, Registry, ResolvedConfig, load_config
from trencadis.errors import ConfigError
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
    errors: list[ConfigError] = []
    settings = registry.settings
    resolved = load_config(settings=settings, file=file, flags=flags, environ=environ, on_error=errors.append)
    for error in {str(error): error for error in errors}.values():
        found.fail_with(error)
    for name, advice in resolved.unknown.items():
        found.warn(f"environment {name}: has no effect", advice)
    counts = Counter(source.partition(" ")[0] for source in resolved.sources.values() if source != "default")
    if file.name:
        counts.setdefault(file.name, 0)
    texts = [f"{number} from {name}" for name, number in counts.most_common()]
    found.ok(f"valid values: {', '.join(texts) if texts else 'defaults only'}")
    return resolved
