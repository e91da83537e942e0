"""A request inside the engine, and its state machine.

         add            admit                    stop, length
    ────────▶ WAITING ────────▶ RUNNING ────────────────────▶ finished (leaves the table)
               ▲   │ load  ▲        │                          ▲
               │   ▼       │ loaded │ preempt                  │ abort or error, from every state
               │  PARKED ──┘ failed │                          │
               └────────────────────┘──────────────────────────┘

A sequence whose sampler prepares something first is COMPILING before it is WAITING.

Numbers that change every step live in the table's columns; what is touched rarely lives here.
"""

from __future__ import annotations

import enum
import math
from concurrent.futures import Future
from typing import Any

import numpy as np

from trencadis.records import Int32Array, Request

__all__ = ["Sequence", "SequenceState"]


class SequenceState(enum.IntEnum):
    """Where a live sequence is."""

    WAITING = 0
    PARKED = 1
    RUNNING = 2
    COMPILING = 3


class Sequence:
    """What the engine keeps of one request beyond the table's columns.

    Attributes:
        request: The request.
        asked: The same as it came, without what its tenant's entry adds.
        slot: Its index in the table, for life.
        seed: Key of its random numbers.
        stop_token_ids: The model's end-of-sequence tokens, unless ignored, and the request's own stop tokens.
        tokens: Known tokens while it holds no row, int32; stale while it runs.
        block_hashes: Chained hashes of its full blocks so far, head first.
        loaded_blocks: Blocks for all its tokens, some filled by a KV load; held until it is admitted.
        num_loaded_tokens: Leading tokens whose KV is in them, verified.
        host_blocks: Blocks in host memory with what it had computed when it was preempted by swap, in table order; else None.
        is_approximate: The KV it reads is near to what computing would give, not equal: nothing of it is shared or saved.
        num_approximate_tokens: Prompt tokens whose KV was such when it first ran; stays when it is computed anew.
        ticket: Of the load it is parked for, or runs beside; or -1. While it runs beside one nothing that it computes counts.
        park_deadline_s: When that load is given up.
        lookup_deadline_s: When a look-up that is pending is given up; infinity: none is.
        orphan_epoch: Residency whose token is still in flight after a preemption, or -1.
        num_cached_tokens: Prompt tokens taken from cache or connector when it first ran.
        first_scheduled_s: When it first ran, or was given a first token that another engine chose; or None.
        first_token_s: When its first token was committed, or None.
        num_failed_loads: KV loads of its prompt that were reported as failed.
        preparation: What the sampler does or did before it could run; kept, with results, until it ends.
        num_failures: Failed steps it took part in since it last made progress.
    """

    __slots__ = (
        "asked",
        "block_hashes",
        "first_scheduled_s",
        "first_token_s",
        "host_blocks",
        "is_approximate",
        "loaded_blocks",
        "looked_up",
        "lookup_deadline_s",
        "num_approximate_tokens",
        "num_cached_tokens",
        "num_failed_loads",
        "num_failures",
        "num_loaded_tokens",
        "orphan_epoch",
        "park_deadline_s",
        "preparation",
        "request",
        "seed",
        "slot",
        "state",
        "stop_token_ids",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        *,
        slot: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        asked: Request | None = None,
    ) -> None:
        self.request = request
        self.asked = asked or request
        self.slot = slot
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.state = SequenceState.WAITING
        self.tokens: Int32Array = np.array(request.prompt_token_ids, np.int32)
        self.block_hashes: list[bytes] = []
        self.loaded_blocks: Int32Array | None = None
        self.num_loaded_tokens = 0
        self.host_blocks: Int32Array | None = None
        self.looked_up = False
        self.lookup_deadline_s = math.inf
        self.is_approximate = False
        self.num_approximate_tokens = 0
        self.num_failed_loads = 0
        self.ticket = -1
        self.park_deadline_s = 0.0
        self.orphan_epoch = -1
        self.num_cached_tokens = -1
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_failures = 0
        self.preparation: tuple[Future[Any], ...] = ()
