"""An engine without a model whose device takes its time, so that there is a middle of a request for things to happen in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.client.async_llm import AsyncLLM
from trencadis.registry import load_with_plugins
from trencadis_testing.fakes import FakeBackend

VOCAB_SIZE = 4096


class PacedBackend(FakeBackend):
    """A fake backend for the demo's tokenizer.

    Args:
        step_s: How long a pass takes.
        max_model_len: The "model's" own limit.
        strict: As of the fake backend.
    """

    def __init__(self, step_s: float = 0.0, max_model_len: int = 256, strict: bool = True) -> None:
        def pace(*_: object) -> None:
            time.sleep(step_s)

        super().__init__(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=max_model_len, strict=strict, fails=pace)


def opener(
    *,
    step_s: float = 0.0,
    max_model_len: int = 256,
    num_blocks: int = 512,
    backend: str = f"{__name__}:PacedBackend",
    sampling: str = "trencadis_testing.backend:ArgmaxSampler",
    tables: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Callable[[], AsyncLLM]:
    """Return what opens such an engine; ``tables`` are further ones, other keywords go to ``[engine]``."""
    overrides = {
        "model": {"path": "demo"},
        "backend": {
            "name": backend,
            "options": {"step_s": step_s, "max_model_len": max_model_len},
        },
        "sampling": {"name": sampling},
        "engine": {"warmup": False, **engine},
        "cache": {"num_blocks": num_blocks, "block_size": 4},
        "observer": {"names": ["prometheus"]},
        **(tables or {}),
    }

    def open_llm() -> AsyncLLM:
        resolved, registry = load_with_plugins(environ={}, overrides=overrides)
        return AsyncLLM.from_config(resolved.config, registry)

    return open_llm


def num_used_blocks(llm: AsyncLLM) -> int:
    """Return how many KV blocks are in use, for an engine in this process."""
    engine: Any = llm._runner.frontend.engine
    used: int = engine.engine._state.blocks.num_used
    return used
