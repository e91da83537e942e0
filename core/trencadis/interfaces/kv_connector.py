"""Contract of the noun ``kv_connector``: KV blocks in and out of this engine.

The scheduler side decides on the engine thread, the worker side moves bytes next to the device. They exchange one bytes message per step
and the worker's report. A connector may be slow, wrong or dead; the only allowed effects are a cache miss and a counter. A sequence whose
KV is loaded waits: its blocks are allocated but neither shared nor hashed until the report says that they are verified. A failed load
is recomputed from the last valid token.

    lookup ─ Miss ▶ computed here
           ├ Pending ▶ asked again next step
           ├ Hit(transfer_id, num_tokens) ▶ on_unused ▶ computed here, or lookup again
           └ Hit(transfer_id, num_tokens) ▶ on_allocated ▶ waits ─ loaded ▶ runs
                                                                 └ failed ▶ on_failed ▶ runs, recomputes; or lookup again
    finish ─ on_finished ─ None ▶ blocks freed
                         └ transfer id ▶ blocks pinned until released

:class:`KVSchedulerSide` is all that a connector to a store needs. What few connectors need stands beside it, as capabilities: a scheduler
side that inherits one of them is asked for it, others are not. The engine looks once, when it is composed.

    SupportsHandover        prefill here, decode elsewhere: parameters that travel with the request
    SupportsRemotePrefill   requests of other engines, run here for them
    SupportsLayerwise       a step waits for its loads layer by layer
    SupportsStepTimes       what computing takes here, to compare a load with
    SupportsMetrics         counters of the connector
    SupportsRemoteWorkers   worker sides in other processes than the scheduler side, one for each rank

A hit may come with the first token after the prompt, chosen where the prompt was computed. The engine validates it, streams it at once, and
continues after it when the load has ended, either way:

    Hit(transfer_id, first_token) ▶ taken ▶ on_allocated ▶ waits ─ loaded, or failed ▶ runs
                                          └ its last ▶ on_unused, on_abandoned

With a layer-wise load the sequence does not wait: it runs at once, and each layer of that step waits until the load has brought it. The
step counts if its report says ``loaded``; else its tokens are discarded and the sequence is computed again.

    Hit(transfer_id, layerwise) ▶ on_allocated ▶ on_layerwise ▶ runs: wait_layer(0) … wait_layer(n) ─ loaded ▶ continues
                                                                                                    └ else ▶ discarded
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.kv_pool import KVPool
from trencadis.interfaces.laws import Law, all_of, law, of_type, one_of_words, tell, tell_always
from trencadis.interfaces.sampling_fingerprint import SamplingFingerprint
from trencadis.records import ConnectorReport, FailedLoad, FirstToken, KVLayout, Request
from trencadis.records.request import transfer_table

__all__ = [
    "INTERFACE_VERSION",
    "STABILITY",
    "ConnectorPair",
    "KVSchedulerSide",
    "KVWorkerSide",
    "Lookup",
    "SupportsHandover",
    "SupportsLayerwise",
    "SupportsMetrics",
    "SupportsRemotePrefill",
    "SupportsRemoteScheduler",
    "SupportsRemoteWorkers",
    "SupportsStepTimes",
]

INTERFACE_VERSION = 1
STABILITY = "provisional"


@attrs.frozen(kw_only=True)
class Lookup:
    """The answer to a look-up.

    Attributes:
        num_tokens: Leading tokens, a multiple of the block size, whose KV can be loaded; 0 is a miss.
        transfer_id: Names the load in all later calls, the next of which is ``on_allocated`` or ``on_unused``; unique for the life of the
            engine.
        pending: Ask again at the next step; ``num_tokens`` means nothing yet. After ``cache.lookup_timeout_s`` the prompt is computed, and
            ``on_abandoned`` says so.
        timeout_s: Longest that the load may take, seconds; it is given up then, or at ``cache.load_timeout_s`` if that is sooner.
        approximate: Whether the loaded KV is near to what computing would give, not equal: for requests that asked for it. The blocks
            that ``on_allocated`` hands over then begin with the local hit, which is only read. While a sequence reads such
            blocks, nothing of it is shared, offered by ``on_computed`` or pinned by ``on_finished``; its answer says so.
        layerwise: The sequence need not wait for the load: the worker side brings it layer by layer, and ``wait_layer`` knows how far it
            is. Needs :class:`SupportsLayerwise`. A wish: where backend or engine cannot, and for a sequence one of whose loads has failed,
            the sequence waits.
        first_token: The token after the prompt, chosen by another engine with this engine's sampling fingerprint (``on_sampling``); None: it is chosen here. The
            engine validates it, takes it once, and streams it at once, whether or not the load arrives; the sequence waits then.
        num_cached_tokens: Leading tokens of the prompt that were cached before this request, where its prefix was computed; more are not counted as
            cache hits, though they are loaded. None: all of them were, as in a store.
    """

    num_tokens: int = 0
    transfer_id: int = -1
    pending: bool = False
    timeout_s: float = math.inf
    approximate: bool = False
    layerwise: bool = False
    first_token: FirstToken | None = None
    num_cached_tokens: int | None = None


def _lookup(_: str, found: Any) -> Any:
    if not _are_whole(found.num_tokens, found.transfer_id) or found.num_tokens < 0:
        raise ContractError(f"lookup gave {shown(found)}, whose num_tokens and transfer id must be whole numbers.")
    num_cached = found.num_cached_tokens
    if num_cached is not None and (not _are_whole(num_cached) or num_cached < 0):
        raise ContractError(f"lookup gave num_cached_tokens = {shown(num_cached)}, which is no number of tokens.")
    if not isinstance(found.timeout_s, int | float) or math.isnan(found.timeout_s):
        raise ContractError(f"lookup gave timeout_s = {shown(found.timeout_s)}, which is no time.")
    if not isinstance(found.first_token, FirstToken | None):
        raise ContractError(f"lookup gave {shown(found.first_token)}, which is no FirstToken.")
    return found


def _report(_: str, report: Any) -> Any:
    if not isinstance(report, ConnectorReport) or not all(isinstance(failed, FailedLoad) for failed in report.failed):
        raise ContractError(f"it returned {shown(report)}, where ConnectorReport is expected")
    numbers = [number for failed in report.failed for number in (failed.transfer_id, failed.num_valid_tokens)]
    if not _are_whole(*report.loaded, *report.released, *numbers):
        raise ContractError(f"it returned {shown(report)}, whose transfer ids and tokens must be whole numbers")
    if not all(isinstance(message, bytes) for message in report.messages):
        raise ContractError(f"it returned {shown(report)}, whose messages must be bytes")
    return report


def _are_whole(*numbers: object) -> bool:
    return all(isinstance(number, int | np.integer) for number in numbers)


class KVSchedulerSide(ABC):
    """Decides what is loaded and saved. Engine thread; every call returns within 1 ms and never waits for I/O.

    One that takes longer than ``[budget] kv_connector_ms`` three times within a minute, or once ten times as long, is switched off for a while as
    one that raises is. ``on_ready`` may take its time.
    """

    def on_ready(self, layout: KVLayout) -> None:
        """Called once, before anything else, with the layout of a block; the only call that may wait.

        Raises:
            ConfigValueError: A resource that the config names cannot be used, and must be.
        """
        return

    @abstractmethod
    @law(Law("a miss, a wait, or whole blocks beyond the local hit", _lookup), otherwise=Lookup())
    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Return what can be loaded beyond the local prefix hit.

        Args:
            request: Whose prompt; as it came, so that another engine may add its own tenant's entry.
            block_hashes: Chained hashes of its full blocks, in order; the identity of their content.
            num_local_tokens: Tokens the local prefix cache has already.
        """

    @abstractmethod
    @tell
    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Begin a load into these blocks: those after the local hit, in order, with their hashes."""

    @tell_always
    def on_unused(self, transfer_id: int) -> None:
        """Called instead of ``on_allocated`` for a hit that has no more than the local one, or that there is no room for now.

        The transfer id can be forgotten; no report names it. The request may be looked up again, and then gets a new transfer id; ``on_finished`` or
        :meth:`SupportsHandover.on_abandoned` says that it will not be.
        """
        return

    @abstractmethod
    @tell
    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Called with full blocks whose committed content may be saved. They may be reused any time after this step."""

    @abstractmethod
    @law(of_type(int | None))
    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Return a transfer id that pins the blocks of a finished sequence until it is released, or None to free them."""

    @abstractmethod
    @tell_always
    def on_cancelled(self, transfer_id: int) -> None:
        """Called when a load is no longer wanted; its blocks stay pinned until the transfer id is released."""

    @law(one_of_words("compute", "retry"), otherwise="compute")
    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        """Return what to do with a sequence whose load was reported as failed.

        Args:
            request: Whose prompt.
            failed: The load, as it stands in the report.

        Returns:
            ``compute``: the rest is computed here. ``retry``: it is looked up again, at most three times a sequence.
        """
        return "compute"

    @abstractmethod
    @law(of_type(bytes), otherwise=b"", always=True)
    def take_message(self) -> bytes:
        """Return and forget what the worker side is to do with the next step; empty for nothing."""

    @abstractmethod
    @tell_always
    def on_report(self, report: ConnectorReport) -> None:
        """Take the worker sides' merged report; once per step that has one.

        A transfer id stands in it once every rank has reported it: as loaded if all have loaded their share, as failed with the least that
        arrived anywhere, as released if none touches its blocks any more.
        """

    def close(self) -> None:
        """Stop this side's own threads; called before the worker side's ``close``. May be called twice."""
        return


class SupportsHandover(ABC):  # noqa: B024 - every method has a default
    """Capability: a request that ends here continues in another engine, or began in one. Engine thread.

    Such requests carry transfer parameters, which an HTTP client sends and gets as ``kv_transfer_params``.
    """

    @law(Law("a table of JSON values, or None", lambda _, answer: transfer_table(answer)))
    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return the transfer parameters for the engine that continues a request; None for none.

        Called right after ``on_finished`` of the same request. JSON values.
        """
        return None

    @tell  # noqa: B027 - optional
    def on_cache_hit(self, request: Request, *, num_tokens: int) -> None:
        """Called right before ``on_finished`` with the number of prompt tokens that were cached when a request first ran; 0 too."""

    @tell  # noqa: B027 - optional
    def on_rejected(self, transfer_params: Mapping[str, Any]) -> None:
        """Called when a request with transfer parameters is not served: refused, or given up before it was looked up.

        The engine that holds its KV need not. The parameters are a client's, and may be anything.
        """

    @tell_always  # noqa: B027 - optional
    def on_abandoned(self, request: Request) -> None:
        """Called when a request was given up, or has ended, whose look-up had not led to a load: it is not looked up again."""

    @tell  # noqa: B027 - optional
    def on_role(self, role: str) -> None:
        """Called with the engine's role, ``both``, ``prefill`` or ``decode``: once after ``on_ready``, and when it changes."""


