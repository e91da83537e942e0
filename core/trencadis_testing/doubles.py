"""Test doubles for the nouns whose built-ins need more than arithmetic: a KV connector, and what speculation is made of."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trencadis.interfaces import (
    AcceptanceRule,
    ConnectorPair,
    DraftLength,
    DraftView,
    KVSchedulerSide,
    KVWorkerSide,
    LengthView,
    Lookup,
    Speculator,
    SupportsHandover,
    SupportsLayerwise,
    Verification,
)
from trencadis.records import ConnectorReport, Drafts, FailedLoad, Int32Array, Request

__all__ = ["AsManyAsMay", "LoopConnector", "Matching", "ScriptedSpeculator", "ScriptedTrees"]


class _LoopStore:
    """What both sides share: block contents by hash, and the faults to inject."""

    def __init__(
        self, *, delay: int, fail: Callable[[int], int | None], pending: int, holds: bool, by_layer: bool
    ) -> None:
        self.delay = delay
        self.fail = fail
        self.pending = pending
        self.holds = holds
        self.by_layer = by_layer
        self.blocks: dict[str, list[Any]] = {}


class LoopConnector:
    """A KV connector whose store is a dictionary, for a :class:`FakeBackend`.

    Args:
        block_size: Tokens per block.
        delay: Steps between the start of a load and its report.
        fail: Called with each transfer id; a number fails the load with that many valid tokens.
        pending: How often a look-up answers ``pending`` before it answers.
        holds: Hold the blocks of finished sequences for ``delay`` steps.
        by_layer: Loads come layer by layer, where the engine lets them; one that ``fail`` has a number for fails at the last layer.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        delay: int = 1,
        fail: Callable[[int], int | None] = lambda _: None,
        pending: int = 0,
        holds: bool = False,
        by_layer: bool = False,
    ) -> None:
        self.store = _LoopStore(delay=delay, fail=fail, pending=pending, holds=holds, by_layer=by_layer)
        self.scheduler = _LoopScheduler(self.store, block_size)
        self.worker = _LoopWorker(self.store, block_size)

    def pair(self) -> ConnectorPair:
        """Return what a component's factory would."""
        return ConnectorPair(scheduler=self.scheduler, worker=self.worker)


class _LoopScheduler(KVSchedulerSide, SupportsHandover, SupportsLayerwise):
    def __init__(self, store: _LoopStore, block_size: int) -> None:
        self._store = store
        self._block_size = block_size
        self._transfer_ids = itertools.count()
        self._asked: dict[str, int] = {}
        self._message: dict[str, list[Any]] = {"load": [], "save": [], "cancel": [], "hold": [], "layers": []}
        self.num_loaded = 0

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        asked = self._asked.get(request.request_id, 0)
        self._asked[request.request_id] = asked + 1
        if asked < self._store.pending:
            return Lookup(pending=True)
        known = itertools.takewhile(lambda block_hash: block_hash.hex() in self._store.blocks, block_hashes)
        num_tokens = sum(1 for _ in known) * self._block_size
        if not num_tokens:
            return Lookup()
        return Lookup(num_tokens=num_tokens, transfer_id=next(self._transfer_ids), layerwise=self._store.by_layer)

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        first = 0 if not block_hashes else len(block_hashes)
        self._message["load"].append([transfer_id, list(blocks), [h.hex() for h in block_hashes], first])

    def on_layerwise(self, transfer_id: int) -> None:
        self._message["layers"].append(transfer_id)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        self._message["save"].extend([block, h.hex()] for block, h in zip(blocks, block_hashes, strict=True))

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        if not self._store.holds:
            return None
        transfer_id = next(self._transfer_ids)
        self._message["hold"].append(transfer_id)
        return transfer_id

    def on_cancelled(self, transfer_id: int) -> None:
        self._message["cancel"].append(transfer_id)

    def take_message(self) -> bytes:
        if not any(self._message.values()):
            return b""
        message = json.dumps(self._message).encode()
        self._message = {name: [] for name in self._message}
        return message

    def on_report(self, report: ConnectorReport) -> None:
        self.num_loaded += len(report.loaded)


