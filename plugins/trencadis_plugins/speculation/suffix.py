"""Suffix decoding: drafts the most frequent continuation of the sequence's end, in the sequence and in its tenant's earlier outputs.

Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975.

For every length of match the tree knows how often each continuation was taken; the path (or tree) with the most expected accepted
tokens wins. Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975, section 4.2.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import SuffixConfig
from trencadis_plugins.speculation.suffix_tree import END, Leaf, Node, SuffixTree

__all__ = ["NOTHING", "Found", "PastOutputs", "Search", "Suffix"]


class PastOutputs:
    """The latest outputs; the oldest of all tenants goes first.

    Args:
        max_depth: Longest run of tokens that is told apart.
        max_requests: The most outputs.
        max_tokens: Their most tokens; a longer output keeps its last ones.
    """

    def __init__(self, *, max_depth: int, max_requests: int, max_tokens: int) -> None:
        self._max_depth = max_depth
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._trees: dict[Hashable, SuffixTree] = {}
        self._queue: deque[tuple[Hashable, int]] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def tree(self, key: Hashable) -> SuffixTree | None:
        """Return the tree of those who share a key, None if nothing of theirs is left. Pure."""
        return self._trees.get(key)

    def add(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Remember an output, and forget the oldest ones that are too many."""
        tokens = tokens[-self._max_tokens :] if self._max_tokens else ()
        if not tokens or not self._max_requests:
            return
        if key not in self._trees:
            self._trees[key] = SuffixTree(self._max_depth)
        self._trees[key].extend(tokens)
        self._trees[key].end_text()
        self._queue.append((key, len(tokens)))
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens or len(self._queue) > self._max_requests:
            self._drop()

    def clear(self) -> None:
        """Forget all."""
        self._trees.clear()
        self._queue.clear()
        self.num_tokens = 0

    def _drop(self) -> None:
        key, num_tokens = self._queue.popleft()
        self.num_tokens -= num_tokens
        tree = self._trees[key]
        tree.drop_text(num_tokens)
        if tree.is_empty:
            del self._trees[key]


class Found(NamedTuple):
    """Drafts and what is expected of them.

    Attributes:
        score: Sum of the drafts' path probabilities: the expected number of accepted ones.
        tokens: The drafts.
        parents: For a tree the index of each draft's parent, -1 for the root; empty for a path.
    """

    score: float
    tokens: Sequence[int]
    parents: Sequence[int]


NOTHING = Found(0.0, (), ())
"""No drafts."""


