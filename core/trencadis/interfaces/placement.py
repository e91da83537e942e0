"""A placement: where engines run that do not run in the calling process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import attrs

__all__ = ["Placement"]


@attrs.frozen(kw_only=True)
class Placement:
    """A value of ``[engine] placement``, and a function that imports its module.

    The module has two functions, which load the model where it says and return when it is ready, and which raise a ``TrencadisError``
    where it cannot be, wherever it happened (see :mod:`trencadis.api` for the types):

    * ``open_frontend(config: Config, registry: Registry, *, show_progress: bool | None) -> Frontend``, for ``LLM``;
    * ``open_runner(config: Config, registry: Registry) -> Runner``, for ``AsyncLLM``.

    Attributes:
        name: Lower-case; unique, and neither ``auto`` nor ``thread``, which are the calling process.
        summary: One line.
        load: Imports and returns the module; called when the placement was chosen.
    """

    name: str
    summary: str
    load: Callable[[], ModuleType]
