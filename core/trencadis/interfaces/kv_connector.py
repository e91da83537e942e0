"""Contract of the noun ``kv_connector``: KV blocks in and out of this engine.

Two classes for two places: the scheduler side decides on the engine thread, the worker side moves bytes next to the
device. They speak through one bytes message a step, and the worker's report. A connector may be slow, wrong or dead; the only
allowed effects are a cache miss and a counter. A load parks its sequence: blocks are allocated but neither shared nor
hashed until the report says they are verified; a failed load is recomputed from the last valid token.

    lookup ─ Miss ▶ computed here
           ├ Pending ▶ asked again next step
           ├ Hit(ticket, num_tokens) ▶ on_unused ▶ computed here, or lookup again
           └ Hit(ticket, num_tokens) ▶ on_allocated ▶ parked ─ loaded ▶ runs
                                                             └ failed ▶ on_failed ▶ runs, recomputes; or lookup again
    finish ─ on_finished ─ None ▶ blocks freed
                         └ ticket ▶ blocks held until released

A hit may come with the first token behind the prompt, chosen where the prompt was computed. The engine checks it, shows it at once, and
goes on behind it when the load has ended, whichever way:

    Hit(ticket, first_token) ▶ taken ▶ on_allocated ▶ parked ─ loaded, or failed ▶ runs
                                     └ its last ▶ on_unused, on_abandoned

A layer-wise load parks nobody: its sequence runs at once, and each layer of that step waits until the load has brought it. What
it computes counts if the report of that same step says ``loaded``; else it is void, and the sequence is computed anew.

    Hit(ticket, layerwise) ▶ on_allocated ▶ on_layerwise ▶ runs: wait_layer(0) … wait_layer(n) ─ loaded ▶ goes on
                                                                                               └ else ▶ void
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trencadis.interfaces.first_token_terms import FirstTokenTerms
from trencadis.interfaces.kv_pool import KVPool
from trencadis.records import ConnectorReport, FailedLoad, FirstToken, KVLayout, Request

__all__ = ["INTERFACE_VERSION", "ConnectorPair", "KVSchedulerSide", "KVWorkerSide", "Lookup"]

INTERFACE_VERSION = 1


@attrs.frozen(kw_only=True)
class Lookup:
    """The answer to a look-up.

    Attributes:
        num_tokens: Leading tokens, a multiple of the block size, whose KV can be loaded; 0 is a miss.
        ticket: Names the load in all later calls, the next of which is ``on_allocated`` or ``on_unused``; unique for the life of the
            engine.
        pending: Ask again at the next step; ``num_tokens`` means nothing yet. After ``cache.lookup_timeout_s`` the prompt is computed, and
            ``on_abandoned`` says so.
        timeout_s: Longest that the load may take, seconds; it is given up then, or at ``cache.load_timeout_s`` if that is sooner.
        approximate: What is loaded is near to what computing would give, not equal: for requests that asked for it. The blocks
            that ``on_allocated`` hands over then begin with the local hit, which is only read. While a sequence reads such
            blocks, nothing of it is shared, offered by ``on_computed`` or held by ``on_finished``; its answer says so.
        layerwise: The load need not be waited for: the worker side brings it layer by layer, and ``wait_layer`` knows how far it is.
            A wish: where backend or engine cannot, and for a sequence one of whose loads has failed, the sequence is parked.
        first_token: What follows the prompt, chosen elsewhere by this engine's terms (``on_sampling``); None: it is chosen here. The
            engine checks it, takes it once, and shows it at once, whatever becomes of the load; the sequence is parked then.
    """

    num_tokens: int = 0
    ticket: int = -1
    pending: bool = False
    timeout_s: float = math.inf
    approximate: bool = False
    layerwise: bool = False
    first_token: FirstToken | None = None


class KVSchedulerSide(ABC):
    """Decides what is loaded and saved. Engine thread; every call returns within 1 ms and never waits for I/O.

    One that takes longer than ``[budget] kv_connector_ms`` three times within a minute, or once ten times as long, is switched off as
    one that raises is. ``on_ready`` may take its time.
    """

    @abstractmethod
    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Say what can be loaded beyond the local prefix hit.

        Args:
            request: Whose prompt; as it came, so that another engine may add its own tenant's entry.
            block_hashes: Chained hashes of its full blocks, in order; the identity of their content.
            num_local_tokens: Tokens the local prefix cache has already.
        """

    @abstractmethod
    def on_allocated(self, ticket: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Take the blocks to load into: those behind the local hit, in order, with their hashes."""

    def on_layerwise(self, ticket: int) -> None:
        """Be told, right after ``on_allocated``, that the sequence runs with the next step, whose layers wait for this load.

        Told only of look-ups that said ``layerwise``. A load of which it is not told is an ordinary one: no step may wait for it.
        """
        return

    @abstractmethod
    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Be told of full blocks whose committed content may be saved. They may be reused any time after this step."""

    @abstractmethod
    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Return a ticket that holds the blocks of a finished sequence until it is released, or None to free them."""

    def on_unused(self, ticket: int) -> None:
        """Be told that nothing is loaded under the ticket of a hit: it has no more than the local one, or there is no room now.

        What is kept under the ticket can be forgotten; no report names it. The request may be looked up again, and then gets a new
        ticket; ``on_finished`` or ``on_abandoned`` says that it will not be.
        """
        return

    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return what whoever asked for the request is to tell the engine that goes on with it; None for nothing.

        Asked right after ``on_finished`` of the same request. JSON values: they travel in the answer, as ``kv_transfer_params``.
        """
        return None

    def on_rejected(self, transfer_params: Mapping[str, Any]) -> None:
        """Be told that a request with transfer parameters is not served: refused, or given up before anybody looked it up.

        Whoever holds its KV for this engine need not. The parameters are a client's, and may be anything.
        """
        return

    def on_abandoned(self, request: Request) -> None:
        """Be told that a request was given up, or has ended, whose look-up had not led to a load: it is not asked about again."""
        return

    @abstractmethod
    def on_cancelled(self, ticket: int) -> None:
        """Be told that a load is no longer wanted; its blocks stay held until the ticket is released."""

    @abstractmethod
    def take_message(self) -> bytes:
        """Return and forget what the worker side is to do with the next step; empty for nothing."""

    @abstractmethod
    def on_report(self, report: ConnectorReport) -> None:
        """Take the worker sides' merged report; once per step that has one.

        A ticket stands in it once every rank has reported it: as loaded if all have loaded their share, as failed with the least that
        arrived anywhere, as released if none touches its blocks any more.
        """

    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        """Say what becomes of a sequence whose load was reported as failed, with what arrived of it.

        Args:
            request: Whose prompt.
            failed: The load, as it stands in the report.

        Returns:
            ``compute``: the rest is computed here. ``retry``: it is looked up again, at most three times a sequence.
        """
        return "compute"

    def on_ready(self, layout: KVLayout) -> None:
        """Be told what blocks are made of, once, before anything else; the only call that may wait.

        Raises:
            ConfigValueError: What the config names cannot be used, and must be.
        """
        return

    def on_sampling(self, terms: FirstTokenTerms) -> None:
        """Be handed what can tell another engine how a first token is chosen here; once, right after ``on_ready``."""
        return

    def on_role(self, role: str) -> None:
        """Be told the engine's role, ``both``, ``prefill`` or ``decode``: once after ``on_ready``, and when it changes."""
        return

    def on_waker(self, wake: Callable[[], None]) -> None:
        """Be handed what wakes an engine that rests, to be called when :attr:`has_requests` becomes True. Once; from any thread."""
        return

    @property
    def has_requests(self) -> bool:
        """True if ``take_requests`` or ``take_withdrawn`` would return something."""
        return False

    def take_requests(self) -> Sequence[Request]:
        """Return and forget requests that the engine is to run for this connector, such as another engine's prefill.

        Once before each step. They are admitted like those of clients; what they say is nobody's output. Their ids must be unique.
        """
        return ()

    def take_withdrawn(self) -> Sequence[str]:
        """Return and forget the ids of such requests that are not wanted any more; once before each step, after the former."""
        return ()

    def on_request_token(self, request_id: str, first: FirstToken) -> None:
        """Be told the first token of such a request, before ``on_request_ended``; once, as soon as it is known."""
        return

    def on_request_ended(self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Be told that such a request has ended.

        Args:
            request_id: Of the request.
            transfer_params: As ``finished_params`` returned them; None if it was not finished.
            error: Why it was not: refused, failed or withdrawn; empty if it was.
        """
        return

    def on_backlog(self, num_tokens: int) -> None:
        """Be told how much this engine has to do: tokens that wait to be computed, of everybody's requests.

        When that changes; at most twice a step, before it is planned and after it. What runs is not counted any more, and neither are
        requests that :meth:`take_requests` has not returned yet.
        """
        return

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Be told how many tokens a step computed, and in how many seconds: what a load must be quicker than."""
        return

    def metrics(self) -> str:
        """Return what is counted, in Prometheus' text format; empty if nothing. From any thread."""
        return ""

    def close(self) -> None:
        """Stop what runs on threads of this side's own; called before the worker side's ``close``. May be called twice."""
        return


class KVWorkerSide(ABC):
    """Moves bytes. One per rank, on the backend's thread; transfers run on threads of its own."""

    @abstractmethod
    def register(self, kv_cache: KVPool) -> None:
        """Take the device's KV cache; a backend's own object may show more, as its documentation describes."""

    def expect_layers(self) -> None:
        """Be told, right before ``begin_step``, that blocks to be saved may be copied out while the step is computed.

        If :attr:`wants_layers` says so then, ``wait_layer`` is called before each layer is written to, and nobody else writes to blocks
        before. Of a step of which it is not told, blocks are copied out in ``begin_step``. A step that fails may not come to every layer:
        a layer that was not asked for may be that of another sequence by ``end_step``, and is not to be saved.
        """
        return

    @abstractmethod
    def begin_step(self, message: bytes) -> None:
        """Start what the scheduler side asked for; does not wait."""

    @property
    def wants_layers(self) -> bool:
        """True if ``wait_layer`` is to be called in the step that was begun last; asked once a step."""
        return False

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Wait until a layer of the step's layer-wise loads is verified and in their blocks, and that of blocks to be saved is copied.

        Called before the layer is written to and attention reads it, in every pass of the step. A load that has not brought it in time, or never will, is
        given up: it is not reported as loaded, whatever comes later.

        Args:
            layer: As in ``KVPart.layer``.
            budget_s: The longest wait for loads, real time; what is left of that for the whole step.

        Returns:
            False if any load was given up for this layer.
        """
        return True

    @abstractmethod
    def end_step(self) -> None:
        """Secure blocks to be saved before the next step may overwrite them; does not wait for a network."""

    @abstractmethod
    def poll(self) -> ConnectorReport:
        """Return what finished on this rank since the last call; does not wait.

        The end of a load, and the release that follows ``on_cancelled`` or ``on_finished``, is reported once; what is reported again, or
        of a ticket that nobody awaits, is ignored and counted.

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
