"""Names of a new plugin: distribution, package, entry point and class."""

from __future__ import annotations

import keyword
import re

import attrs

from trencadis import interfaces, records
from trencadis.errors import ConfigValueError, did_you_mean
from trencadis_tools.new_plugin.nouns import STARTS

__all__ = ["PluginNames"]

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_MOST_LETTERS = 24
_RESERVED = frozenset(
    {"auto", "budget_ms", "components", "config", "fallback", "name", "names", "none", "options", "py", "test"}
)
"""Values and keys of the configuration's noun tables, and modules of the package itself."""


@attrs.frozen
class PluginNames:
    """The names of one new plugin.

    Attributes:
        noun: Extension point of the plugin, such as ``kv_connector``, or ``stage``.
        name: Name of the component: letters, digits and underscores, such as ``fair_lottery``.
    """

    noun: str
    name: str

    @classmethod
    def read(cls, noun: str, name: str) -> PluginNames:
        """Return the names for a user's input; dashes and underscores are equivalent. Pure.

        Raises:
            ConfigValueError: The noun does not exist, or the name cannot be used; the message says why.
        """
        tidy = noun.strip().lower().replace("-", "_")
        if tidy not in STARTS:
            raise ConfigValueError(
                f'new-plugin: there is no noun "{noun}".{did_you_mean(tidy, STARTS)} Choose one of: {", ".join(STARTS)}.'
            )
        if not _NAME.fullmatch(name) or len(name) > _MOST_LETTERS:
            raise ConfigValueError(
                f'new-plugin: the name "{name}" cannot be used.',
                hint=(
                    "Use lower-case letters and digits, with single dashes or underscores between them, a letter first, at most "
                    f"{_MOST_LETTERS} characters in all."
                ),
            )
        found = cls(tidy, name.replace("-", "_"))
        if found.name in _RESERVED or keyword.iskeyword(found.name) or found.class_name in _TAKEN_CLASSES:
            raise ConfigValueError(
                f'new-plugin: the name "{name}" has another meaning already, in Python or in Trencadís.',
                hint="Choose another name.",
            )
        return found

    @property
    def project(self) -> str:
        """Name of the distribution and of its folder: ``trencadis-kv-connector-fair-lottery``."""
        return f"trencadis-{self.noun}-{self.name}".replace("_", "-")

    @property
    def package(self) -> str:
        """Name of the import package: ``trencadis_kv_connector_fair_lottery``."""
        return self.project.replace("-", "_")

    @property
    def entry_point(self) -> str:
        """Name under which the plugin can be blocked: ``kv-connector-fair-lottery``."""
        return self.project.removeprefix("trencadis-")

    @property
    def class_name(self) -> str:
        """Name of the class: ``FairLottery``."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_TAKEN_CLASSES = frozenset(
    {
        *interfaces.__all__,
        *records.__all__,
        "Any",
        "Callable",
        "Claim",
        "EngineParts",
        "Future",
        "HeldBack",
        "Sequence",
        "Stage",
        "Stuck",
        "When",
    }
)
"""Classes that the templates import."""
