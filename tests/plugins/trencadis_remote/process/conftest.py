"""Engines without a model in real child processes, and both ends of a line in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.core.lines import LineOpener
from trencadis.client.factory import configure
from trencadis.config import Config
from trencadis.registry import Registry

OPTIONS = {"vocab_size": 4096, "eos": -1, "max_model_len": 20000, "strict": False}


def tables(**more: Any) -> dict[str, Any]:
    """Tables of a fake engine whose parts another process can import."""
    kit = "trencadis_testing."
    return {
        "engine": {"placement": "process", "warmup": False, **more.pop("engine", {})},
        "backend": {"name": f"{kit}fakes:FakeBackend", "options": OPTIONS},
        "executor": {"name": f"{kit}fake_executor:FakeExecutor"},
        "sampling": {"name": f"{kit}backend:ArgmaxSampler"},
        "bucketing": {"name": f"{kit}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 4096, "block_size": 16},
        "observer": {"names": ["support.core.remote_parts:StepCounter"]},
        **more,
    }


@pytest.fixture
def process_house() -> Callable[..., tuple[Config, Registry]]:
    """Makes a configuration and a registry of a fake engine in a process of its own."""

    def make(**more: Any) -> tuple[Config, Registry]:
        return configure("demo", config_file=None, tables=tables(**more))

    return make


@pytest.fixture
def open_line() -> Iterator[LineOpener]:
    """Opens lines."""
    opener = LineOpener()
    yield opener
    opener.close()
