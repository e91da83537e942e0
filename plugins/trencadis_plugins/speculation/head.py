"""Drafts of a head that was loaded with the model: EAGLE-3 or MTP, from the model's own hidden states.

    view ─▶ the head, where the model is ─▶ the most likely tokens, one after the other

The drafts are certain, so that every acceptance rule keeps the text as it is.
"""

from __future__ import annotations

import numpy as np

from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts
from trencadis_plugins.speculation.config import HeadConfig

__all__ = ["Head"]


class Head(Speculator):
    """Asks the model's head.

    Args:
        config: Its table.
        context: Not used.
    """

    uses_head = True

    def __init__(self, config: HeadConfig, context: ComponentContext) -> None:
        self.max_draft_tokens = config.max_draft_tokens

    def propose(self, view: DraftView) -> Drafts:
        """Return what the head drafts; nothing where the newest hidden state of a sequence is not at hand.

        Raises:
            ContractError: There is no head.
        """
        if view.head is None:
            raise ContractError("it drafts with a head of the model, and none was loaded", hint="Set model.head.")
        found = view.head()
        is_there = found >= 0
        return Drafts(num_drafts=is_there.sum(1).astype(np.int32), token_ids=found[is_there].astype(np.int32))
