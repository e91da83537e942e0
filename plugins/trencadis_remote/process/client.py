"""Engine client for an engine in a worker process: requests are sent at once, answers come with later steps."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from trencadis.api import check_request, dump_options
from trencadis.client.engine_client import NO_OUTPUTS, EngineClient, StepOutputs
from trencadis.errors import InvalidRequestError, TrencadisError
from trencadis.records import EmbeddingRequest, EngineLoad, FinishedSequence, Request
from trencadis.records.plain import check_plain
from trencadis_remote.process.messages import (
    AddMessage,
    AnswerMessage,
    ControlMessage,
    DropMessage,
    EmbedMessage,
    EndMessage,
    FailedMessage,
    GetMetricsMessage,
    LoadMessage,
    MetricsMessage,
    ReadyMessage,
    StayedMessage,
    WithdrawMessage,
    WorkerMessage,
)
from trencadis_remote.process.transport import Transport
from trencadis_remote.process.wire import encode

__all__ = ["PolledEngineClient", "RemoteEngineClient", "RequestHandles"]


class PolledEngineClient(EngineClient):
    """An engine client whose messages an event loop waits for: it watches two files and calls :meth:`receive`."""

    @property
    @abstractmethod
    def socket_file(self) -> int:
        """Readable while :meth:`receive` has something to do."""

    @property
    @abstractmethod
    def end_file(self) -> int:
        """Becomes readable when an engine's process has ended; call :meth:`receive_last`."""

    @property
    @abstractmethod
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well. From any thread."""

    @property
    @abstractmethod
    def has_outputs(self) -> bool:
        """True if :meth:`step` would not wait."""

    @property
    @abstractmethod
    def has_rest(self) -> bool:
        """True if messages are here that :attr:`socket_file` does not show: call :meth:`receive`."""

    @abstractmethod
    def receive(self) -> bool:
        """Receive without waiting; True if :meth:`step` would not wait.

        Raises:
            EngineEndedError: The engine failed.
        """

    @abstractmethod
    def receive_last(self) -> None:
        """Receive the last messages of a process that has ended.

        Raises:
            EngineEndedError: There are no more, and no process is left.
        """


class RemoteEngineClient(PolledEngineClient):
    """Sends requests to a worker process and keeps those that are live; the worker alone decides when one has ended.

    Its slots are *request handles*, small numbers shared with the worker; one is used again after the end of its request has come.

    Args:
        transport: To the worker; closed with the client.
        ready: The worker's first message.

    Attributes:
        hashing: Hashing of the engine, if it sends its load; see ``ReadyMessage``.
        on_load: Called with each load that the engine sends.
        on_stayed: Called with the id of each request that was to be withdrawn and cannot go on elsewhere.
    """

    is_stalled = False  # waiting for a message costs nothing

    def __init__(self, transport: Transport, ready: ReadyMessage) -> None:
        self.model = ready.model
        self.max_model_len = ready.max_model_len
        self.plan_hash = ready.plan_hash
        self.hashing = ready.hashing
        self.on_load: Callable[[EngineLoad], None] = lambda _: None
        self.on_stayed: Callable[[str], None] = lambda _: None
        self._transport = transport
        self._handles = RequestHandles()
        self._handle_of: dict[str, int] = {}
        self._ending: set[int] = set()
        self._embedding: set[str] = set()
        self._outputs: deque[StepOutputs] = deque()
        self._metrics_callbacks: deque[Callable[[str], None]] = deque()
        self._control_callbacks: deque[Callable[[dict[str, Any] | TrencadisError], None]] = deque()

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Send a request; the engine may refuse it later."""
        self._check_id(request.request_id)
        if self.model.generates:
            check_request(
                request,
                vocab_size=self.model.vocab_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self.model.eos_token_ids,
            )
        handle = self._handles.take()
        self._handle_of[request.request_id] = handle
        try:
            data = msgspec.Raw(encode(request))
            self._transport.send(AddMessage(handle=handle, request_id=request.request_id, request=data))
        except InvalidRequestError:  # it cannot be encoded: nothing was sent
            self._forget(request.request_id)
            raise
        return handle

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step. A text that waits to be embedded is dropped at once."""
        if request_id in self._embedding and not self._transport.failure:
            self._embedding.discard(request_id)
            self._transport.send(DropMessage(request_id=request_id))
        else:
            self._end(request_id, is_complete=False)
        return None

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request; the end comes with a later step."""
        self._end(request_id, is_complete=True)
        return None

    def withdraw(self, request_id: str) -> None:
        """Take a request back that is to go on elsewhere: its end comes with ``FinishReason.MOVED``, or :attr:`on_stayed` is called."""
        handle = self._handle_of.get(request_id)
        if handle is not None and handle not in self._ending and not self._transport.failure:
            self._transport.send(WithdrawMessage(handle=handle))

    def embed(self, request: EmbeddingRequest) -> None:
        """Send a text; the engine may refuse it later."""
        self._check_id(request.request_id)
        tokens = request.token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.model.vocab_size:
            raise InvalidRequestError(
                f"request {request.request_id!r}: a token id is outside the vocabulary, 0 to {self.model.vocab_size - 1}.",
                hint="Use the model's own tokenizer.",
            )
        self._transport.send(EmbedMessage(request=request))
        self._embedding.add(request.request_id)

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Send a request; the answer comes between two steps of the engine."""
        self._transport.check()
        self._metrics_callbacks.append(callback)
        self._transport.send(GetMetricsMessage())

    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Send a request; the answer comes between two steps of the engine."""
        self._transport.check()
        try:
            plain = dump_options(arguments)
        except RecursionError:
            raise InvalidRequestError(f"{name}: an argument is nested too deeply.") from None
        for argument, value in plain.items():
            check_plain(value, argument)
        self._transport.send(ControlMessage(name=name, arguments=plain))
        self._control_callbacks.append(callback)

    # --------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True while outputs are expected, or were received and not taken."""
        return bool(self._outputs or self._handle_of or self._embedding)

    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        """Return the outputs of the oldest received step; waits if there is none."""
        if not self._outputs:
            self._handle(self._transport.wait(timeout_s))
        if not self._outputs:
            return NO_OUTPUTS
        outputs = self._outputs.popleft()
        for finished in outputs.finished:
            self._forget(finished.request_id)
        for embedding in outputs.embeddings:
            self._embedding.discard(embedding.request_id)
        return self._known(outputs) if outputs.refused else outputs

    def receive(self) -> bool:
        """Receive without waiting; True if :meth:`step` would not wait.

        Raises:
            EngineEndedError: The engine failed.
        """
        self._handle(self._transport.receive())
        return self.has_outputs

    @property
    def has_rest(self) -> bool:
        """True if messages are here that :attr:`socket_file` does not show: call :meth:`receive`."""
        return self._transport.has_rest

    @property
    def has_outputs(self) -> bool:
        """True if :meth:`step` would not wait."""
        return bool(self._outputs)

    def receive_last(self) -> None:
        """Receive the last messages of a process that has ended.

        Raises:
            EngineEndedError: There are no more.
        """
        self._handle(self._transport.receive_last())

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well. From any thread."""
        return self._transport.stalled

    @property
    def socket_file(self) -> int:
        """Readable while :meth:`receive` has something to do."""
        return self._transport.socket_file

    @property
    def end_file(self) -> int:
        """Becomes and stays readable when the engine's process has ended."""
        return self._transport.end_file

    def rest(self, timeout_s: float | None = None) -> None:
        """Wait for messages."""
        self._handle(self._transport.wait(timeout_s))

    def interrupt(self) -> None:
        """End :meth:`rest`, or :meth:`step` where it waits."""
        self._transport.interrupt()

    def close(self) -> None:
        """Close the worker process."""
        self._transport.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _check_id(self, request_id: str) -> None:
        self._transport.check()
        if request_id in self._handle_of or request_id in self._embedding:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")

    def _end(self, request_id: str, *, is_complete: bool) -> None:
        handle = self._handle_of.get(request_id)
        if handle is None or handle in self._ending or self._transport.failure:
            return
        self._ending.add(handle)
        self._transport.send(EndMessage(handle=handle, is_complete=is_complete))

    def _handle(self, messages: Iterable[WorkerMessage]) -> None:
        for message in messages:
            match message:
                case StepOutputs():
                    self._outputs.append(message)
                case StayedMessage(request_id=request_id):
                    self.on_stayed(request_id)
                case MetricsMessage(text=text):
                    self._metrics_callbacks.popleft()(text)
                case AnswerMessage(table=table, error=error):
                    self.plan_hash = table.get("plan_hash", self.plan_hash)
                    self._control_callbacks.popleft()(table if error is None else error)
                case LoadMessage(load=load):
                    self.on_load(load)
                case FailedMessage(error=error):
                    self._transport.fail(f"the engine failed: {error}")

    def _known(self, outputs: StepOutputs) -> StepOutputs:
        """Forget what was refused, and return the outputs without refusals of texts that were dropped meanwhile."""
        known = tuple([one for one in outputs.refused if one[0] in self._handle_of or one[0] in self._embedding])
        for request_id, _ in known:
            self._embedding.discard(request_id)
            if request_id in self._handle_of:
                self._forget(request_id)
        return msgspec.structs.replace(outputs, refused=known)

    def _forget(self, request_id: str) -> None:
        handle = self._handle_of.pop(request_id)
        self._ending.discard(handle)
        self._handles.give_back(handle)


class RequestHandles:
    """Free list of small numbers; gives the smallest free one, so that arrays over handles stay small."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_made = 0

    @property
    def num_taken(self) -> int:
        """RequestHandles that are not back."""
        return self._num_made - len(self._free)

    def take(self) -> int:
        """Return a free handle; O(log)."""
        if self._free:
            return heapq.heappop(self._free)
        self._num_made += 1
        return self._num_made - 1

    def give_back(self, handle: int) -> None:
        """Take a handle back; O(log)."""
        heapq.heappush(self._free, handle)
