"""A replica in a process of its own, as the set of replicas sees it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import msgspec

from trencadis.client.engine_client import StepOutputs
from trencadis.errors import EngineEndedError
from trencadis.records import EmbeddingRequest, FinishReason, Request
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.replicas.replica_set import Work

__all__ = ["LiveWork", "RemoteReplica"]


@attrs.define(eq=False)
class LiveWork(Work):
    """A request, or a text to embed, of the live client.

    Attributes:
        slot: Slot under which its tokens are reported; -1 for a text.
        handle: Handle under which its replica reports its tokens; -1: it has none.
        ending: Reason why it was asked to end, or None.
        num_cached_tokens: Number of prompt tokens that were cached where it first ran; -1: not known. What it finds elsewhere may be its own.
    """

    slot: int = attrs.field(default=-1, kw_only=True)
    handle: int = attrs.field(default=-1, kw_only=True)
    ending: FinishReason | None = attrs.field(default=None, kw_only=True)
    num_cached_tokens: int = attrs.field(default=-1, kw_only=True)


class RemoteReplica:
    """Sends work to an engine's process, and knows which work its outputs are of.

    Args:
        client: Client of the engine; closed by its owner.
        on_end: Function that is called once, with the reason, when it is noticed that the engine has ended.

    Attributes:
        client: Client of the engine.
        has_ended: Whether it is of no use any more.
    """

    def __init__(self, client: RemoteEngineClient, *, on_end: Callable[[str], None]) -> None:
        self.client = client
        self.has_ended = False
        self._on_end = on_end
        self._by_handle: dict[int, LiveWork] = {}

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well. From any thread."""
        return self.client.stalled

    def send(self, work: LiveWork, request: Request | EmbeddingRequest) -> None:
        """Send a request or a text."""
        if isinstance(request, EmbeddingRequest):
            self.client.embed(request)
        else:
            work.handle = self.client.add(request)
            self._by_handle[work.handle] = work

    def withdraw(self, work: LiveWork) -> None:
        """Ask for a request that is to go on elsewhere."""
        self.use(lambda client: client.withdraw(work.request.request_id))

    def left(self, work: LiveWork) -> None:
        """Forget a request or a text."""
        if self._by_handle.get(work.handle) is work:  # the handle of a refused one may have another owner already
            del self._by_handle[work.handle]
        work.handle = -1

    def use(self, call: Callable[[RemoteEngineClient], object]) -> None:
        """Call the client, which may send; nothing happens if the engine has ended, and if it ends now, its owner is told."""
        if self.has_ended:
            return
        try:
            call(self.client)
        except EngineEndedError as error:
            self._on_end(str(error))

    def take_step(self) -> StepOutputs:
        """Return the outputs of the oldest step with slots of the live client, and remember the tokens; ends are as they came."""
        outputs, by_handle = self.client.step(), self._by_handle
        token_ids, slots, end = outputs.token_ids, [], 0
        for handle, num_tokens in zip(outputs.slots, outputs.num_tokens, strict=True):
            work = by_handle[handle]
            start, end = end, end + num_tokens
            work.tokens += token_ids[start:end]
            slots.append(work.slot)
        prompt_logprobs = [
            msgspec.structs.replace(entry, index=by_handle[entry.index].slot) for entry in outputs.prompt_logprobs
        ]
        return msgspec.structs.replace(outputs, slots=slots, prompt_logprobs=tuple(prompt_logprobs))
