"""Trencadís: an LLM serving engine made of swappable pieces.

Public names are imported on first use, so that ``import trencadis`` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trencadis.client.async_llm import AsyncLLM
    from trencadis.client.llm import LLM
    from trencadis.errors import TrencadisError
    from trencadis.hookspecs import hookimpl
    from trencadis.interfaces import Component, ComponentContext
    from trencadis.records import (
        BeamSearchParams,
        CompletionOutput,
        FinishReason,
        RequestOutput,
        SamplingParams,
        StructuredOutput,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Component",
    "ComponentContext",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TrencadisError",
    "__version__",
    "hookimpl",
]

_HOMES = {
    "LLM": "trencadis.client.llm",
    "AsyncLLM": "trencadis.client.async_llm",
    "BeamSearchParams": "trencadis.records",
    "CompletionOutput": "trencadis.records",
    "Component": "trencadis.interfaces",
    "ComponentContext": "trencadis.interfaces",
    "FinishReason": "trencadis.records",
    "RequestOutput": "trencadis.records",
    "SamplingParams": "trencadis.records",
    "StructuredOutput": "trencadis.records",
    "TrencadisError": "trencadis.errors",
    "hookimpl": "trencadis.hookspecs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trencadis' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
