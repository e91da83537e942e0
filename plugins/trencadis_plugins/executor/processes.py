"""Ranks in processes of this machine; the executor is :class:`RanksExecutor`."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.clock import Clock
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.ranks.executor import RanksExecutor
from trencadis_plugins.executor.ranks.process import RankProcess
from trencadis_plugins.executor.ranks.rank import Rank

__all__ = ["ProcessesExecutor"]


class ProcessesExecutor(RanksExecutor):
    """Hosts every rank of a replica in a child process.

    Args:
        config: Table ``[executor.processes]``.
        layout: How many ranks, and which of them gives the output.
        replica: Which of the replicas of this machine they are.
        clock: Measures silence.
    """

    def __init__(
        self, config: ProcessesConfig, *, layout: ParallelLayout, replica: int = 0, clock: Clock | None = None
    ) -> None:
        super().__init__(config, layout=layout, name="processes", clock=clock)
        self._first = replica * layout.num_ranks

    def _start_ranks(self) -> Iterable[Rank]:
        return (RankProcess(rank, local_rank=self._first + rank) for rank in range(self.num_ranks))
