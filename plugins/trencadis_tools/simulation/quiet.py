"""The log of thousands of engines, without what each of them would say."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["quiet_engines"]

_LEVELS = {
    "trencadis.engine": logging.WARNING,  # each engine's start
    "trencadis.engine.transfer": logging.ERROR,  # each late load of a simulated store, which the run counts
}


@contextlib.contextmanager
def quiet_engines() -> Iterator[None]:
    """Have engines log what is wrong with a simulation, and not what happens in it."""
    loggers = [logging.getLogger(name) for name in _LEVELS]
    before = [logger.level for logger in loggers]
    for logger, level in zip(loggers, _LEVELS.values(), strict=True):
        logger.setLevel(max(level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
