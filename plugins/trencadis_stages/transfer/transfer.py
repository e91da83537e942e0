"""KV from elsewhere, and for elsewhere: the stage that drives a KV connector.

claim ─▶ look up ─┬─ pending ─▶ asked again in the next plan
├─ first token, the last one ─▶ gone
├─ load ─▶ aside ─▶ resumed ─▶ runs with the blocks that arrived
└─ layer by layer ─▶ runs beside the load
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from trencadis.activity import ACTIVITY
from trencadis.engine.sequences import Claim, Leaving, Sequence, SequenceState, When
from trencadis.engine.stage import EngineParts, Made, Makings, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.errors import BackendError, CapabilityError, RanksLostError
from trencadis.faults import CallMeter, shown
from trencadis.interfaces import (
    AllocationPlan,
    ConnectorPair,
    KVWorkerSide,
    Lookup,
    SupportsKVConnector,
    SupportsRemoteKVConnector,
    SupportsRemotePrefill,
    SupportsRemoteWorkers,
)
from trencadis.records import Batch, ConnectorReport, Int32Array, Plan, Request, StepOutput, TokenDeltas
from trencadis_stages.transfer.first_tokens import FirstTokens
from trencadis_stages.transfer.guarded_connector import GuardedConnector, GuardedWorker
from trencadis_stages.transfer.remote_prefills import RemotePrefills
from trencadis_stages.transfer.role import EngineRole, Unconnected
from trencadis_stages.transfer.snapshot import TransferSnapshot
from trencadis_stages.transfer.transfers import Transfers
from trencadis_stages.transfer.waiting_load import WaitingLoad

__all__ = ["Transfer", "make_transfer"]


class _Pending(Claim):
    """The connector is still looking."""

    when = When.PENDING
    reason = "the KV connector is still looking for its prefix"


class _Gone(Claim):
    """The first token that came with the prefix was the last."""

    when = When.GONE


class _Beside(Claim):
    """A load that comes layer by layer, while its sequence runs."""

    counts_as_cached = is_provisional = True

    def __init__(self, transfers: Transfers, sequence: Sequence, found: Lookup, *, last: int, block_size: int) -> None:
        self.num_tokens = last * block_size
        self._transfers = transfers
        self._sequence = sequence
        self._found = found
        self._last = last

    def begin(self, sequence: Sequence, blocks: Int32Array, *, num_found: int) -> bool:
        """Begin the load into the blocks after those that the prefix cache held."""
        return self._transfers.load_beside(
            sequence, self._found, blocks=blocks[num_found : self._last], first=num_found
        )

    def unused(self) -> None:
        """Tell the connector that nothing is loaded of its hit now."""
        self._transfers.put_back(self._sequence, self._found)


@attrs.frozen
class _RemadeWorker:
    """Makes a guarded worker side in the process of a rank, to which it travels."""

    make: Callable[[], tuple[Made, Callable[..., CallMeter]]]

    def __call__(self) -> KVWorkerSide:
        """Return one."""
        return _guarded_worker(*self.make(), remake=None)


def _guarded_worker(
    made: Made, meter: Callable[..., CallMeter], remake: Callable[[], KVWorkerSide] | None
) -> GuardedWorker:
    return GuardedWorker(
        made.component.worker,
        label=made.label,
        meter=meter("kv_connector", made.label, thread=ACTIVITY.device),
        remake=remake,
    )


class Transfer(Stage):
    """Looks up, loads and saves KV by the configured connector.

    Args:
        makings: Configuration, model, executor and connector.
    """

    def __init__(self, makings: Makings) -> None:
        made = makings.made("kv_connector")
        assert made is not None, "a connector is configured"
        self._made, self._makings = made, makings
        self._pair: ConnectorPair = made.component
        self._remote: RemotePrefills | None = None

    def allocate(self, plan: AllocationPlan) -> AllocationPlan:
        """Have the worker side see the cache."""
        made, meter = self._made, self._makings.meter
        remake = None if made.remake is None else _RemadeWorker(made.remake)
        return attrs.evolve(plan, connector=_guarded_worker(made, meter, remake))

    def bind(self, engine: EngineParts) -> None:
        """Tell the scheduler side what its worker side was shown, and how first tokens are chosen."""
        makings, label, config = self._makings, self._made.label, engine.config
        executor = engine.executor
        if not isinstance(executor, SupportsKVConnector):
            raise BackendError(
                f"{type(executor).__name__} takes no KV connector.", hint='Set kv_connector.name to "none".'
            )
        side = self._pair.scheduler
        if isinstance(executor, SupportsRemoteKVConnector):
            if not isinstance(side, SupportsRemoteWorkers):
                raise CapabilityError(
                    f"{label} provides kv_connector.ranks, and its scheduler side has no on_ranks().",
                    hint="Mend it, or choose another in kv_connector.name.",
                )
            side.on_ranks(executor.kv_layouts())
        side.on_ready(executor.kv_layout())
        if makings.sampling.fingerprint is not None and isinstance(side, SupportsRemotePrefill):
            side.on_sampling(makings.sampling.fingerprint)
        self._state = engine.state
        self._connector = GuardedConnector(side, label=label, meter=makings.meter("kv_connector", label))
        self.first_tokens = FirstTokens(
            engine.state,
            append=engine.append,
            vocab_size=makings.model.vocab_size,
            can_start_with=makings.sampling.can_start_with,
        )
        cache = config.cache
        self.transfers = Transfers(
            engine.state,
            self._connector,
            load_timeout_s=cache.load_timeout_s,
            lookup_timeout_s=cache.lookup_timeout_s,
            release_timeout_s=cache.release_timeout_s,
            max_waiting_loads=cache.max_waiting_loads,
            close_worker=executor.close_connector,
            num_ranks=executor.num_ranks,
            layerwise=executor.capabilities.layerwise_kv,
            first_token_results=self.first_tokens.results,
        )
        if self._connector.remote_prefill is not None:
            self._remote = RemotePrefills(
                self._connector.remote_prefill,
                add=engine.add,
                abort=engine.abort,
                backlog=engine.state.backlog,
                wake=engine.wake,
            )
        engine.state.on_filled.append(self.transfers.computed)
        self._ended = engine.ended
        self._role = EngineRole(config.engine.role, self.transfers.role, lambda: len(engine.state.slot_of))
        self.answers = {"reject_transfer": self._reject, **self._role.answers}

    # ------------------------------------------------------------------------------------------------- moments

    def accept(self, request: Request) -> Request:
        """Refuse what the role of the engine does not allow."""
        self._role.check(request)
        return request

    def refused(self, request: Request) -> None:
        """Have KV freed that is held for a request."""
        self.transfers.not_served(request.transfer_params)

    def before_step(self) -> None:
        """Take requests of other engines, and give up those that they withdrew."""
        if self._remote is not None:
            self._remote.admit()

    def claim(self, sequence: Sequence, *, num_found: int) -> Claim | None:
        """Return what the connector has beyond the prefix cache."""
        if not sequence.block_hashes:
            return None
        transfers, size = self.transfers, self._state.block_size
        found = transfers.lookup(sequence, num_local_tokens=num_found * size)
        if found.pending:
            return _Pending()
        last = min(found.num_tokens // size, len(sequence.block_hashes))
        if last <= num_found:
            transfers.unused(found)
            return None
        if found.num_cached_tokens is not None:
            num_before = num_found * size if sequence.max_cached_tokens < 0 else sequence.max_cached_tokens
            sequence.max_cached_tokens = max(num_before, found.num_cached_tokens)
        if found.first_token is not None:
            ended = self.first_tokens.take(sequence, found.first_token)
            if ended is not None:
                transfers.unused(found)
                transfers.abandoned(sequence.request)
                self._ended.append(ended)
                return _Gone()
        if transfers.runs_beside(sequence, found):
            return _Beside(transfers, sequence, found, last=last, block_size=size)
        return WaitingLoad(transfers, sequence, found, last=last)

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Count the first tokens that were taken."""
        if step is not None and self.first_tokens.num_new:
            step.num_brought += self.first_tokens.take_num_new()

    def wants_empty_plan(self) -> bool:
        """Return whether a report is awaited, or the worker side has to be told something."""
        return self.transfers.fetch_message() or self.transfers.is_active

    def after_build(self, step: SubmittedStep, batch: Batch) -> Batch | None:
        """Send the scheduler side's message with the batch."""
        message = self.transfers.take_message()
        return attrs.evolve(batch, connector_message=message) if message else None

    def fault_in(self, output: StepOutput) -> str:
        """Return what is wrong with the reports of the worker sides, or an empty string."""
        reports = output.connector_reports
        if isinstance(reports, Mapping) and all(isinstance(one, ConnectorReport) for one in reports.values()):
            return ""
        return f"has connector_reports = {shown(reports)}, which must give a ConnectorReport by rank"

    def received(self, step: SubmittedStep, output: StepOutput) -> None:
        """Apply the reports of the worker sides, and discard sequences whose layers did not come."""
        transfers, plan = self.transfers, step.plan
        has_waited = bool(transfers.layered)  # it took longer than computing takes
        transfers.apply(output.connector_reports, missed_layers=output.missed_layers)
        if not has_waited:
            transfers.step_done(num_tokens=plan.num_tokens, device_s=output.device_s)
        if transfers.layered:
            transfers.confirm(plan.slots[self._state.table.epoch[plan.slots] == plan.epochs])

    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Show first tokens before the tokens of the step, and hand those of other engines' requests over."""
        deltas = self.first_tokens.ahead_of(deltas)
        return deltas if self._remote is None else self._remote.without(deltas)

    def leaving(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Cancel a load beside which the sequence runs; hand over, or give up, what another engine may want of one that ends."""
        transfers = self.transfers
        if sequence.is_provisional and (transfer_id := transfers.layered.id_of(sequence)) >= 0:
            transfers.cancel(transfer_id)
        if leaving.reason is None:
            return None
        is_running = sequence.state is SequenceState.RUNNING
        is_loading = isinstance(sequence.claim, WaitingLoad)
        if not transfers.forget(sequence) and not is_running and not is_loading:
            transfers.abandoned(sequence.request)
        if is_running and leaving.is_complete:
            transfers.cache_hit(sequence.request, num_tokens=sequence.num_cached_tokens)
            if transfers.pin(sequence, leaving.blocks):
                leaving.num_kept_blocks = len(leaving.blocks)
            leaving.transfer_params = transfers.finished_params(sequence.request)
        return None

    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """End what was under way on ranks that are gone."""
        if isinstance(error, RanksLostError):
            self.transfers.ranks_lost()

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def wants_step(self) -> bool:  # type: ignore[override]
        """Whether a report is awaited, or requests of other engines came."""
        return self.transfers.is_active or (self._remote is not None and self._remote.are_waiting)

    @property
    def has_orders(self) -> bool:  # type: ignore[override]
        """Whether the last computed blocks are not saved yet."""
        return self.transfers.has_message

    @property
    def awaits(self) -> bool:  # type: ignore[override]
        """Whether a report is awaited."""
        return self.transfers.is_active

    def inspect(self) -> TransferSnapshot:
        """Return a copy of the state, for tests and debuggers."""
        return self.transfers.inspect()

    def metrics(self) -> Mapping[str, str]:
        """Return the engine's counts of transfers, and the connector's own."""
        from trencadis_stages.transfer.transfer_metrics import (
            transfer_metrics,  # its library is of use to those who scrape
        )

        return {"the engine": transfer_metrics(self.transfers), self._connector.label: self._connector.metrics()}

    def close(self) -> None:
        """Close the scheduler side."""
        self.transfers.close()

    def _reject(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Answer ``reject_transfer``: KV that is held for a request, which no engine will serve, is freed."""
        self.transfers.not_served(arguments["transfer_params"])
        return {}


def make_transfer(makings: Makings) -> Stage:
    """Return the stage that drives the KV connector, or the one that stands in its place."""
    return Unconnected(makings) if makings.made("kv_connector") is None else Transfer(makings)
