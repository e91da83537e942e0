"""Merges the ranks' reports of KV transfers into one outcome, by the set of ranks that reported.

Each rank has a worker side of its own, and a share of every block. A block is of use once all of it is there, and free once
no rank uses it any more:

    loaded by all ─▶ loaded      ended by all, failed by some ─▶ failed, at the least that arrived      released by all ─▶ released
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import attrs

from trencadis.records import ConnectorReport, FailedLoad

__all__ = ["RankQuorum"]

logger = logging.getLogger("trencadis.engine")


@attrs.frozen
class _Transfer:
    """Reports so far of one transfer id.

    Attributes:
        ends: How the load ended, by rank; None is whole.
        released: Ranks that touch its blocks no more.
    """

    ends: dict[int, FailedLoad | None] = attrs.Factory(dict)
    released: set[int] = attrs.Factory(set)


class RankQuorum:
    """Merges the reports of the ranks of one engine; independent of blocks and sequences. Engine thread.

    Repeated entries, and those of unknown ranks or of transfer ids that are not awaited, are ignored and counted.

    Args:
        num_ranks: The set is 0 .. num_ranks - 1.

    Attributes:
        num_ignored: Entries of reports that changed nothing.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._ranks = frozenset(range(num_ranks))
        self._known: dict[int, _Transfer] = {}
        self.num_ignored = 0

    def merge(
        self,
        reports: Mapping[int, ConnectorReport],
        *,
        is_awaited: Callable[[int], bool],
        is_pinned: Callable[[int], bool],
    ) -> ConnectorReport:
        """Merge the reports of a step, by rank; return the transfers that all ranks have now finished.

        Args:
            reports: Reports of any of the ranks, in any order.
            is_awaited: Whether the end of a load, or a release, is awaited for a transfer id.
            is_pinned: Whether a release is awaited for it.
        """
        self._known = {transfer_id: known for transfer_id, known in self._known.items() if is_awaited(transfer_id)}
        loaded: list[int] = []
        failed: list[FailedLoad] = []
        released: list[int] = []
        for rank, report in sorted(reports.items()):
            # A load that one report calls both whole and broken is broken.
            ends = [
                *[(one.transfer_id, one) for one in report.failed],
                *[(transfer_id, None) for transfer_id in report.loaded],
            ]
            if rank not in self._ranks:
                self._ignore(rank, "is none of this engine's", len(ends) + len(report.released))
                continue
            for transfer_id, end in ends:
                if self._ended(rank, transfer_id, end, is_awaited=is_awaited(transfer_id)):
                    worst = _worst(self._known[transfer_id].ends)
                    loaded += [transfer_id] if worst is None else []
                    failed += [] if worst is None else [worst]
            released += [t for t in report.released if self._released(rank, t, is_pinned=is_pinned(t))]
        return ConnectorReport(loaded=tuple(loaded), failed=tuple(failed), released=tuple(released))

    def _ended(self, rank: int, transfer_id: int, end: FailedLoad | None, *, is_awaited: bool) -> bool:
        """Record the end of a rank's part of a load; True if it was the last one."""
        known = self._known.get(transfer_id, _Transfer())
        if not is_awaited or rank in known.ends or rank in known.released:
            self._ignore(rank, f"reports an end of load {transfer_id} that is not awaited of it")
            return False
        known.ends[rank] = end
        self._known[transfer_id] = known
        return known.ends.keys() == self._ranks

    def _released(self, rank: int, transfer_id: int, *, is_pinned: bool) -> bool:
        """Record that a rank released a transfer id; True if it was the last one."""
        known = self._known.get(transfer_id, _Transfer())
        if not is_pinned or rank in known.released:
            self._ignore(rank, f"releases transfer id {transfer_id}, which is not awaited of it")
            return False
        known.released.add(rank)
        self._known[transfer_id] = known
        return known.released == self._ranks

    def _ignore(self, rank: int, what: str, num_entries: int = 1) -> None:
        self.num_ignored += num_entries
        if num_entries:
            logger.warning("Rank %d of the KV connector %s; ignored.", rank, what)


def _worst(ends: Mapping[int, FailedLoad | None]) -> FailedLoad | None:
    """Return the failure with the least valid tokens, of the lowest rank if several have as few; None if all are whole. Pure."""
    failures = [end for _, end in sorted(ends.items()) if end is not None]
    return min(failures, key=lambda failed: failed.num_valid_tokens, default=None)
