"""Views of an engine's state, by hand."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest

from trencadis.interfaces import SchedulerView
from trencadis.records import Request, SamplingParams

NUM_SLOTS = 8


@pytest.fixture
def view_of() -> Callable[..., SchedulerView]:
    """``view_of(waiting=[...], running=[...], column={slot: value})``; what is not said is 0, one, or no target."""

    def make(
        *,
        waiting=(),
        running=(),
        now_s: float = 0.0,
        cached=None,
        num_free_rows: int = 8,
        num_free_blocks: int = 1000,
        num_total_blocks: int = 1000,
        block_size: int = 16,
        num_swapped: int = 0,
        num_free_host_blocks: int = 0,
        **columns: dict[int, float],
    ) -> SchedulerView:
        starts = {"weight": 1.0, "ttft_target_s": np.inf, "tpot_target_s": np.inf, "first_token_s": np.inf}
        starts |= {"num_prompt_tokens": 100, "num_tokens": 100, "max_total_tokens": 200}
        columns.setdefault("waiting_since_s", columns.get("arrival_s", {}))
        filled = {}
        for field in attrs.fields(SchedulerView):
            is_float = field.name in {
                "arrival_s",
                "waiting_since_s",
                "waited_s",
                *starts,
            } and not field.name.startswith(("num_", "max_"))
            column = np.full(NUM_SLOTS, starts.get(field.name, 0), np.float64 if is_float else np.int64)
            for slot, value in columns.get(field.name, {}).items():
                column[slot] = value
            filled[field.name] = column
        hits = cached or {}
        return SchedulerView(
            **filled
            | {
                "now_s": now_s,
                "waiting": np.array(waiting, np.int32),
                "running": np.array(running, np.int32),
                "prefix_tokens": lambda slots: np.array([hits.get(slot, 0) for slot in slots.tolist()], np.int64),
                "num_free_rows": num_free_rows,
                "num_free_blocks": num_free_blocks,
                "num_total_blocks": num_total_blocks,
                "block_size": block_size,
                "num_swapped": num_swapped,
                "num_free_host_blocks": num_free_host_blocks,
            }
        )

    return make


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """``request_of("name", num_prompt_tokens, **fields)``."""

    def make(name: str = "r", num_prompt_tokens: int = 100, *, max_tokens: int = 8, **fields: object) -> Request:
        fields.setdefault("prompt_token_ids", tuple(i % 97 for i in range(num_prompt_tokens)))
        return Request(request_id=name, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)

    return make
