"""What most probably follows a text, by a suffix tree.

For every length of match the tree knows how often each continuation was taken; the path (or tree) with the most expected accepted
tokens wins. Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975, section 4.2.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs

from trencadis_plugins.speculation.suffix_tree import END, Leaf, Node, SuffixTree

__all__ = ["NOTHING", "Found", "Search"]


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
        max_depth: Of the trees: a match and its drafts together.
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
            tree: What is known.
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
