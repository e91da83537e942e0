"""All runs of tokens of some texts, up to a depth, with how often each occurred: a suffix tree that grows token by token.

    root ─ the ─ old ─ Node ─┬─ man: Node …
                             ├─ sea: [8, 31]     a leaf: where the few suffixes that begin with "the old sea" start
                             └─ end: 17

A suffix is kept in the first leaf on its way, so most of a text is never spelt out: a leaf is split into a node once it holds more
than a few. What is deeper is read in the text. Source: the tree of Oliaro et al., SuffixDecoding, arXiv 2411.04975, section 4.1;
leaves as in burst tries, Heinz, Zobel and Williams, ACM TOIS 20(2), 2002.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["END", "Leaf", "Node", "SuffixTree"]

END = -1
"""Stands after each text that has ended, in place of a token."""

_MOST_IN_LEAF = 4
_UNKNOWN = 1 << 60

Leaf = list[int]
"""Starts of suffixes, ascending."""


class Node:
    """A run of tokens that more suffixes begin with than a leaf holds.

    Attributes:
        children: By the token that follows: a node, a leaf, or the start of the only suffix.
        total: Suffixes that begin with the run.
        num_open: Number of these suffixes that nothing follows yet: 1 if the text ends with the run now, else 0.
        latest: Start of the latest of them.
        best_token: The token that followed most often, the latest of equals, if ``best_total`` is known.
        best_total: How often.
    """

    __slots__ = ("best_token", "best_total", "children", "latest", "num_open", "total")

    def __init__(self) -> None:
        self.children: dict[int, Node | Leaf | int] = {}
        self.total = 0
        self.num_open = 0
        self.latest = -1
        self.best_token = END
        self.best_total = 0

    def best(self) -> tuple[int, int]:
        """Return the token that followed most often, the latest of equals, and how often."""
        if self.best_total == _UNKNOWN:
            self.best_total, _, self.best_token = max(self.ranked())
        return self.best_token, self.best_total

    def ranked(self) -> Iterator[tuple[int, int, int]]:
        """Yield how often each token followed, the latest start, and the token: the largest first if sorted. Pure."""
        return ((*_weight(child), token) for token, child in self.children.items())

    def add(self, token: int, start: int) -> Leaf | int:
        """Note that a token follows the run in a suffix, where that is no node yet; returns where it is."""
        children = self.children
        child = children.get(token)
        total = 1
        if child is None:
            children[token] = child = start
        elif type(child) is int:
            children[token] = child = [child, start]
            total = 2
        else:
            child.append(start)  # type: ignore[union-attr]
            total = len(child)  # type: ignore[arg-type]
        if total >= self.best_total:
            self.best_token, self.best_total = token, total
        return child  # type: ignore[return-value]

    def remove(self, token: int, start: int) -> Node | None:
        """Forget a suffix; returns the node it goes on in, None if it ended here."""
        child = self.children[token]
        if token == self.best_token:
            self.best_total = _UNKNOWN
        if isinstance(child, Node):
            child.total -= 1
            if child.total:
                return child
        elif isinstance(child, list) and len(child) > 1:
            child.remove(start)
            return None
        del self.children[token]
        if not self.children:
            self.best_token, self.best_total = END, 0
        return None


class SuffixTree:
    """The suffixes of texts that follow one another.

    Args:
        max_depth: Longest run of tokens that is told apart, at least 2.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._root = Node()
        self._open: list[tuple[int, Node]] = []
        self._dropped = 0  # tokens gone from the front of the text
        self._first = 0  # start of the oldest text
        self.text = array("i")
        """Tokens of the texts; those of dropped ones may be gone from the front."""

    @property
    def num_seen(self) -> int:
        """Tokens that were ever added, ends included."""
        return self._dropped + len(self.text)

    @property
    def is_empty(self) -> bool:
        """True if every text was dropped, or none was added."""
        return not self._root.children

    def index(self, start: int) -> int:
        """Return where in ``text`` a start is. Pure."""
        return start - self._dropped

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the present text: each follows all suffixes that end before it."""
        text, open_, max_depth = self.text, self._open, self._max_depth
        for token in tokens:
            position = self._dropped + len(text)
            text.append(token)
            open_.append((position, self._root))
            still = []
            for start, node in open_:
                node.num_open = 0
                child = node.children.get(token)
                if type(child) is Node:  # the usual way, in line: each token goes it for every open suffix
                    child.total = total = child.total + 1
                    child.latest = start
                    if total >= node.best_total:
                        node.best_token, node.best_total = token, total
                else:
                    leaf, depth = node.add(token, start), position - start + 1
                    if type(leaf) is int or len(leaf) <= _MOST_IN_LEAF or depth >= max_depth:  # type: ignore[arg-type]
                        continue
                    child = node.children[token] = self._split(leaf, depth)  # type: ignore[arg-type]
                child.num_open = 1
                still.append((start, child))
            open_ = still
        self._open = open_

    def end_text(self) -> None:
        """End the present text; what is added next belongs to another one."""
        for start, node in self._open:
            node.num_open = 0
            node.add(END, start)
        self._open = []
        self.text.append(END)

    def drop_text(self, num_tokens: int) -> None:
        """Forget the oldest text.

        Args:
            num_tokens: Tokens of the text, without the end.
        """
        begin = self._first
        for start in range(begin, begin + num_tokens):
            node: Node | None = self._root
            at = start - self._dropped
            while node is not None:
                node = node.remove(self.text[at], start)
                at += 1
        self._first = begin + num_tokens + 1
        gone = self._first - self._dropped
        if 2 * gone > len(self.text):
            del self.text[:gone]
            self._dropped = self._first

    def locate(self, run: Sequence[int]) -> Node | Leaf | None:
        """Return where the suffixes are that begin with a run of at most ``max_depth - 1`` tokens, None if there are none. Pure."""
        node = self._root
        for depth, token in enumerate(run, 1):
            child = node.children.get(token)
            if child is None:
                return None
            if type(child) is not Node:
                starts: Leaf = [child] if type(child) is int else child  # type: ignore[assignment]
                if depth == len(run):
                    return starts
                rest, text = array("i", run[depth:]), self.text
                ahead, behind = depth - self._dropped, len(run) - self._dropped
                return [start for start in starts if text[start + ahead : start + behind] == rest] or None
            node = child
        return node

    # ------------------------------------------------------------------------------------------------- innards

    def _split(self, leaf: Leaf, depth: int) -> Node:
        """Return a node in place of a leaf that has grown too large; the last start is open."""
        node = Node()
        node.total, node.latest = len(leaf), leaf[-1]
        for start in leaf[:-1]:
            node.add(self.text[start - self._dropped + depth], start)
        return node


def _weight(child: Node | Leaf | int) -> tuple[int, int]:
    """Return how many suffixes there are, and the latest start. Pure."""
    if isinstance(child, Node):
        return child.total, child.latest
    return (1, child) if isinstance(child, int) else (len(child), child[-1])
