"""What is left out of a registry: installed plugins that cannot be used, and names that several of them offer."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

import attrs

from trencadis.config import Config
from trencadis.errors import ComponentConflictError, PluginError, UnknownKeyError
from trencadis.registry.collect import BrokenPlugin
from trencadis.registry.contracts import CORE_NOUNS

__all__ = ["LeftOut"]

logger = logging.getLogger("trencadis.registry")

_OWN_TABLES = "|".join(field.name for field in attrs.fields(Config) if field.name not in CORE_NOUNS)
_KEY_OF_THE_CORE = re.compile(
    rf"^(\[({_OWN_TABLES})\]|flag --({_OWN_TABLES})\.|environment TRENCADIS_({_OWN_TABLES.upper()})__)"
)


class LeftOut:
    """What is left out, and why.

    Attributes:
        broken: Installed plugins that cannot be used, by name.
        contested: Names that more than one installed plugin offers, by noun and name.
    """

    def __init__(self) -> None:
        self.broken: dict[str, BrokenPlugin] = {}
        self.contested: dict[tuple[str, str], ComponentConflictError] = {}

    @contextlib.contextmanager
    def naming_broken(self) -> Iterator[None]:
        """Add the broken plugins to an error about a key that does not exist: it may be one of their tables."""
        try:
            yield
        except UnknownKeyError as error:
            trouble = self.in_words()
            if trouble and not _KEY_OF_THE_CORE.search(str(error)):
                error.args = (f"{error} {trouble}",)
            raise

    def warn(self) -> None:
        """Log each installed plugin that cannot be used, and each contested name. Called where an engine starts."""
        for reason in self._reasons():
            logger.warning("Left out, since the configuration does not ask for it: %s", reason)

    def in_words(self) -> str:
        """Return in words which installed plugins offer nothing, or not all that they have, and why; empty: all are well."""
        reasons = self._reasons()
        if not reasons:
            return ""
        rest = f" And {len(reasons) - 3} more: trencadis doctor lists them." if len(reasons) > 3 else ""
        return f"Perhaps it is of a plugin that cannot be used: {' '.join(map(str, reasons[:3]))}{rest}"

    def _reasons(self) -> list[PluginError]:
        return [*(item.error for item in self.broken.values()), *self.contested.values()]
