"""Drafts from a smaller model, token by token: the drafts of all sequences in as many forwards as one of them has drafts.

    text … 7 8 ─▶ d1 ─▶ d2 ─▶ d3       each forward computes the token before; with trees each computes a level

The k-th draft is never fed, so a step of which every draft stood leaves two tokens to compute.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trencadis.errors import ConfigValueError
from trencadis.interfaces import Backend, ComponentContext, DraftView
from trencadis.records import BucketLimits, Int32Array
from trencadis_plugins.speculation.draft_asked import Asked, joined, read_linear
from trencadis_plugins.speculation.draft_base import DraftingModel
from trencadis_plugins.speculation.draft_config import DraftModelConfig
from trencadis_plugins.speculation.draft_runner import Query
from trencadis_plugins.speculation.draft_sampler import Guesses
from trencadis_plugins.speculation.draft_trees import GrowingTree, Trees

__all__ = ["DraftModel"]

_TREE_ATTENTION = "backend.tree_attention"


class DraftModel(DraftingModel):
    """Guesses token by token, in a line or in a tree.

    Args:
        config: Table of the component.
        context: Makes the backend and finds the model.

    Raises:
        ConfigValueError: Drafts are to branch and to be drawn.
    """

    def __init__(self, config: DraftModelConfig, context: ComponentContext) -> None:
        self._shapes = config
        self._trees = Trees(config, max_draft_tokens=config.max_draft_tokens)
        super().__init__(config, context)
        self.drafts_trees = self._trees.branch
        if self.drafts_trees and config.sampling != "greedy":
            raise ConfigValueError(
                f'[speculation.draft_model] tree = "{config.tree}" with sampling = "{config.sampling}": drafts that branch are the '
                "most likely tokens.",
                hint='Set sampling to "greedy", or tree to "none".',
            )

    def _num_kept(self) -> int:
        return self._trees.num_ranked or (1 if self._shapes.min_probability else 0)

    def _check(self, backend: Backend) -> None:
        if self.drafts_trees and _TREE_ATTENTION not in backend.capabilities.provides:
            raise ConfigValueError(
                f'[speculation.draft_model] tree = "{self._shapes.tree}": the draft model\'s backend does not provide '
                f'"{_TREE_ATTENTION}".',
                hint='Set tree to "none", or name another backend there.',
            )

    def _leave(self, num_sequences: int) -> int:
        ready = self.ready
        if ready.is_ragged and not self.drafts_trees:
            return max(1, ready.plan.max_num_batched_tokens // num_sequences)
        return max(1, ready.most_query - (self._room(self.max_draft_tokens) if self.drafts_trees else 0))

    def _room(self, count: int) -> int:
        """Return the tokens after the text that are computed for so many drafts."""
        config = self._shapes
        return max(count, config.tree_width * config.tree_depth) if config.tree == "top_k" else count

    def _most_query(self, limits: BucketLimits) -> int:
        return 1 + max(limits.max_draft_tokens, 2 * self._room(self.max_draft_tokens) if self.drafts_trees else 0)

    def _guess(self, asked: Sequence[Asked]) -> None:
        if self.drafts_trees:
            self._grow(asked)
            return
        runner, queries = self.ready.runner, [one.query() for one in asked]
        if all(one.is_greedy for one in asked):
            guessed = runner.guess(
                queries,
                [one.count for one in asked],
                closed=self._sampler.closed,
                min_probability=self._shapes.min_probability,
            )
            if guessed is not None:
                for one, drafts in zip(asked, guessed, strict=True):
                    one.drafts = drafts
                return
        runner.run(queries)
        for step in range(1, max(one.count for one in asked)):
            # The token was sampled by the forward before, and is on the device.
            runner.run([Query(one.held, len(one.tokens) + step - 1) for one in asked if one.count > step])

    def _read(self, asked: Sequence[Asked], taken: Sequence[Guesses]) -> None:
        if self.drafts_trees:
            return
        if taken:
            read_linear(asked, taken, min_probability=self._shapes.min_probability)
        for one in asked:
            one.held.tokens = joined([one.tokens, one.drafts[:-1]])

    # ---------------------------------------------------------------------------------------------------- trees

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Give the sequence's row and blocks back, and forget its last tree."""
        super().on_finished(slot=slot, token_ids=token_ids)
        self._trees.forget(slot)

    def _observe(self, view: DraftView) -> None:
        self._trees.observe(view)

    def _grow(self, asked: Sequence[Asked]) -> None:
        """Grow a tree for each sequence, a level of all of them in one forward."""
        runner = self.ready.runner
        trees = [self._trees.plant(one.count, is_linear=one.is_linear) for one in asked]
        runner.run([one.query() for one in asked])
        told = _ranked(self._sampler.take())
        for one, tree in zip(asked, trees, strict=True):
            # After the text alone, only the last logits row is of interest.
            tree.tell(told[one.held.row][-1:])
            one.held.tokens = one.tokens[:-1]
        growing = _asking(zip(asked, trees, strict=True))
        while growing:
            runner.run([one.query(tree.guesses, tree.parents) for one, tree, _ in growing])
            told = _ranked(self._sampler.take())
            for one, tree, num_asked in growing:
                tree.tell(told[one.held.row][-num_asked:])
            growing = _asking((one, tree) for one, tree, _ in growing)
        for one, tree in zip(asked, trees, strict=True):
            one.drafts, one.parents, shape = tree.finish()
            one.held.tokens = one.tokens
            if not one.is_linear:
                tokens = self._translation.to_target[one.drafts]
                self._trees.remember(one.held.slot, one.held.request, one.num_known, tokens, shape)


def _asking(pairs: Iterable[tuple[Asked, GrowingTree]]) -> list[tuple[Asked, GrowingTree, int]]:
    """Return the trees that go on growing, and how many nodes each of them asks for."""
    asking = [(one, tree, tree.ask()) for one, tree in pairs]
    return [found for found in asking if found[2]]


def _ranked(taken: Sequence[Guesses]) -> dict[int, list[list[tuple[int, float]]]]:
    """Return the most likely tokens and their log-probabilities at each logits row of each device row, in order."""
    found: dict[int, list[list[tuple[int, float]]]] = {}
    for guesses in taken:
        assert guesses.top is not None, "kept where drafts branch"
        logprobs, ids = (part.tolist() for part in guesses.top)
        for row, some, numbers in zip(guesses.rows, ids, logprobs, strict=True):
            found.setdefault(row, []).append(list(zip(some, numbers, strict=True)))
    return found
