"""Ranks in processes of this machine; the executor is :class:`RanksExecutor`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from trencadis.clock import Clock
from trencadis.interfaces import Backend, SupportsPreload
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.ranks.executor import RanksExecutor
from trencadis_plugins.executor.ranks.process import RankProcess
from trencadis_plugins.executor.ranks.rank import Rank
from trencadis_plugins.executor.ranks.template import CAN_FORK, RankTemplate, TemplateEndedError

__all__ = ["ProcessesExecutor"]

logger = logging.getLogger("trencadis.executor")

_TEMPLATES: Final = 2
"""Template processes that are tried for one rank."""


class ProcessesExecutor(RanksExecutor):
    """Hosts every rank of a replica in a process, forked from one that has imported what the backend needs, where it says what that is.

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
        self._template: RankTemplate | None = None
        self._preload: Callable[[], None] | None = None
        self._forks = CAN_FORK

    def _start_ranks(self, make_backend: Callable[[int], Backend]) -> Iterable[Rank]:
        preload = make_backend.preload if isinstance(make_backend, SupportsPreload) else None
        for rank in range(self.num_ranks):
            yield self._forked(rank, preload) or RankProcess.spawned(rank, local_rank=self._first + rank)

    def _forked(self, rank: int, preload: Callable[[], None] | None) -> Rank | None:
        """Fork a rank, from another template if there is none any more; None: none can be had."""
        for _ in range(_TEMPLATES):
            if not self._forks or preload is None:
                break
            template = self._living_template(preload)
            try:
                return template.fork(rank)
            except TemplateEndedError as error:
                self._forks = not error.is_useless
                logger.warning("%s.", error)
        return None

    def _living_template(self, preload: Callable[[], None]) -> RankTemplate:
        if self._template is None or not self._template.is_alive:
            self._end_template()
            self._template = RankTemplate(preload)
            self._preload = preload
        return self._template

    def _look_after(self, now_s: float) -> None:
        """Replace a template that has ended as well: the next one imports while ranks go on, and not when they are lost.

        One that ended before it forked any rank may do so again, and is not.
        """
        super()._look_after(now_s)
        if self._preload is not None and self._template is not None and self._template.has_forked:
            self._living_template(self._preload)

    def _end_template(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            template.close()

    def close(self) -> None:
        """End the ranks and what they are forked from; may be called twice."""
        super().close()
        self._end_template()