class _LoopWorker(KVWorkerSide):
    def __init__(self, store: _LoopStore, block_size: int) -> None:
        self._store = store
        self._block_size = block_size
        self._loads: dict[int, list[Any]] = {}
        self._late: dict[int, list[Any]] = {}
        self._releases: dict[int, int] = {}
        self._saves: list[Any] = []
        self._layered: dict[int, str] = {}  # loads of this step, and what went wrong with each
        self._fails: set[int] = set()

    def register(self, kv_cache: Any) -> None:
        self._arrays = kv_cache

    def begin_step(self, message: bytes) -> None:
        orders = json.loads(message) if message else {}
        for block, block_hash in orders.get("save", []):
            # Content was committed in an earlier step; this step's passes may overwrite the block.
            part = slice(block * self._block_size, (block + 1) * self._block_size)
            self._store.blocks.setdefault(block_hash, [array[part].copy() for array in self._arrays])
        for transfer_id, blocks, hashes, _ in orders.get("load", []):
            self._loads[transfer_id] = [self._store.delay, blocks, hashes]
        self._layered = dict.fromkeys(orders.get("layers", []), "")
        self._fails = {transfer_id for transfer_id in self._layered if self._store.fail(transfer_id) is not None}
        for transfer_id in orders.get("cancel", []):
            # As with most transports, what was begun cannot be stopped: it lands late, just before the release.
            self._late[transfer_id] = self._loads.pop(transfer_id, [0, [], []])
            self._releases[transfer_id] = self._store.delay
        for transfer_id in orders.get("hold", []):
            self._releases[transfer_id] = self._store.delay

    def end_step(self) -> None:
        pass

    @property
    def wants_layers(self) -> bool:
        return bool(self._layered)

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        array = self._arrays[layer]
        is_last = layer == len(self._arrays) - 1
        for transfer_id in self._layered:
            _, blocks, hashes = self._loads[transfer_id]
            if not all(block_hash in self._store.blocks for block_hash in hashes):
                self._layered[transfer_id] = "no longer stored"
            elif is_last and transfer_id in self._fails:
                self._layered[transfer_id] = "injected"
            else:
                for block, block_hash in zip(blocks, hashes, strict=True):
                    part = slice(block * self._block_size, (block + 1) * self._block_size)
                    array[part] = self._store.blocks[block_hash][layer]
        return not any(self._layered.values())

    def poll(self) -> ConnectorReport:
        loaded, failed = [], []
        for transfer_id, cause in self._layered.items():
            self._loads.pop(transfer_id, None)  # it may have been cancelled in the same message
            if cause:
                failed.append(FailedLoad(transfer_id=transfer_id, num_valid_tokens=0, cause=cause))
            else:
                loaded.append(transfer_id)
        self._layered = {}
        for transfer_id, load in list(self._loads.items()):
            load[0] -= 1
            if load[0] > 0:
                continue
            del self._loads[transfer_id]
            num_valid, cause = self._num_valid_tokens(transfer_id, load[2])
            num_blocks = num_valid // self._block_size
            self._copy_in(load[1][:num_blocks], load[2][:num_blocks])
            if cause:
                failed.append(FailedLoad(transfer_id=transfer_id, num_valid_tokens=num_valid, cause=cause))
            else:
                loaded.append(transfer_id)
        self._releases = {transfer_id: left - 1 for transfer_id, left in self._releases.items()}
        released = [transfer_id for transfer_id, left in self._releases.items() if left <= 0]
        for transfer_id in released:
            del self._releases[transfer_id]
            _, blocks, hashes = self._late.pop(transfer_id, (0, [], []))
            self._copy_in(blocks, hashes)
        return ConnectorReport(loaded=tuple(loaded), failed=tuple(failed), released=tuple(released))

    def close(self) -> None:
        self._loads.clear()

    def _num_valid_tokens(self, transfer_id: int, hashes: list[str]) -> tuple[int, str]:
        """Return how many tokens of a load are good, and why not all; empty if all are."""
        injected = self._store.fail(transfer_id)
        if injected is not None:
            return injected, "injected"
        num_held = sum(1 for _ in itertools.takewhile(self._store.blocks.__contains__, hashes))
        return num_held * self._block_size, "" if num_held == len(hashes) else "no longer stored"

    def _copy_in(self, blocks: list[int], hashes: list[str]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in self._store.blocks:
                continue
            part = slice(block * self._block_size, (block + 1) * self._block_size)
            for array, content in zip(self._arrays, self._store.blocks[block_hash], strict=True):
                array[part] = content


class ScriptedSpeculator(Speculator):
    """Drafts what a function says, cut to what is allowed.

    Args:
        draft: From the known tokens of a sequence to draft tokens.
        max_draft_tokens: The most drafts of one sequence in a step.
    """

    def __init__(self, draft: Callable[[Int32Array], Sequence[int]], *, max_draft_tokens: int = 3) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._draft = draft
        self.num_drafted = 0
        self.num_accepted = 0

    def propose(self, view: DraftView) -> Drafts:
        """Return the scripted drafts."""
        runs = [
            list(self._draft(tokens))[:most]
            for tokens, most in zip(view.token_ids, view.max_draft_tokens.tolist(), strict=True)
        ]
        return Drafts(
            num_drafts=np.array([len(run) for run in runs], np.int32),
            token_ids=np.array([token for run in runs for token in run], np.int32),
        )

    def on_verified(self, *, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Count."""
        self.num_drafted += int(num_drafts.sum())
        self.num_accepted += int(num_accepted.sum())


class ScriptedTrees(ScriptedSpeculator):
    """Drafts the trees that a function says, cut to what is allowed; where only linear drafts are, their first path.

    Args:
        draft: From the known tokens of a sequence to pairs of a draft token and the index of the draft before it, -1 for none.
        max_draft_tokens: The most drafts of one sequence in a step.
    """

    drafts_trees = True

    def __init__(self, draft: Callable[[Int32Array], Sequence[tuple[int, int]]], *, max_draft_tokens: int = 6) -> None:
        super().__init__(lambda tokens: [token for token, _ in draft(tokens)], max_draft_tokens=max_draft_tokens)
        self._tree = draft

    def propose(self, view: DraftView) -> Drafts:
        """Return the scripted trees."""
        trees = []
        for tokens, most, linear in zip(
            view.token_ids, view.max_draft_tokens.tolist(), view.linear_only.tolist(), strict=True
        ):
            tree = list(self._tree(tokens))
            trees.append((_first_path(tree) if linear else tree)[:most])
        return Drafts(
            num_drafts=np.array([len(tree) for tree in trees], np.int32),
            token_ids=np.array([token for tree in trees for token, _ in tree], np.int32),
            parents=np.array([parent for tree in trees for _, parent in tree], np.int32),
        )


def _first_path(tree: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the nodes on the way along first children, as linear drafts."""
    path: list[tuple[int, int]] = []
    here = -1
    for node, (token, parent) in enumerate(tree):
        if parent == here:
            path.append((token, len(path) - 1))
            here = node
    return path


class AsManyAsMay(DraftLength):
    """Always asks for the most drafts."""

    def choose(self, view: LengthView) -> Int32Array:
        """Return the limits."""
        return view.max_draft_tokens


class Matching(AcceptanceRule):
    """Drafts stand while the sampler chooses the very same tokens."""

    lossless = True
    supports_trees = True

    def accept(self, verification: Verification) -> Any:
        """Return 1.0 where a draft was sampled at the node before it, and 0.0 elsewhere."""
        sampled: Any = verification.sampled
        return (sampled.gather(1, verification.parents) == verification.tokens).double()
