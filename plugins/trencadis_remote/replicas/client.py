"""Client of several engines, each in a process of its own: to its users it is one engine.

    add ─▶ router ─▶ replica 0 ─┐
                     replica 1 ─┼─▶ step
                     replica 2 ─┘
                         │ ends
                         ▼
      its requests ─▶ router, with what they have so far; the replica is started again

A replica gets the tokens of a request that the client has already, and goes on after them: parameters, seed and tokens determine
the rest, so that the text is what it would have been.
"""

from __future__ import annotations

import functools
import logging
import selectors
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis.api import NO_OUTPUTS, StepOutputs
from trencadis.errors import EngineEndedError, InvalidRequestError, RequestError, TrencadisError
from trencadis.faults import shown
from trencadis.interfaces import RoutingRequest
from trencadis.processes import RestartLimit
from trencadis.records import EmbeddingRequest, FinishedSequence, FinishReason, Request, evolve_unchecked
from trencadis_remote.process.channel import WakeUpFile
from trencadis_remote.process.client import PolledEngineClient, RemoteEngineClient, RequestHandles
from trencadis_remote.replicas.answers import Gathering, Pages, gather_answers
from trencadis_remote.replicas.mover import LiveRow, Mover
from trencadis_remote.replicas.pages import replicas_page
from trencadis_remote.replicas.routing import Routing
from trencadis_remote.replicas.starter import Starter

__all__ = ["ReplicatedEngineClient"]

logger = logging.getLogger("trencadis")

_NO_ROUTE = RoutingRequest(token_ids=())


@attrs.define(eq=False)
class _Work:
    """A request, or a text to embed, that a replica has.

    Attributes:
        request: Request of the client.
        slot: Under which its tokens are reported; -1 for a text.
        routed: Request as the router was shown it.
        generation: Generation of the router that chose the replica.
        replica: That has it; -1: none yet, or none any more.
        handle: Handle of the replica, for its tokens.
        tokens: Output so far.
        ending: Why it was asked to end, or None.
        target: Replica that it is being moved to; -1: it is not.
        stays: It cannot go on elsewhere.
        num_moves: Times that the router moved it.
        num_cached_tokens: Prompt tokens that were cached where it first ran; -1: not known. What it finds elsewhere may be its own.
        is_new: No replica has had it yet.
    """

    request: Request | EmbeddingRequest
    slot: int = -1
    routed: RoutingRequest = _NO_ROUTE
    generation: int = 0
    replica: int = -1
    handle: int = -1
    tokens: list[int] = attrs.field(factory=list)
    ending: FinishReason | None = None
    target: int = -1
    stays: bool = False
    num_moves: int = 0
    num_cached_tokens: int = -1
    is_new: bool = True


@attrs.define(eq=False)
class _Replica:
    """One engine, or the place of one that has ended.

    Attributes:
        index: Index of the replica.
        restarts: When it may be started again.
        client: Client of the engine; None: there is none at the moment.
        work: Requests of the replica, by id.
        by_handle: Requests of the replica, by handle.
        is_draining: It takes nothing new, and is started again when it has nothing left.
        reason: Why it ended last.
        num_restarts: Times that it was started again.
        num_placed: Requests and texts that it was given.
        num_moved: Number of these requests that were left to others when it ended.
        num_rebalanced: Number of these requests that the router moved to others while it served.
    """

    index: int
    restarts: RestartLimit
    client: RemoteEngineClient | None = None
    work: dict[str, _Work] = attrs.field(factory=dict)
    by_handle: dict[int, _Work] = attrs.field(factory=dict)
    is_draining: bool = False
    reason: str = ""
    num_restarts: int = 0
    num_placed: int = 0
    num_moved: int = 0
    num_rebalanced: int = 0

    @property
    def state(self) -> str:
        """Of it, in a word."""
        if self.client is None:
            return "down"
        return "stalled" if self.client.stalled else "draining" if self.is_draining else "ready"


