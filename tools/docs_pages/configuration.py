"""``docs/configuration.md``: every setting of the schema and of the built-in components."""

from __future__ import annotations

from trencadis.config import settings_of
from trencadis.config.reference import reference_page
from trencadis.registry import Registry

__all__ = ["configuration_page"]

_OURS = "trencadis"


def configuration_page() -> str:
    """Return the page. What another installed distribution offers does not belong on it."""
    registry = Registry.discover(strict=True)
    classes = {
        noun: {
            name: config_class
            for name, config_class in components.items()
            if registry.components(noun)[name].provenance.distribution == _OURS
        }
        for noun, components in registry.config_classes().items()
    }
    return reference_page(settings_of(classes))