@attrs.frozen(kw_only=True)
class Search:
    """How far drafts go.

    Attributes:
        max_depth: Depth of the trees: a match and its drafts together.
        factor: Drafts for each token of a match.
        offset: Drafts on top of that.
        min_prob: Least probability of a draft's path.
    """

    max_depth: int
    factor: float
    offset: float
    min_prob: float

    def longest(self, most: int) -> int:
        """Return the most tokens of a match that are looked at, at least 1. Pure."""
        return max(1, self.max_depth - most)

    def find(
        self, tree: SuffixTree, last: Sequence[int], most: int, *, least: float = 0.0, branch: bool = False
    ) -> Found:
        """Return the best drafts after a text. Pure.

        Args:
            tree: Tree of the known texts.
            last: The text's last tokens, at least ``longest(most)`` if there are so many.
            most: The most drafts, at least 1.
            least: They must be expected to bring more than this.
            branch: Drafts may branch.
        """
        best = NOTHING
        length, place = _longest_match(tree, last[-self.longest(most) :])
        while place is not None:
            budget = min(most, math.floor(self.factor * length + self.offset), self.max_depth - length)
            if budget <= least:  # a draft brings one token at most, and shorter matches have no more drafts
                break
            if branch:
                found = self._branches(tree, place, length, budget)
            else:
                found = self._path(tree, place, length, budget, least)
            if found.score > least:
                best, least = found, found.score
            length -= 1
            place = tree.locate(last[-length:]) if length else None
        return best

    # ------------------------------------------------------------------------------------------------- innards

    def _path(self, tree: SuffixTree, place: Node | Leaf, length: int, budget: int, least: float) -> Found:
        """Follow the most frequent token each time; return nothing as soon as it cannot bring more than ``least``."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while type(place) is Node:
            token, count = place.best()
            probability *= count / (place.total - place.num_open or 1)
            if token == END or probability < self.min_prob:
                return Found(score, tokens, ())
            left = budget - len(tokens)
            if score + probability * left <= least:
                return NOTHING
            tokens.append(token)
            score += probability
            if left == 1:
                return Found(score, tokens, ())
            child = place.children[token]
            place = [child] if type(child) is int else child  # type: ignore[assignment]
        return self._path_in_text(tree, place, length, budget, Found(score, tokens, ()), probability)  # type: ignore[arg-type]

    def _path_in_text(
        self, tree: SuffixTree, leaf: Leaf, length: int, budget: int, path: Found, probability: float
    ) -> Found:
        """Go on among the few suffixes of a leaf."""
        text, score, tokens = tree.text, path.score, list(path.tokens)
        end, ahead = len(text), length + len(tokens)
        places = [at for at in (tree.index(start) + ahead for start in leaf) if at < end]
        while places and len(tokens) < budget:
            if len(places) == 1:
                run = text[places[0] : places[0] + budget - len(tokens)].tolist()
                if END in run:
                    run = run[: run.index(END)]
                return Found(score + probability * len(run), tokens + run, ())
            follow = [text[at] for at in places]
            token = max(reversed(follow), key=follow.count)  # the latest of equals
            probability *= follow.count(token) / len(follow)
            if token == END or probability < self.min_prob:
                break
            tokens.append(token)
            score += probability
            places = [at + 1 for at, next_ in zip(places, follow, strict=True) if next_ == token and at + 1 < end]
        return Found(score, tokens, ())

    def _branches(self, tree: SuffixTree, place: Node | Leaf, length: int, budget: int) -> Found:
        """Take the most probable draft of all each time, the first found of equals."""
        tokens: list[int] = []
        parents: list[int] = []
        score = 0.0
        open_: list[tuple[float, int, int, int, int, Node | Leaf]] = []
        num_pushed, parent, probability = 0, -1, 1.0
        while True:
            for token, share, child in _children(tree, place, length):
                if token != END and probability * share >= self.min_prob:
                    heapq.heappush(open_, (-probability * share, num_pushed, parent, token, length + 1, child))
                    num_pushed += 1
            if not open_ or len(tokens) == budget:
                return Found(score, tokens, parents)
            negative, _, up, token, length, place = heapq.heappop(open_)
            probability, parent = -negative, len(tokens)
            score += probability
            tokens.append(token)
            parents.append(up)


def _longest_match(tree: SuffixTree, last: Sequence[int]) -> tuple[int, Node | Leaf | None]:
    """Return the longest end of a text that something is known to follow, and where that is. Pure.

    If a run was followed, so was each end of it: the length can be found by doubling and halving.
    """
    low, high = 0, len(last)
    found: Node | Leaf | None = None
    length = min(2, high)
    while low < high:
        place = tree.locate(last[-length:])
        if place is not None and _is_followed(tree, place, length):
            low, found = length, place
            length = min(2 * low, high)
        else:
            high = length - 1
            length = (low + high + 1) // 2
    return low, found


def _is_followed(tree: SuffixTree, place: Node | Leaf, length: int) -> bool:
    if isinstance(place, Node):
        return place.total > place.num_open
    return tree.index(place[0]) + length < len(tree.text)


def _children(tree: SuffixTree, place: Node | Leaf, length: int) -> Iterator[tuple[int, float, Node | Leaf]]:
    """Yield each token that followed, how often of all times, and where that is; the most frequent first."""
    if isinstance(place, Node):
        total = max(place.total - place.num_open, 1)
        ranked = sorted(place.ranked(), reverse=True)
        for count, _, token in ranked:
            child = place.children[token]
            yield token, count / total, [child] if isinstance(child, int) else child
        return
    text = tree.text
    followed = [start for start in place if tree.index(start) + length < len(text)]
    tokens = [text[tree.index(start) + length] for start in followed]
    for token, count in Counter(reversed(tokens)).most_common():
        starts = [start for start, next_ in zip(followed, tokens, strict=True) if next_ == token]
        yield token, count / len(tokens), starts


_MOST_LEARNT = 2048
"""Tokens of one sequence that a call learns: a long prompt is learnt in several, for the others wait meanwhile."""


class _Own:
    """The text of one sequence.

    Args:
        key: Whose past outputs it may draft from.
        max_depth: Depth of the tree.
    """

    def __init__(self, key: Hashable, max_depth: int) -> None:
        self.key = key
        self.tree = SuffixTree(max_depth)


class Suffix(Speculator):
    """Drafts the most frequent continuation, as far as it is likely to be right.

    Args:
        config: Table of the component.
        context: Not used.

    Raises:
        ConfigValueError: The trees are not deeper than the drafts are long.
    """

    def __init__(self, config: SuffixConfig | None = None, context: ComponentContext | None = None) -> None:
        config = config or SuffixConfig()
        if config.max_depth <= config.max_draft_tokens:
            raise ConfigValueError(
                f"[speculation.suffix] max_depth = {config.max_depth}: it must be above max_draft_tokens = "
                f"{config.max_draft_tokens}, for a match and its drafts are so many tokens together."
            )
        self.max_draft_tokens = config.max_draft_tokens
        self.drafts_trees = config.tree
        self._search = Search(
            max_depth=config.max_depth, factor=config.factor, offset=config.offset, min_prob=config.min_prob
        )
        self._own: BySequence[_Own] = BySequence(self._new_own)
        self._past = PastOutputs(
            max_depth=config.max_depth, max_requests=config.max_cached_requests, max_tokens=config.max_cached_tokens
        )

    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``max_draft_tokens`` drafts for each sequence."""
        slots, limits = view.slots.tolist(), view.max_draft_tokens.tolist()
        linear = view.linear_only.tolist()
        counts: list[int] = []
        flat: list[int] = []
        parents: list[int] = []
        for i, tokens in enumerate(view.token_ids):
            own = self._own_text(slots[i], view.requests[i], tokens)
            most = min(limits[i], self.max_draft_tokens)
            found = self._found(own, tokens, most, branch=self.drafts_trees and not linear[i]) if most else NOTHING
            counts.append(len(found.tokens))
            flat += found.tokens
            if self.drafts_trees:
                parents += found.parents or range(-1, len(found.tokens) - 1)
        return Drafts(
            num_drafts=np.array(counts, np.int32),
            token_ids=np.array(flat, np.int32),
            parents=np.array(parents, np.int32) if self.drafts_trees else None,
        )

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Remember the output for the tenant's next requests."""
        own = self._own.drop(slot)
        if own is not None:
            self._past.add(own.key, token_ids.tolist())

    def close(self) -> None:
        """Forget all."""
        self._own.clear()
        self._past.clear()

    # ------------------------------------------------------------------------------------------------- innards

    def _new_own(self, request: Request) -> _Own:
        return _Own(request.cache_salt, self._search.max_depth)

    def _own_text(self, slot: int, request: Request, tokens: Int32Array) -> _Own:
        own = self._own.get(slot, request)
        if own.tree.num_seen > len(tokens):
            own = self._own.renew(slot, request)
        seen = own.tree.num_seen
        own.tree.extend(tokens[seen : seen + _MOST_LEARNT].tolist())
        return own

    def _found(self, own: _Own, tokens: Int32Array, most: int, *, branch: bool) -> Found:
        """Return the better of what the sequence and the past outputs say; the sequence's own if they are equal."""
        last = tokens[-self._search.longest(most) :].tolist()
        found = self._search.find(own.tree, last, most, branch=branch)
        past = self._past.tree(own.key)
        if past is None:
            return found
        other = self._search.find(past, last, most, least=found.score, branch=branch)
        return other if other.tokens else found
