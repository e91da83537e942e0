"""One question to several children: who has the longest prefix, asked until all have answered or had their time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from trencadis.clock import Clock
from trencadis.interfaces import Lookup
from trencadis.records import Request
from trencadis_kv.connectors.tiered.child import Child
from trencadis_kv.store.bounded import BoundedDict

__all__ = ["TierLookups"]

_MAX_OPEN = 4096
"""Questions of requests that were aborted meanwhile are never asked again: they are forgotten."""


@attrs.define
class _Asked:
    last_hash: bytes
    since_s: float
    children: tuple[int, ...]
    answers: dict[int, Lookup] = attrs.field(factory=dict)


class TierLookups:
    """Look-ups under way.

    Args:
        children: The nearest first.
        clock: The engine's.
        timeout_s: A child that is pending for longer is left out.
    """

    def __init__(self, children: Sequence[Child], *, clock: Clock, timeout_s: float) -> None:
        self._children = children
        self._clock = clock
        self._timeout_s = timeout_s
        self._open: BoundedDict[str, _Asked] = BoundedDict(_MAX_OPEN)

    def ask(
        self,
        request: Request,
        *,
        block_hashes: Sequence[bytes],
        num_local_tokens: int,
        num_tokens: int,
        without: Collection[int],
    ) -> list[tuple[int, Lookup]] | None:
        """Return children and what each has beyond the local hit, the nearest first; None while it is pending.

        All are asked at once; a child that has everything is not waited beyond. One whose answer is not returned is told so.

        Args:
            request: Whose prompt.
            block_hashes: Of its full blocks.
            num_local_tokens: Of the local prefix hit.
            num_tokens: Of all full blocks.
            without: Children not to be asked.
        """
        asked = self._asked(request.request_id, block_hashes[-1] if block_hashes else b"", without)
        is_overdue = self._clock.now_s() - asked.since_s >= self._timeout_s
        is_waiting = False
        for child in asked.children:
            if child not in asked.answers:
                found = self._children[child].lookup(
                    request, block_hashes=block_hashes, num_local_tokens=num_local_tokens
                )
                if found.pending and is_overdue:
                    self._children[child].timed_out()
                    found = Lookup()
                if found.pending:
                    is_waiting = True
                    continue
                asked.answers[child] = found
            if not is_waiting and num_tokens and asked.answers[child].num_tokens >= num_tokens:
                break
        if is_waiting:
            self._open[request.request_id] = asked
            return None
        self._open.pop(request.request_id, None)
        self._unused(asked, num_local_tokens=num_local_tokens)
        return [(child, found) for child, found in sorted(asked.answers.items()) if found.num_tokens > num_local_tokens]

    def forget(self, request_id: str) -> None:
        """Learn that a request is not asked about again."""
        asked = self._open.pop(request_id, None)
        if asked is not None:
            self._unused(asked)

    def _unused(self, asked: _Asked, *, num_local_tokens: int | None = None) -> None:
        """Tell children that their hits are of no use: all, or those that bring no more than the local hit."""
        for child, found in asked.answers.items():
            if found.num_tokens and (num_local_tokens is None or found.num_tokens <= num_local_tokens):
                self._children[child].unused(found.transfer_id)

    def _asked(self, request_id: str, last_hash: bytes, without: Collection[int]) -> _Asked:
        """Return the question under way, or a new one: what is much too old was some other request's of this name."""
        now_s = self._clock.now_s()
        asked = self._open.get(request_id)
        is_recent = asked is not None and now_s - asked.since_s < 2 * self._timeout_s + 1
        if asked is not None and is_recent and asked.last_hash == last_hash:
            return asked
        self.forget(request_id)
        children = [i for i, child in enumerate(self._children) if i not in without and child.may_be_asked()]
        return _Asked(last_hash=last_hash, since_s=now_s, children=tuple(children))