class SupportsRemotePrefill(ABC):
    """Capability: requests that the connector receives from other engines run here. Engine thread, where nothing else is said.

    on_waker ─▶ wake() ─▶ take_requests ─▶ admitted like those of clients ─▶ on_request_token ─▶ on_request_ended
                        └ take_withdrawn ─▶ aborted ───────────────────────────────────────────▶┘
    """

    @abstractmethod
    @tell
    def on_waker(self, wake: Callable[[], None]) -> None:
        """Called once with a function to call, from any thread, when the next two methods have something to return.

        They are not called before the first wake-up; requests that came before this call are to be announced at once.
        """

    @abstractmethod
    @law(all_of(Request), otherwise=())
    def take_requests(self) -> Sequence[Request]:
        """Return and forget requests that the engine is to run; before the next step after a wake-up.

        They are admitted like those of clients; clients get none of their output. Their ids must be unique.
        """

    @law(all_of(str), otherwise=())
    def take_withdrawn(self) -> Sequence[str]:
        """Return and forget the ids of such requests that are no longer wanted; right after ``take_requests``."""
        return ()

    @tell  # noqa: B027 - optional
    def on_request_token(self, request_id: str, first: FirstToken) -> None:
        """Called with the first token of such a request, before ``on_request_ended``; once, as soon as it is known."""

    @abstractmethod
    @tell_always
    def on_request_ended(self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Called when such a request has ended.

        Args:
            request_id: Id of the request.
            transfer_params: Parameters that ``finished_params`` returned; None if it was not finished.
            error: Why it was not: refused, failed or withdrawn; empty if it was.
        """

    @tell  # noqa: B027 - optional
    def on_backlog(self, num_tokens: int) -> None:
        """Called with the number of queued tokens, of all requests, when it changes; at most twice a step, before planning and after.

        What runs is not counted any more, and neither are requests that :meth:`take_requests` has not returned yet.
        """

    def on_sampling(self, fingerprint: SamplingFingerprint) -> None:  # noqa: B027 - optional
        """Called once, right after ``on_ready``, with what can tell another engine how a first token is chosen here."""


class SupportsLayerwise(ABC):
    """Capability: the worker side can bring a load layer by layer, while the step that reads it runs. Engine thread."""

    @abstractmethod
    @tell
    def on_layerwise(self, transfer_id: int) -> None:
        """Called right after ``on_allocated`` if the sequence runs with the next step, whose layers wait for this load.

        Only for look-ups that said ``layerwise``. A load without this call is an ordinary one: no step may wait for it.
        """


class SupportsStepTimes(ABC):
    """Capability: loads are compared with what computing takes here. Engine thread."""

    @abstractmethod
    @tell
    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Called after each step with the number of tokens that it computed, and in how many seconds."""


class SupportsMetrics(ABC):
    """Capability: the connector counts."""

    @abstractmethod
    def metrics(self) -> str:
        """Return what is counted, in Prometheus' text format, names that begin with ``trencadis_kv_``. From any thread."""


class SupportsRemoteWorkers(ABC):
    """Capability: the worker sides are in other processes, made there by the same factory from the same config. Engine thread.

    A component whose connectors have it provides ``kv_connector.ranks``; others are refused with ranks in processes. The pair that a rank
    makes is asked for its worker side only, which has :class:`SupportsRemoteScheduler`.
    """

    @abstractmethod
    def on_ranks(self, layouts: Sequence[KVLayout]) -> None:
        """Called once, before ``on_ready``, with what each rank holds of a block.

        Args:
            layouts: By rank. Ranks may hold the same heads.

        Raises:
            ConfigValueError: The config does not go with these layouts.
        """

    @abstractmethod
    @tell_always
    def on_worker_message(self, rank: int, message: bytes) -> None:
        """Take what a rank's worker side sent with its report, before ``on_report``; once each, in their order."""


class SupportsRemoteScheduler(ABC):
    """Capability of a worker side: its scheduler side is in another process, which it tells things with ``ConnectorReport.messages``."""

    @abstractmethod
    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Called once, right after ``register``, if it is so. On the backend's thread.

        Args:
            layouts: By rank, as the scheduler side gets them.
            rank: Whose worker side this is.

        Raises:
            ConfigValueError: The config does not go with these layouts.
        """


class KVWorkerSide(ABC):
    """Moves bytes. One per rank, on the backend's thread; transfers run on threads of its own."""

    @abstractmethod
    def register(self, kv_cache: KVPool) -> None:
        """Take the device's KV cache; a backend's own object may show more, as its documentation describes."""

    @tell
    def expect_layers(self) -> None:
        """Called right before ``begin_step`` if blocks to be saved may be copied out while the step is computed.

        If :attr:`wants_layers` is True then, ``wait_layer`` is called before each layer is written to, and no block is written to before.
        In a step without this call, blocks are copied out in ``begin_step``. A step that fails may not come to every layer: a layer that
        was not asked for may hold another sequence's KV by ``end_step``, and is not to be saved.
        """
        return

    @abstractmethod
    @tell
    def begin_step(self, message: bytes) -> None:
        """Start what the scheduler side asked for; does not wait."""

    @property
    def wants_layers(self) -> bool:
        """True if ``wait_layer`` is to be called in the step that was begun last; asked once a step."""
        return False

    @law(otherwise=False, waits=True)
    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Wait until a layer of the step's layer-wise loads is verified and in their blocks, and that of blocks to be saved is copied.

        Called before the layer is written to and attention reads it, in every pass of the step. A load that has not brought it in time, or never will, is
        given up: it is not reported as loaded, whatever comes later.

        Args:
            layer: Number of the layer; see ``KVPart.layer``.
            budget_s: The longest wait for loads, real time; what is left of that for the whole step.

        Returns:
            False if any load was given up for this layer.
        """
        return True

    @abstractmethod
    @tell
    def end_step(self) -> None:
        """Secure blocks to be saved before the next step may overwrite them; does not wait for a network."""

    @abstractmethod
    @law(Law("a report of whole numbers", _report), otherwise=ConnectorReport())
    def poll(self) -> ConnectorReport:
        """Return what finished on this rank since the last call; does not wait.

        The end of a load, and the release that follows ``on_cancelled`` or ``on_finished``, is reported once; what is reported again, or
        of a transfer_id that are not awaited, is ignored and counted.

        A layer-wise load all of whose layers ``wait_layer`` vouched for is ``loaded`` in the poll of that very step: one of which that
        poll says nothing is cancelled.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop transfers and give up connections; no block is touched afterwards."""


@attrs.frozen(kw_only=True)
class ConnectorPair:
    """What a kv_connector component's factory returns.

    Attributes:
        scheduler: Used by the engine.
        worker: Handed to the executor.
    """

    scheduler: KVSchedulerSide
    worker: KVWorkerSide
