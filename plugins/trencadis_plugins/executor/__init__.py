"""Built-in executors: the hook."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, Executor, NoConfig

__all__ = ["trencadis_executors"]


@hookimpl
def trencadis_executors() -> Iterable[Component]:
    """Yield ``inline``."""
    yield Component(
        name="inline",
        factory=_make_inline,
        summary="One backend in this process, on a thread of its own.",
        interface_version=1,
    )


def _make_inline(config: NoConfig, context: ComponentContext) -> Executor:
    from trencadis_plugins.executor.inline import InlineExecutor

    return InlineExecutor()
