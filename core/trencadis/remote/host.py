"""The engine's side: takes what the client sends between steps, and sends what each step brought.

    receive ▶ add, end, embed ▶ engine.step ▶ send

Without work it is asleep in the socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.errors import InternalError, InvalidRequestError, RequestError, TrencadisError
from trencadis.records import EmbeddingRequest, FinishedSequence, Int32Array, TokenDeltas
from trencadis.remote.channel import Channel
from trencadis.remote.conversion import fault_of, int32_ids, readable, request_of, step_message
from trencadis.remote.messages import (
    AddMessage,
    AliveMessage,
    AnswerMessage,
    AskMessage,
    AskMetricsMessage,
    ClientMessage,
    CloseMessage,
    DropMessage,
    EmbedMessage,
    EndMessage,
    HostMessage,
    MetricsMessage,
    RefusedMessage,
    WorkMessage,
    decode_client_message,
    encode,
)
from trencadis.remote.waker import Waker

if TYPE_CHECKING:
    from trencadis.engine.embedding_engine import EmbeddingEngine
    from trencadis.engine.engine import Engine

__all__ = ["EngineHost"]

_TRANSFER_POLL_S = 0.001
_HOLD_POLL_S = 0.02
"""Nobody waits: blocks are only held for others, and what comes meanwhile ends the rest."""
_EMPTY = np.empty(0, np.int32)
_NO_NEWS = TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY)


class EngineHost:
    """Serves one client. Used by one thread.

    Args:
        engine: Ready for requests; whoever made it closes it.
        channel: To the client.
        clock: Says when a sign of life is due.
        alive_s: The longest silence while there is work, but for a step that takes longer, seconds.
    """

    def __init__(self, engine: Engine | EmbeddingEngine, channel: Channel, *, clock: Clock, alive_s: float) -> None:
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._alive_s = alive_s
        self._sent_s = clock.now_s()
        self._ticket_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._ticket_of_slot: Int32Array = np.full(256, -1, np.int32)
        self._ended: list[FinishedSequence] = []
        self._is_open = True
        self._has_other_work = False

    @property
    def num_live(self) -> int:
        """Requests that have neither ended nor been refused."""
        return len(self._ticket_of)

    def run(self) -> None:
        """Serve until the client says that it closes.

        Raises:
            InternalError: An invariant of the engine does not hold.
        """
        waker = Waker()
        self._channel.watch(waker.fileno())
        self._engine.wake_by(waker.wake)
        try:
            while self.turn():
                if not self._engine.has_work:
                    self._channel.wait(self._engine.work_ahead())
                    waker.clear()
                elif self._engine.is_stalled:
                    self._channel.wait(_TRANSFER_POLL_S if self._engine.num_waiting else _HOLD_POLL_S)
        finally:
            waker.close()

    def turn(self) -> bool:
        """Carry out what was sent and take one step; does not sleep. False: the client closes."""
        for data in self._channel.receive():
            self._obey(decode_client_message(data))
        if self._is_open and (self._ended or self._engine.has_work):
            self._announce_work()
            self._step()
        self._announce_work()
        return self._is_open

    def _announce_work(self) -> None:
        """Say if there is work that nobody over there asked for: should a step of it hang, that must be noticed, too."""
        has_other_work = self._is_open and not self._ticket_of and self._engine.has_work
        if has_other_work != self._has_other_work:
            self._has_other_work = has_other_work
            self._send(WorkMessage(has_work=has_other_work))

    def _obey(self, message: ClientMessage) -> None:
        match message:
            case AddMessage():
                self._add(message)
            case EndMessage():
                self._end(message)
            case EmbedMessage():
                self._embed(message)
            case DropMessage():
                self._engine.abort(message.request_id)
            case AskMetricsMessage():
                self._send(MetricsMessage(text=readable(self._engine.metrics())))
            case AskMessage():
                self._send_answer(self._answer(message))
            case CloseMessage():
                self._is_open = False

    def _add(self, message: AddMessage) -> None:
        try:
            slot = self._engine.add(request_of(message))
        except RequestError as error:
            self._send(RefusedMessage(request_id=message.request_id, fault=fault_of(error)))
            return
        while slot >= len(self._ticket_of_slot):
            self._ticket_of_slot = np.concatenate([self._ticket_of_slot, np.full_like(self._ticket_of_slot, -1)])
        self._ticket_of_slot[slot] = message.ticket
        self._ticket_of[message.request_id] = message.ticket
        self._id_of[message.ticket] = message.request_id

    def _answer(self, message: AskMessage) -> AnswerMessage:
        try:
            return AnswerMessage(table=self._engine.answer(message.question, message.arguments))
        except TrencadisError as error:
            return AnswerMessage(table={}, fault=fault_of(error))

    def _send_answer(self, answer: AnswerMessage) -> None:
        """Send an answer; one that holds what cannot be encoded becomes an error, since a question must not end the engine."""
        try:
            self._send(answer)
        except InvalidRequestError as error:
            self._send(AnswerMessage(table={}, fault=fault_of(InternalError(f"the answer cannot be sent: {error}"))))

    def _end(self, message: EndMessage) -> None:
        request_id = self._id_of.get(message.ticket)
        if request_id is None:
            return  # it ended while this was under way; the client will hear of that
        finished = self._engine.stop(request_id) if message.is_complete else self._engine.abort(request_id)
        if finished is not None:
            self._ended.append(finished)

    def _embed(self, message: EmbedMessage) -> None:
        try:
            self._engine.embed(EmbeddingRequest(request_id=message.request_id, token_ids=int32_ids(message.token_ids)))
        except RequestError as error:
            self._send(RefusedMessage(request_id=message.request_id, fault=fault_of(error)))

    def _step(self) -> None:
        deltas = self._engine.step() if self._engine.has_work else _NO_NEWS
        if self._ended:
            deltas = attrs.evolve(deltas, finished=(*self._ended, *deltas.finished))
            self._ended = []
        if len(deltas.slots) or deltas.finished or deltas.prompt_logprobs or deltas.embeddings:
            tickets = [self._ticket_of.pop(finished.request_id) for finished in deltas.finished]
            self._send(step_message(deltas, self._ticket_of_slot, tickets))
            for ticket in tickets:
                del self._id_of[ticket]
        elif self._clock.now_s() - self._sent_s >= self._alive_s:
            self._send(AliveMessage())

    def _send(self, message: HostMessage) -> None:
        self._channel.send(encode(message))
        self._sent_s = self._clock.now_s()
