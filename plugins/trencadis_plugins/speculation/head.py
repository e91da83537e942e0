"""Drafts of a head that was loaded with the model: EAGLE-3 or MTP, from the model's own hidden states.

    view ─▶ the head, where the model is ─▶ the most likely tokens, one after the other
                                         └▶ or level by level of a tree, as a draft model grows it

The drafts are certain, so that every acceptance rule keeps the text as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext, DraftView, HeadGuesses, Speculator
from trencadis.records import Drafts, Int32Array
from trencadis_plugins.speculation.config import HeadConfig
from trencadis_plugins.speculation.draft_trees import GrowingTree, Trees

__all__ = ["Head"]


class Head(Speculator):
    """Asks the model's head.

    Args:
        config: Table of the component.
        context: Not used.
    """

    uses_head = True

    def __init__(self, config: HeadConfig, context: ComponentContext) -> None:
        self.max_draft_tokens, self._min_probability = config.max_draft_tokens, config.min_probability
        self._trees = Trees(config, max_draft_tokens=config.max_draft_tokens)
        self.drafts_trees = self._trees.branch

    def propose(self, view: DraftView) -> Drafts:
        """Return what the head drafts; nothing where the newest hidden state of a sequence is not at hand.

        Raises:
            ContractError: There is no head.
        """
        if view.head is None:
            raise ContractError("it drafts with a head of the model, and none was loaded", hint="Set model.head.")
        self._trees.observe(view)
        if self.drafts_trees and not view.linear_only.all():
            return self._branched(view)
        found = view.head(self._min_probability)
        is_there = found >= 0
        return Drafts(num_drafts=is_there.sum(1).astype(np.int32), token_ids=found[is_there].astype(np.int32))

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Forget the sequence's last tree."""
        self._trees.forget(slot)

    def _branched(self, view: DraftView) -> Drafts:
        """Return a tree for each sequence, grown by a level of all of them in each call of the head."""
        assert view.rank is not None, "there is a head"
        count = self._trees.num_ranked
        nothing = np.empty(0, np.int32)
        told = view.rank(owners=nothing, token_ids=nothing, parents=nothing, num_ranked=count)
        trees = {
            index: self._trees.plant(most, is_linear=bool(view.linear_only[index]))
            for index, most in enumerate(view.max_draft_tokens.tolist())
            if most and told.token_ids[index, 0] >= 0
        }
        for index, tree in trees.items():
            tree.tell(_ranked(told, [index]))
        growing = _asking(trees.items())
        while growing:
            levels = [tree.newest for _, tree, _ in growing]
            told = view.rank(
                owners=np.repeat([index for index, _, _ in growing], [size for _, _, size in growing]).astype(np.int32),
                token_ids=np.concatenate([tokens for tokens, _ in levels]),
                parents=np.concatenate([parents for _, parents in levels]),
                num_ranked=count,
            )
            first = 0
            for _, tree, size in growing:
                tree.tell(_ranked(told, range(first, first + size)))
                first += size
            growing = _asking((index, tree) for index, tree, _ in growing)
        return self._finished(view, trees)

    def _finished(self, view: DraftView, trees: dict[int, GrowingTree]) -> Drafts:
        counts = np.zeros(len(view.slots), np.int32)
        tokens, parents = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for index, tree in trees.items():
            drafts, before, shape = tree.finish()
            counts[index] = len(drafts)
            tokens.append(drafts)
            parents.append(before)
            if not view.linear_only[index]:
                size = len(view.token_ids[index])
                self._trees.remember(int(view.slots[index]), view.requests[index], size, drafts, shape)
        return Drafts(num_drafts=counts, token_ids=np.concatenate(tokens), parents=np.concatenate(parents))


def _asking(trees: Iterable[tuple[int, GrowingTree]]) -> list[tuple[int, GrowingTree, int]]:
    """Return the trees that go on growing, and how many nodes each of them asks for."""
    asking = [(index, tree, tree.ask()) for index, tree in trees]
    return [found for found in asking if found[2]]


def _ranked(told: HeadGuesses, nodes: Iterable[int]) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens after some nodes, with their log-probabilities."""
    return [list(zip(told.token_ids[node].tolist(), told.logprobs[node].tolist(), strict=True)) for node in nodes]
