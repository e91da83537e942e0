"""The set of live replicas, and what comes out of them under the slots of their client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import msgspec

from trencadis.client.engine_client import StepOutputs
from trencadis.errors import RequestError
from trencadis.records import FinishedSequence, FinishReason
from trencadis_remote.process.client import RequestHandles
from trencadis_remote.replicas.mover import Mover
from trencadis_remote.replicas.remote_replica import LiveWork, RemoteReplica
from trencadis_remote.replicas.replica_set import ReplicaSeat, ReplicaSet
from trencadis_remote.replicas.routing import Routing

__all__ = ["LiveReplicas"]


class LiveReplicas(ReplicaSet[LiveWork, RemoteReplica]):
    """Replicas in processes of their own.

    Args:
        num_replicas: See :class:`ReplicaSet`; so are the others.
        routing: Routing that chooses replicas.
        mover: Mover of requests, or None.
        on_end: Function that is called when an engine has ended.

    Attributes:
        outputs: Outputs that the client has not taken.
        handles: Slots of the client's requests; :meth:`forget` gives them back.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        routing: Routing,
        mover: Mover | None,
        on_end: Callable[[ReplicaSeat[LiveWork, RemoteReplica], str], None],
    ) -> None:
        super().__init__(num_replicas, routing=routing, mover=mover, on_end=on_end, on_refusal=self._refused)
        self.outputs: deque[StepOutputs] = deque()
        self.handles = RequestHandles()

    def replica_of(self, work: LiveWork) -> RemoteReplica | None:
        """Return the replica that has a request or a text; None: none does."""
        return self.seats[work.replica].engine if work.replica >= 0 else None

    def forget(self, work: LiveWork) -> None:
        """Take work that has ended out of everything, and give its slot back."""
        super().forget(work)
        if work.slot >= 0:
            self.handles.give_back(work.slot)

    def take(self, replica: RemoteReplica) -> None:
        """Take the outputs of one step, without the ends of requests that go on elsewhere."""
        outputs = replica.take_step()
        finished, gone = [], [*(one.request_id for one in outputs.embeddings), *(name for name, _ in outputs.refused)]
        for one in outputs.finished:
            work = self.work[one.request_id]
            is_moving = one.finish_reason is FinishReason.MOVED and work.ending is None
            if is_moving and work.num_cached_tokens < 0 and one.first_scheduled_s is not None:
                work.num_cached_tokens = one.num_cached_tokens
            if is_moving:
                self.moved(work)
            else:
                finished.append(_final(one, work))
                gone.append(one.request_id)
        for known in map(self.work.get, gone):
            if known is not None:
                self.forget(known)
        self.outputs.append(msgspec.structs.replace(outputs, finished=tuple(finished)))

    def _refused(self, work: LiveWork, error: RequestError) -> None:
        self.outputs.append(StepOutputs(refused=((work.request.request_id, error),)))


def _final(end: FinishedSequence, work: LiveWork) -> FinishedSequence:
    """Return the end of a request; one that was asked to end while it was being moved ends for that reason. Pure."""
    if work.num_cached_tokens >= 0:
        end = attrs.evolve(end, num_cached_tokens=work.num_cached_tokens)
    if end.finish_reason is FinishReason.MOVED and work.ending is not None:
        end = attrs.evolve(end, finish_reason=work.ending)
    return attrs.evolve(end, slot=work.slot)
