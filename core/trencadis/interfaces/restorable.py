"""Parts of the engine whose state can be copied between two steps, and put into a part that was just built."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = ["Restorable"]


class Restorable:
    """A part that says which of its attributes change from step to step and cannot be found anew.

    Attributes:
        restored: Their names: numbers, arrays, and lists and dictionaries of these.
    """

    __slots__ = ()

    restored: ClassVar[tuple[str, ...]] = ()

    def copy_state(self) -> dict[str, Any]:
        """Return copies of them."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.restored}

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the values of another such part; they are this one's from now on."""
        for name in self.restored:
            setattr(self, name, values[name])
