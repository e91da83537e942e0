"""Speculator that proposes the recorded number of drafts for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, DraftView, NoConfig, Speculator
from trencadis.interfaces.speculation import INTERFACE_VERSION
from trencadis.records import Drafts
from trencadis_tools.recorder.flight_record import RecordedAttempt, RecordedEvent, int32s

__all__ = ["RECORDED", "RecordedDrafts"]

RECORDED = "recorded"
"""Name of the component in the configuration of a replay."""


class RecordedDrafts(Speculator):
    """Speculator of the next recorded plan; also the plugin that provides it.

    Args:
        max_draft_tokens: Maximum drafts of the recorded speculator.

    Attributes:
        next_event: Returns the next recorded event of the replay; set by the replay.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.next_event: Callable[[], RecordedEvent | None] = lambda: None

    @hookimpl
    def trencadis_speculators(self) -> Iterable[Component]:
        """Yield the component."""
        yield Component(
            name=RECORDED,
            factory=lambda _, __: self,
            config=NoConfig,
            summary="What was recorded.",
            interface_version=INTERFACE_VERSION,
        )

    def propose(self, view: DraftView) -> Drafts:
        """Return the recorded number of drafts, with token ids 0."""
        event = self.next_event()
        num_drafts = {}
        if isinstance(event, RecordedAttempt) and event.num_drafts:
            num_drafts = dict(zip(int32s(event.slots).tolist(), int32s(event.num_drafts).tolist(), strict=True))
        counts = np.array([num_drafts.get(slot, 0) for slot in view.slots.tolist()], np.int32)
        counts = np.minimum(counts, view.max_draft_tokens)
        return Drafts(num_drafts=counts, token_ids=np.zeros(int(counts.sum()), np.int32))
