"""What tests draw at random is drawn alike in every run, in whatever order and on however many workers they run."""

from __future__ import annotations

import random
import sys
import uuid
from types import SimpleNamespace

__all__ = ["NAME_REQUESTS", "draw_alike"]

NAME_REQUESTS = ("trencadis_server.generation.generation", "trencadis_kv.connectors.p2p.remote_prefills")
"""Modules that name requests by ``uuid.uuid4``: what a request without a seed draws follows from the engine's seed and its name."""


def draw_alike(test: str) -> None:
    """Seed the generators that a test shares with those before it, and name its requests after it.

    Nothing is imported: a library that no test has needed yet begins with a state of its own.
    """
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    names = random.Random(test)  # requests of the test before may still run: theirs are other names
    for module in filter(None, map(sys.modules.get, NAME_REQUESTS)):
        module.uuid = SimpleNamespace(uuid4=lambda: uuid.UUID(int=names.getrandbits(128), version=4))
