"""Frozen: strategies written for names that contracts had before they were renamed. Never edited; see test_old_member_names.py."""

import numpy as np

from trencadis.interfaces import AcceptanceRule, Laws, LogitsProcessor, Sampler
from trencadis.records import DraftLaws, Drafts

__all__ = ["LAWS_TYPE", "CanaryOldProcessor", "CanaryOldRule", "CanaryOldSampler", "drawn_drafts"]

LAWS_TYPE = Laws


class CanaryOldProcessor(LogitsProcessor):
    name = "old"
    needs_history = True
    takes_branches = True

    def asks(self, start):
        return super().asks(start) and start.row != 1

    def may_begin(self, start, token_id):
        return super().may_begin(start, token_id) and token_id != 3

    def allocate(self, *, num_rows, vocab_size, device):
        self.started = []

    def start_row(self, start):
        self.started.append(self.asks(start))

    def apply(self, logits, context):
        return logits


class CanaryOldSampler(Sampler):
    def allocate(self, *, num_rows, vocab_size, device):
        pass

    def start_row(self, start):
        pass

    def sample(self, logits, context):
        raise NotImplementedError

    def takes_drafts(self, params, *, branching):
        return super().takes_drafts(params, branching=branching) and params.top_k == 0

    def goes_on(self, params):
        return params.seed == 1

    def may_begin(self, start, token_id):
        return token_id != 5


class CanaryOldRule(AcceptanceRule):
    lossless = False
    needs_laws = True

    def __init__(self):
        self.takes_trees = not self.takes_trees

    def accept(self, verification):
        assert self.needs_laws
        return verification.tokens.double() * 0.0


def drawn_drafts():
    laws = DraftLaws(rows=np.zeros(1, np.int32), probabilities=np.full((1, 2), 0.5))
    drafts = Drafts(num_drafts=np.ones(1, np.int32), token_ids=np.ones(1, np.int32), laws=laws)
    assert drafts.laws is laws
    return drafts