class ReplicatedEngineClient(PolledEngineClient):
    """Sends each request to one of several replicas. Used by one thread at a time, except :meth:`interrupt` and :attr:`stalled`.

    Args:
        clients: Clients of the replicas, all ready; closed with this one.
        routing: Chooses replicas.
        starter: Starts replicas again; closed with this one.
        make_limit: Makes the restart limit of a replica.
        mover: Moves requests between replicas that serve; None: they stay.
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
        self._routing = routing
        self._mover = mover
        self._starter = starter
        self._replicas = [_Replica(index=index, restarts=make_limit()) for index in range(len(clients))]
        self._work: dict[str, _Work] = {}
        self._unplaced: deque[_Work] = deque()
        self._is_moving = False
        self._handles = RequestHandles()
        self._outputs: deque[StepOutputs] = deque()
        self._touched: set[int] = set()
        self._next = 0
        self._failure = ""
        self._is_closed = False
        self._gatherings: list[Gathering] = []
        self._pages = Pages()
        self._changes: list[tuple[str, Mapping[str, Any]]] = []
        self._wake_up, self._over = WakeUpFile(), WakeUpFile()
        # A selector has a file of its own, which is readable while one of those that it watches is.
        self._messages, self._ends, self._all = _Selector(), _Selector(), _Selector()
        self._ends.watch(starter.fileno())
        self._ends.watch(self._over.fileno())
        for one in (self._messages, self._ends, self._wake_up):
            self._all.watch(one.fileno())
        for replica, client in zip(self._replicas, clients, strict=True):
            self._join(replica, client)

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Send a request to a replica; its engine may refuse it later."""
        self._check_id(request.request_id)
        work = _Work(request, slot=self._handles.take())
        try:
            self._place(work)
        except BaseException:
            self._handles.give_back(work.slot)
            raise
        return work.slot

    def embed(self, request: EmbeddingRequest) -> None:
        """Send a text to a replica; its engine may refuse it later."""
        self._check_id(request.request_id)
        self._place(_Work(request))

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step. A text that waits to be embedded is dropped at once."""
        work = self._work.get(request_id)
        if work is not None and work.slot < 0:
            replica = work.replica
            self._forget(work)
            self._use(replica, lambda client: client.abort(request_id))
        else:
            self._end(request_id, FinishReason.ABORT)
        return None

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step."""
        self._end(request_id, FinishReason.STOP)
        return None

    def _end(self, request_id: str, reason: FinishReason) -> None:
        work = self._work.get(request_id)
        if work is None or work.ending is not None:
            return
        work.ending = reason
        stops = reason is FinishReason.STOP
        self._use(work.replica, lambda client: client.stop(request_id) if stops else client.abort(request_id))

    def _check_id(self, request_id: str) -> None:
        self._check_open()
        if request_id in self._work:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")

    def _check_open(self) -> None:
        if self._failure:
            raise EngineEndedError(self._failure)

    # --------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True while outputs are expected, or were received and not taken."""
        return bool(self._work) or self.has_outputs

    @property
    def has_outputs(self) -> bool:
        """True if :meth:`step` would not wait."""
        return bool(self._outputs) or any(client.has_outputs for _, client in self._live)

    @property
    def has_rest(self) -> bool:
        """True if messages are left after :meth:`receive`: call it again."""
        return any(client.has_rest for _, client in self._live)

    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        """Return the outputs of one step of one replica; waits if there are none."""
        if not self.has_outputs:
            self._wait(timeout_s)
        if not self._outputs:
            self._take_step()
            self._finish_drains()
        return self._outputs.popleft() if self._outputs else NO_OUTPUTS

    def rest(self, timeout_s: float | None = None) -> None:
        """Wait for messages."""
        self._wait(timeout_s)

    def receive(self, *, is_likely: bool = False) -> bool:
        """Receive from all replicas without waiting; True if :meth:`step` would not wait."""
        readable = self._messages.readable()
        touched, self._touched = self._touched, set()
        for replica, client in self._live:
            likely = client.socket_file in readable
            if likely or replica.index in touched or client.has_rest:
                self._use(replica.index, functools.partial(RemoteEngineClient.receive, is_likely=likely), touches=False)
        self._finish_drains()
        if self._mover is not None and not self._failure and self._mover.is_due:
            self._ask_for_moves(self._mover)
        if self._failure and not self._outputs:
            raise EngineEndedError(self._failure)
        return self.has_outputs

    def receive_last(self) -> None:
        """Deal with replicas that have ended or are ready again.

        Raises:
            EngineEndedError: No replica is left.
        """
        ended = self._ends.readable()
        for replica, client in self._live:
            while client.end_file in ended and replica.client is client:  # until it has been lost
                self._use(replica.index, RemoteEngineClient.receive_last)
        for index, client in self._starter.take():
            self._rejoin(self._replicas[index], client)
        self.receive()

    @property
    def stalled(self) -> str:
        """Where the replicas have made no progress for too long; empty while one of them does. From any thread."""
        faults = [(replica.index, client.stalled) for replica, client in self._live]
        if not all(fault for _, fault in faults):
            return ""
        return "; ".join(f"replica {index}: {fault}" for index, fault in faults)

    @property
    def socket_file(self) -> int:
        """Becomes readable when messages may have come; call :meth:`receive` after every use of the client."""
        return self._messages.fileno()

    @property
    def end_file(self) -> int:
        """Becomes readable when a replica has ended or is ready again; call :meth:`receive_last`."""
        return self._ends.fileno()

    def interrupt(self) -> None:
        """End :meth:`rest`, or :meth:`step` where it waits."""
        self._wake_up.wake()

    def _wait(self, timeout_s: float | None) -> None:
        """Receive, after sleeping until there is something to receive, :meth:`interrupt` is called, or time is up."""
        # What was sent to may have messages that its file no longer shows.
        readable = self._all.readable(0.0 if self._touched or self.has_rest else timeout_s)
        if self._wake_up.fileno() in readable:
            self._wake_up.clear()
        if self.end_file in readable:
            self.receive_last()
        else:
            self.receive()

    @property
    def _live(self) -> list[tuple[_Replica, RemoteEngineClient]]:
        return [(replica, replica.client) for replica in self._replicas if replica.client is not None]

    def _take_step(self) -> None:
        """Take the outputs of a step of the next replica that has some."""
        count = len(self._replicas)
        for offset in range(count):
            replica = self._replicas[(self._next + offset) % count]
            if replica.client is not None and replica.client.has_outputs:
                self._next = (replica.index + 1) % count
                self._outputs.append(self._translated(replica, replica.client.step()))
                self._move()
                return

    def _translated(self, replica: _Replica, outputs: StepOutputs) -> StepOutputs:
        """Return a replica's outputs with slots of this client, and remember the tokens."""
        by_handle, token_ids = replica.by_handle, outputs.token_ids
        slots, end = [], 0
        for handle, num_tokens in zip(outputs.slots, outputs.num_tokens, strict=True):
            work = by_handle[handle]
            start, end = end, end + num_tokens
            work.tokens += token_ids[start:end]
            slots.append(work.slot)
        prompt_logprobs = tuple(
            [msgspec.structs.replace(entry, index=by_handle[entry.index].slot) for entry in outputs.prompt_logprobs]
        )
        ended = [
            (self._final(one, work), work)
            for one in outputs.finished
            if not self._is_leaving(one, work := self._work[one.request_id])
        ]
        gone = [*(one.request_id for one in outputs.embeddings), *(name for name, _ in outputs.refused)]
        for known in (*(work for _, work in ended), *map(self._work.get, gone)):
            if known is not None:
                self._forget(known)
        return msgspec.structs.replace(
            outputs,
            slots=slots,
            prompt_logprobs=prompt_logprobs,
            finished=tuple([attrs.evolve(one, slot=work.slot) for one, work in ended]),
        )

    # -------------------------------------------------------------------------------------------------- moving

    def _ask_for_moves(self, mover: Mover) -> None:
        """Withdraw the requests that the router moves: the new replica gets each when the old one has said its last token."""
        live = [work for work in self._work.values() if work.slot >= 0 and work.replica >= 0]
        rows = [
            LiveRow(
                work.request,  # type: ignore[arg-type]  # those with a slot are no texts
                work.replica,
                len(work.tokens),
                work.num_moves,
                work.target,
                work.stays or work.ending is not None,
            )
            for work in live
        ]
        for move in mover.choose(rows):
            work = live[move.request]
            work.target = move.replica
            self._use(work.replica, lambda client, work=work: client.withdraw(work.request.request_id))  # type: ignore[misc]

    def _is_leaving(self, end: FinishedSequence, work: _Work) -> bool:
        """Return whether an end is that of a request at its old replica only; it is given to the new one then."""
        if end.finish_reason is not FinishReason.MOVED or work.ending is not None:
            return False
        self._replicas[work.replica].num_rebalanced += 1
        work.num_moves += 1
        if work.num_cached_tokens < 0 and end.first_scheduled_s is not None:
            work.num_cached_tokens = end.num_cached_tokens
        self._leave(work)
        self._unplaced.append(work)
        return True

    @staticmethod
    def _final(end: FinishedSequence, work: _Work) -> FinishedSequence:
        """Return the end of a request; one that was asked to end while it was being moved ends for that reason."""
        if work.num_cached_tokens >= 0:
            end = attrs.evolve(end, num_cached_tokens=work.num_cached_tokens)
        if end.finish_reason is not FinishReason.MOVED or work.ending is None:
            return end
        return attrs.evolve(end, finish_reason=work.ending)

    def _stayed(self, request_id: str) -> None:
        """Note that a request cannot go on elsewhere."""
        work = self._work.get(request_id)
        if work is not None:
            work.target, work.stays = -1, True

    # ------------------------------------------------------------------------------------------------- placing

    def _place(self, work: _Work) -> None:
        """Give a request or a text to a replica; to another if that has ended meanwhile.

        Raises:
            RequestError: It cannot be served.
            EngineEndedError: No replica is left.
        """
        request, request_id = self._as_it_is(work), work.request.request_id
        work.routed = self._routing.facts(request)
        while True:
            self._check_open()
            target, work.target = work.target, -1
            moves = target >= 0 and self._routing.move(work.routed, target)
            replica = self._replicas[target if moves else self._routing.select(work.routed)]
            work.generation = self._routing.generation
            try:
                self._send(replica, work, request)
            except TrencadisError as error:
                self._routing.withdrawn(work.routed, replica.index, generation=work.generation)
                if not isinstance(error, EngineEndedError):
                    raise
                self._lose(replica, str(error))
            else:
                break
        work.replica, work.is_new = replica.index, False
        replica.num_placed += 1
        self._work.pop(request_id, None)
        self._work[request_id] = replica.work[request_id] = work  # the newest

    def _send(self, replica: _Replica, work: _Work, request: Request | EmbeddingRequest) -> None:
        client = replica.client
        if client is None:
            raise EngineEndedError(replica.reason)
        self._touched.add(replica.index)
        if isinstance(request, EmbeddingRequest):
            client.embed(request)
        else:
            work.handle = client.add(request)
            replica.by_handle[work.handle] = work

    @staticmethod
    def _as_it_is(work: _Work) -> Request | EmbeddingRequest:
        """Return a request with the output that it has; one that a replica had is not asked to be admitted again."""
        if work.is_new or isinstance(work.request, EmbeddingRequest):
            return work.request
        return evolve_unchecked(work.request, output_token_ids=tuple(work.tokens))

    def _forget(self, work: _Work) -> None:
        """Take a request or a text that has ended out of everything."""
        if work.replica >= 0:
            self._leave(work)
        del self._work[work.request.request_id]
        if work.slot >= 0:
            self._handles.give_back(work.slot)

    def _leave(self, work: _Work) -> None:
        """Take a request or a text from its replica."""
        replica = self._replicas[work.replica]
        del replica.work[work.request.request_id]
        if replica.by_handle.get(work.handle) is work:  # the handle of a refused one may have another owner already
            del replica.by_handle[work.handle]
        self._routing.withdrawn(work.routed, work.replica, generation=work.generation)
        work.replica = work.handle = -1

    def _use(self, index: int, call: Callable[[RemoteEngineClient], object], *, touches: bool = True) -> None:
        """Use a replica's client, if there is one; that it has ended is dealt with."""
        replica = self._replicas[index]
        if replica.client is None:
            return
        if touches:
            self._touched.add(index)
        try:
            call(replica.client)
        except EngineEndedError as error:
            self._lose(replica, str(error))

    # --------------------------------------------------------------------------------------- replicas that end

    def _lose(self, replica: _Replica, reason: str) -> None:
        """Deal with a replica that has ended: its outputs are taken, its requests go to others, and it is started again."""
        if replica.client is None:
            return
        replica.reason = reason
        logger.error("Replica %d has ended: %s", replica.index, reason)
        if len(self._live) == 1:
            self._failure = f"no replica is left; the last one: {reason}"
            self._over.wake()
        self._part(replica, replica.restarts.delay_s)
        ended = []
        for work in list(replica.work.values()):
            if work.ending is not None and isinstance(work.request, Request):
                ended.append(self._ended_here(work, work.request, work.ending))
            elif not self._failure:
                replica.num_moved += 1
                work.target = -1
                self._leave(work)
                self._unplaced.append(work)
        if ended:
            self._outputs.append(StepOutputs(finished=tuple(ended)))
        self._move()

    def _part(self, replica: _Replica, delays_s: Callable[[], float | None]) -> None:
        """Take the last outputs of a replica, and have it started again."""
        client = replica.client
        assert client is not None, "only called for a replica that there is"
        while client.has_outputs:
            self._outputs.append(self._translated(replica, client.step()))
        self._messages.ignore(client.socket_file)
        self._ends.ignore(client.end_file)
        replica.client, replica.is_draining = None, False
        self._pages.drop(replica.index)
        self._routing.removed(replica.index)
        for gathering in list(self._gatherings):
            gathering.done(replica.index)
        if self._failure:
            client.close()
        else:
            self._starter.start(replica.index, client, delays_s=delays_s)

    def _ended_here(self, work: _Work, request: Request, reason: FinishReason) -> FinishedSequence:
        """Return the end of a request that was asked to end, since its replica will not say it."""
        self._forget(work)
        return FinishedSequence(
            request_id=request.request_id,
            slot=work.slot,
            token_ids=np.array(work.tokens, np.int32),
            finish_reason=reason,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def _move(self) -> None:
        """Give requests that have left their replica to others, which may end meanwhile."""
        if self._is_moving:
            return
        self._is_moving = True
        try:
            while self._unplaced and not self._failure:
                work = self._unplaced.popleft()
                try:
                    self._place(work)
                except RequestError as error:
                    self._forget(work)
                    self._outputs.append(StepOutputs(refused=((work.request.request_id, error),)))
                except EngineEndedError:
                    break  # all replicas have ended
        finally:
            self._is_moving = False

    def _join(self, replica: _Replica, client: RemoteEngineClient) -> None:
        """Let a replica that is ready take requests."""
        replica.client = client
        client.on_load = functools.partial(self._routing.loaded, replica.index)
        client.on_stayed = self._stayed
        self._messages.watch(client.socket_file)
        self._ends.watch(client.end_file)
        self._touched.add(replica.index)
        self._routing.added(replica.index, client)

    def _rejoin(self, replica: _Replica, client: RemoteEngineClient) -> None:
        """Let a replica that was started again take requests, after the changes that were made meanwhile and before."""
        replica.num_restarts += 1
        self._join(replica, client)
        logger.warning("Replica %d serves again.", replica.index)
        for name, arguments in self._changes:
            refused = functools.partial(_log_refusal, replica.index)
            self._use(replica.index, lambda one, a=name, b=arguments, c=refused: one.control(a, b, c))  # type: ignore[misc]

    def _finish_drains(self) -> None:
        """Start replicas again that are to be and have nothing left."""
        for replica, client in self._live:
            if replica.is_draining and not replica.work and not client.has_outputs:
                logger.info("Replica %d is drained, and started again.", replica.index)
                self._part(replica, _Delays())

    # -------------------------------------------------------------------------------------- control and metrics

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Request the metrics of all replicas; samples are labelled with the replica's number."""
        self._check_open()
        asked = {replica.index for replica, _ in self._live if self._pages.begin(replica.index)}
        gathering = self._gather(asked, lambda: callback(self._pages.merged(self._own_page())))

        def put(index: int, page: str) -> None:
            self._pages.put(index, page)
            gathering.done(index)

        for index in sorted(asked):
            answer = functools.partial(put, index)
            self._use(index, lambda client, answer=answer: client.request_metrics(answer))  # type: ignore[misc]

    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Send a control request to all replicas, and answer with what they say together.

        Some are answered here: ``replicas``, the state of each; ``restart_replica``, which starts ``replica`` again when its requests
        have ended, while others take the new ones; ``route``, which replica would take ``prompt_token_ids`` now.
        """
        self._check_open()
        answered_here: dict[str, Callable[..., dict[str, Any]]] = {
            "replicas": self._replicas_table,
            "restart_replica": self._restart_replica,
            "route": self._route,
        }
        own = answered_here.get(name)
        if own is not None:
            try:
                callback(own(**arguments))
            except TrencadisError as error:
                callback(error)
            return
        answers: dict[int, dict[str, Any] | TrencadisError] = {}
        asked = {replica.index for replica, client in self._live if not client.stalled}
        gathering = self._gather(asked, lambda: callback(self._answered(name, arguments, answers)))

        def put(index: int, answer: dict[str, Any] | TrencadisError) -> None:
            answers[index] = answer
            gathering.done(index)

        for index in sorted(asked):
            told = functools.partial(put, index)
            self._use(index, lambda client, told=told: client.control(name, arguments, told))  # type: ignore[misc]

    def _gather(self, asked: set[int], finish: Callable[[], None]) -> Gathering:
        self._gatherings = [one for one in self._gatherings if not one.is_done]
        gathering = Gathering(asked, finish)
        self._gatherings.append(gathering)
        return gathering

    def _answered(
        self, name: str, arguments: Mapping[str, Any], answers: Mapping[int, dict[str, Any] | TrencadisError]
    ) -> dict[str, Any] | TrencadisError:
        answer = gather_answers(name, answers)
        if isinstance(answer, dict):
            self.plan_hash = answer.get("plan_hash", self.plan_hash)
            if name in ("set_scheduling", "set_role"):
                # Of roles the last one counts; changes of scheduling build on each other.
                kept = self._changes if name == "set_scheduling" else [one for one in self._changes if one[0] != name]
                self._changes = [*kept, (name, dict(arguments))]
        return answer

    def _replicas_table(self) -> dict[str, Any]:
        loads = self._routing.describe()
        rows = [
            {
                "replica": one.index,
                "state": one.state,
                "num_live": len(one.work),
                "num_placed": one.num_placed,
                "num_moved": one.num_moved,
                "num_rebalanced": one.num_rebalanced,
                "num_restarts": one.num_restarts,
                "reason": one.reason,
                **loads[one.index],
            }
            for one in self._replicas
        ]
        return {"router": self._routing.label, "replicas": rows}

    def _restart_replica(self, *, replica: Any) -> dict[str, Any]:
        if type(replica) is not int or not 0 <= replica < len(self._replicas):
            raise InvalidRequestError(
                f"there is no replica {shown(replica)}; there are 0 to {len(self._replicas) - 1}.", field="replica"
            )
        found = self._replicas[replica]
        if found.client is None:
            raise InvalidRequestError(f"replica {replica} is down: {found.reason}", field="replica")
        if not [one for one in self._replicas if one.state == "ready" and one is not found]:
            raise InvalidRequestError(
                f"replica {replica} is the only one that serves.",
                hint="Restart it when another one does.",
                field="replica",
            )
        found.is_draining = True
        self._routing.draining(replica)
        self._finish_drains()
        return self._replicas_table()

    def _route(
        self, *, prompt_token_ids: Iterable[int], cache_salt: str | None = None, tenant: str = ""
    ) -> dict[str, Any]:
        request = Request(
            request_id="route",
            prompt_token_ids=tuple(prompt_token_ids),
            tenant=tenant,
            cache_salt=tenant if cache_salt is None else cache_salt,
        )
        if not request.prompt_token_ids:
            raise InvalidRequestError("an empty prompt goes to no replica.", hint="Give at least one token.")
        return self._routing.peek(self._routing.facts(request))

    def _own_page(self) -> str:
        num_refused = 0 if self._mover is None else self._mover.num_refused
        return replicas_page(
            self._replicas_table()["replicas"],
            num_quarantined=self._routing.num_quarantined,
            num_refused_moves=num_refused,
        )

    # ------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close all replicas, and what is being started."""
        if self._is_closed:
            return
        self._is_closed = True
        self._failure = self._failure or "the engine was closed."
        self._starter.close()
        for _, client in self._live:
            client.close()
        for one in (self._all, self._ends, self._messages, self._wake_up, self._over):
            one.close()


class _Delays:
    """Of a restart that an operator asked for: none, and some between further tries, should it fail."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self) -> float | None:
        delay_s, self._next_s = self._next_s, 30.0
        return delay_s


class _Selector:
    """Watches files; its own file is readable while one of them is."""

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()

    def fileno(self) -> int:
        return int(self._selector.fileno())

    def watch(self, file: int) -> None:
        self._selector.register(file, selectors.EVENT_READ)

    def ignore(self, file: int) -> None:
        self._selector.unregister(file)

    def readable(self, timeout_s: float | None = 0.0) -> set[int]:
        return {key.fd for key, _ in self._selector.select(timeout_s)}

    def close(self) -> None:
        self._selector.close()


def _log_refusal(index: int, answer: dict[str, Any] | TrencadisError) -> None:
    if isinstance(answer, TrencadisError):
        logger.error("Replica %d, which was started again, refuses a change that was made before: %s", index, answer)
