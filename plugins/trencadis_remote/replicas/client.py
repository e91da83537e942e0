"""Client of several engines, each in a process of its own: to its users it is one engine.

A replica gets the tokens of a request that the client has already, and goes on after them: parameters, seed and tokens determine
the rest, so that the text is what it would have been.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trencadis.client.engine_client import NO_OUTPUTS, StepOutputs
from trencadis.errors import TrencadisError
from trencadis.processes import RestartLimit
from trencadis.records import EmbeddingRequest, FinishedSequence, FinishReason, Request
from trencadis_remote.process.client import PolledEngineClient, RemoteEngineClient
from trencadis_remote.replicas.control import ReplicaControl
from trencadis_remote.replicas.files import ReplicaFiles
from trencadis_remote.replicas.live_replicas import LiveReplicas
from trencadis_remote.replicas.mover import Mover
from trencadis_remote.replicas.remote_replica import LiveWork, RemoteReplica
from trencadis_remote.replicas.replica_set import ReplicaSeat
from trencadis_remote.replicas.routing import Routing
from trencadis_remote.replicas.starter import Starter

__all__ = ["ReplicatedEngineClient"]

logger = logging.getLogger("trencadis")

_Seat = ReplicaSeat[LiveWork, RemoteReplica]


class ReplicatedEngineClient(PolledEngineClient):
    """Sends each request to one of several replicas. Used by one thread at a time, except :meth:`interrupt` and :attr:`stalled`.

    Args:
        clients: Clients of the replicas, all ready; closed with this one.
        routing: Chooses replicas.
        starter: Starts replicas again; closed with this one.
        make_limit: Makes the restart limit of a replica.
        mover: Moves requests between replicas that serve; None: they stay.

    Attributes:
        replicas: Set of the replicas; not to be changed.
    """

    is_stalled = False  # waiting for a message costs nothing

    def __init__(
        self,
        clients: Sequence[RemoteEngineClient],
        *,
        routing: Routing,
        starter: Starter,
        make_limit: Callable[[], RestartLimit],
        mover: Mover | None = None,
    ) -> None:
        first = clients[0]
        self.model, self.max_model_len, self.plan_hash = first.model, first.max_model_len, first.plan_hash
        self.replicas = LiveReplicas(len(clients), routing=routing, mover=mover, on_end=self._lose)
        self._routing = routing
        self._starter = starter
        self._limits = [make_limit() for _ in clients]
        self._control = ReplicaControl(self.replicas, routing, on_drain=self._finish_drains)
        self._next = 0
        self._is_closed = False
        self._files = ReplicaFiles(starter.fileno())
        for index, client in enumerate(clients):
            self._join(index, client)

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Send a request to a replica; its engine may refuse it later."""
        self.replicas.check(request.request_id)
        work = LiveWork(request, slot=self.replicas.handles.take())
        try:
            self.replicas.place(work)
        except BaseException:
            self.replicas.handles.give_back(work.slot)
            raise
        return work.slot

    def embed(self, request: EmbeddingRequest) -> None:
        """Send a text to a replica; its engine may refuse it later."""
        self.replicas.check(request.request_id)
        self.replicas.place(LiveWork(request))

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step. A text that waits to be embedded is dropped at once."""
        work = self.replicas.work.get(request_id)
        if work is not None and work.slot < 0:
            replica = self.replicas.replica_of(work)
            self.replicas.forget(work)
            if replica is not None:
                replica.use(lambda client: client.abort(request_id))
        else:
            self._end(request_id, FinishReason.ABORT)
        return None

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step."""
        self._end(request_id, FinishReason.STOP)
        return None

    def _end(self, request_id: str, reason: FinishReason) -> None:
        work = self.replicas.work.get(request_id)
        if work is None or work.ending is not None:
            return
        work.ending, work.stays = reason, True
        stops = reason is FinishReason.STOP
        replica = self.replicas.replica_of(work)
        if replica is not None:
            replica.use(lambda client: client.stop(request_id) if stops else client.abort(request_id))

    # --------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True while outputs are expected, or were received and not taken."""
        return bool(self.replicas.work) or self.has_outputs

    @property
    def has_outputs(self) -> bool:
        """True if :meth:`step` would not wait."""
        return bool(self.replicas.outputs) or any(replica.client.has_outputs for _, replica in self.replicas.live)

    @property
    def has_rest(self) -> bool:
        """True if messages are left after :meth:`receive`: call it again."""
        return any(replica.client.has_rest for _, replica in self.replicas.live)

    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        """Return the outputs of one step of one replica; waits if there are none."""
        if not self.has_outputs:
            self.rest(timeout_s)
        if not self.replicas.outputs:
            self._take_step()
            self._finish_drains()
        return self.replicas.outputs.popleft() if self.replicas.outputs else NO_OUTPUTS

    def rest(self, timeout_s: float | None = None) -> None:
        """Receive, after sleeping until there is something to receive, :meth:`interrupt` is called, or time is up."""
        if self._files.wait(0.0 if self.has_rest else timeout_s):
            self.receive_last()
        else:
            self.receive()

    def receive(self) -> bool:
        """Receive from all replicas without waiting; True if :meth:`step` would not wait."""
        readable = self._files.messages.readable()
        for _, replica in self.replicas.live:
            if replica.client.has_rest or replica.client.socket_file in readable:
                replica.use(RemoteEngineClient.receive)
        self._finish_drains()
        replicas = self.replicas
        if replicas.mover is not None and not replicas.failure and replicas.mover.is_due:
            replicas.move()
        if not self.replicas.outputs:
            replicas.check()
        return self.has_outputs

    def receive_last(self) -> None:
        """Deal with replicas that have ended or are ready again.

        Raises:
            EngineEndedError: No replica is left.
        """
        ended = self._files.ends.readable()
        for _, replica in self.replicas.live:
            while replica.client.end_file in ended and not replica.has_ended:  # until it has been lost
                replica.use(RemoteEngineClient.receive_last)
        for index, client in self._starter.take():
            replica = self._join(index, client)
            logger.warning("Replica %d serves again.", index)
            self._control.rejoined(index, replica)
        self.receive()

    @property
    def stalled(self) -> str:
        """Where the replicas have made no progress for too long; empty while one of them does. From any thread."""
        faults = [(seat.index, replica.stalled) for seat, replica in self.replicas.live]
        if not all(fault for _, fault in faults):
            return ""
        return "; ".join(f"replica {index}: {fault}" for index, fault in faults)

    @property
    def socket_file(self) -> int:
        """Readable while :meth:`receive` has something to do."""
        return self._files.messages.fileno()

    @property
    def end_file(self) -> int:
        """Becomes readable when a replica has ended or is ready again; call :meth:`receive_last`."""
        return self._files.ends.fileno()

    def interrupt(self) -> None:
        """End :meth:`rest`, or :meth:`step` where it waits."""
        self._files.wake_up.wake()

    def _take_step(self) -> None:
        """Take the outputs of a step of the next replica that has some."""
        seats = self.replicas.seats
        for offset in range(len(seats)):
            seat = seats[(self._next + offset) % len(seats)]
            if seat.engine is not None and seat.engine.client.has_outputs:
                self._next = (seat.index + 1) % len(seats)
                self.replicas.take(seat.engine)
                self.replicas.settle()
                return

    # --------------------------------------------------------------------------------------- replicas that end

    def _join(self, index: int, client: RemoteEngineClient) -> RemoteReplica:
        """Let a replica that is ready take requests."""
        replica = RemoteReplica(client, on_end=functools.partial(self._lose, self.replicas.seats[index]))
        client.on_load = functools.partial(self._routing.loaded, index)
        client.on_stayed = self.replicas.stayed
        self._files.watch(client)
        self.replicas.join(index, replica)
        return replica

    def _lose(self, seat: _Seat, reason: str) -> None:
        """Deal with a replica that has ended: its outputs are taken, its requests go to others, and it is started again."""
        if seat.engine is None:
            return
        seat.reason = reason
        logger.error("Replica %d has ended: %s", seat.index, reason)
        if len(self.replicas.live) == 1:
            self.replicas.failure = f"no replica is left; the last one: {reason}"
            self._files.over.wake()
        self._part(seat, seat.engine, self._limits[seat.index].delay_s)
        ended = []

        def continues(work: LiveWork) -> bool:
            if work.ending is None or isinstance(work.request, EmbeddingRequest):
                return not self.replicas.failure
            self.replicas.forget(work)
            ended.append(_end_of(work, work.request, work.ending))  # its replica will not say it
            return False

        self.replicas.lose(seat.index, continues)
        if ended:
            self.replicas.outputs.append(StepOutputs(finished=tuple(ended)))
        self.replicas.settle()

    def _part(self, seat: _Seat, replica: RemoteReplica, delays_s: Callable[[], float | None]) -> None:
        """Take the last outputs of a replica, and have it started again."""
        while replica.client.has_outputs:
            self.replicas.take(replica)
        self._files.ignore(replica.client)
        replica.has_ended = True
        self.replicas.remove(seat.index)
        self._control.lost(seat.index)
        if self.replicas.failure:
            replica.client.close()
        else:
            self._starter.start(seat.index, replica.client, delays_s=delays_s)

    def _finish_drains(self) -> None:
        """Start replicas again that are to be and have nothing left."""
        for seat, replica in self.replicas.live:
            if seat.is_draining and not seat.work and not replica.client.has_outputs:
                logger.info("Replica %d is drained, and started again.", seat.index)
                self._part(seat, replica, _Delays())

    # ------------------------------------------------------------------------------- control, metrics, closing

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Request the metrics of all replicas; samples are labelled with the replica's number."""
        self.replicas.check()
        self._control.request_metrics(callback)

    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Send a control request to all replicas; see :meth:`ReplicaControl.control`."""
        self.replicas.check()

        def answered(answer: dict[str, Any] | TrencadisError) -> None:
            if isinstance(answer, dict):
                self.plan_hash = answer.get("plan_hash", self.plan_hash)
            callback(answer)

        self._control.control(name, arguments, answered)

    def close(self) -> None:
        """Close all replicas, and what is being started."""
        if self._is_closed:
            return
        self._is_closed = True
        self.replicas.failure = self.replicas.failure or "the engine was closed."
        self._starter.close()
        for _, replica in self.replicas.live:
            replica.client.close()
        self._files.close()


class _Delays:
    """Delays of a restart that an operator asked for: none at first, and some between further tries, should it fail."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self) -> float | None:
        delay_s, self._next_s = self._next_s, 30.0
        return delay_s


def _end_of(work: LiveWork, request: Request, reason: FinishReason) -> FinishedSequence:
    """Return the end of a request that was asked to end. Pure."""
    return FinishedSequence(
        request_id=request.request_id,
        slot=work.slot,
        token_ids=np.array(work.tokens, np.int32),
        finish_reason=reason,
        num_prompt_tokens=len(request.prompt_token_ids),
    )
