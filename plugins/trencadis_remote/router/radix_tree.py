"""A radix tree of token sequences, each of whose nodes says which replicas were sent a prompt through it."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RadixTree"]


class _Node:
    """Tokens on the way from the parent, and when each replica last came through, in calls.

    Attributes:
        tokens: At least one, but of the root.
        parent: None of the root.
        children: By first token.
        used: By replica.
    """

    __slots__ = ("children", "parent", "tokens", "used")

    def __init__(self, tokens: tuple[int, ...], parent: _Node | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used: dict[int, int] = {}


class RadixTree:
    """Prompts by replica, as they were sent. O(prompt) for each call, and memory bounded by ``max_tokens`` for each replica.

    Args:
        max_tokens: Limit of each replica; the leaves that it used least recently go first.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._root = _Node((), None)
        self._now = 0
        self._num_tokens: dict[int, int] = {}
        self._leaves: dict[int, OrderedDict[_Node, None]] = {}

    def num_tokens(self, replica: int) -> int:
        """Return how many tokens are kept of a replica."""
        return self._num_tokens.get(replica, 0)

    def match(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return how many leading tokens some replica was sent, and the replica that was sent them last; -1: none. Pure."""
        node, depth, found = self._root, 0, self._root
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            same = _common(child.tokens, tokens, depth)
            depth, found = depth + same, child
            if same < len(child.tokens):
                break
            node = child
        if not depth:
            return 0, -1
        return depth, max(found.used, key=lambda replica: found.used[replica])

    def insert(self, tokens: tuple[int, ...], replica: int) -> None:
        """Note a prompt that is sent to a replica."""
        self._now += 1
        leaves = self._leaves.setdefault(replica, OrderedDict())
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                child = node.children[tokens[depth]] = _Node(tokens[depth:], node)
            else:
                same = _common(child.tokens, tokens, depth)
                if same < len(child.tokens):
                    child = self._split(child, same)
            if replica not in child.used:
                self._num_tokens[replica] = self.num_tokens(replica) + len(child.tokens)
            child.used[replica] = self._now
            leaves.pop(node, None)
            depth, node = depth + len(child.tokens), child
        if node is not self._root and not any(replica in child.used for child in node.children.values()):
            leaves[node] = None
            leaves.move_to_end(node)
        while self.num_tokens(replica) > self._max_tokens:
            self._drop_leaf(next(iter(leaves)), replica)

    def remove(self, replica: int) -> None:
        """Forget all prompts of a replica."""
        leaves = self._leaves.get(replica, OrderedDict())
        while leaves:
            self._drop_leaf(next(iter(leaves)), replica)

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a new node before the tokens of another from ``length`` on; returns the new one."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        upper = _Node(node.tokens[:length], parent)
        upper.used = dict(node.used)
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[length:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _drop_leaf(self, node: _Node, replica: int) -> None:
        """Take a replica out of a node below which it has nothing."""
        leaves, parent = self._leaves[replica], node.parent
        assert parent is not None, "the root is no leaf"
        del leaves[node], node.used[replica]
        self._num_tokens[replica] -= len(node.tokens)
        if not node.used:
            del parent.children[node.tokens[0]]
        if parent is not self._root and not any(replica in child.used for child in parent.children.values()):
            leaves[parent] = None
            leaves.move_to_end(parent, last=parent.used[replica] >= self._now)


def _common(own: tuple[int, ...], tokens: tuple[int, ...], start: int) -> int:
    """Return how many tokens of a node equal those from ``start`` on. Pure."""
    if own == tokens[start : start + len(own)]:
        return len(own)
    low, high = 1, min(len(own), len(tokens) - start)  # the first is equal: it is found by that
    while low < high:
        middle = (low + high + 1) // 2
        if own[:middle] == tokens[start : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
