"""Conformance suite of the noun ``kv_policy``."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from trencadis.interfaces import legal
from trencadis.records import Request, TransferCause
from trencadis_kv.interfaces import (
    FailureView,
    KVPolicy,
    LoadView,
    PrefillEngineView,
    PrefillView,
    SaveView,
    SourceView,
)
from trencadis_testing.hash_seeds import same_under_other_hashes

__all__ = ["KVPolicyConformance", "load_view", "prefill_view"]

_MAX_CALL_S = 1e-3
"""Fifty times what the contract says: clocks of shared machines are noisy."""

_SECONDS = (math.nan, 0.0, 1e-9, 0.01, 1.0, 1e6, math.inf)


def load_view(
    num_tokens: int = 256,
    *,
    load_s: float = math.nan,
    compute_s: float = math.nan,
    timeout_s: float = 30.0,
    num_local_tokens: int = 0,
    bytes_per_token: int = 4096,
) -> LoadView:
    """Return a view of a prefix that a store has. Pure.

    Args:
        num_tokens: That can be loaded.
        load_s: Predicted, seconds.
        compute_s: Predicted, seconds.
        timeout_s: The longest that a load may take, seconds.
        num_local_tokens: Number of tokens of the local prefix hit.
        bytes_per_token: KV cache of one token.
    """
    return LoadView(
        request=Request(request_id="asked", prompt_token_ids=tuple(range(1, 33))),
        num_tokens=num_tokens,
        num_local_tokens=num_local_tokens,
        num_bytes=num_tokens * bytes_per_token,
        load_s=load_s,
        compute_s=compute_s,
        timeout_s=timeout_s,
    )


def prefill_view(
    *engines: PrefillEngineView,
    num_tokens: int = 1024,
    min_tokens: int = 512,
    max_slowdown: float = 4.0,
    compute_s: float = math.nan,
) -> PrefillView:
    """Return a view of a prompt that this engine or one of the others may compute. Pure.

    Args:
        engines: The others.
        num_tokens: To be computed.
        min_tokens: Value of ``min_tokens`` in the config.
        max_slowdown: Value of ``max_slowdown`` in the config.
        compute_s: Predicted for this engine, seconds.
    """
    return PrefillView(
        request=Request(request_id="asked", prompt_token_ids=tuple(range(1, 33))),
        num_tokens=num_tokens,
        min_tokens=min_tokens,
        max_slowdown=max_slowdown,
        compute_s=compute_s,
        engines=engines,
    )


class KVPolicyConformance:
    """What every KV policy must do; inherit from it, and set ``make``.

    How well it chooses is its own affair: text never depends on it. Example::

        class TestAlways(KVPolicyConformance):
            make = Always
    """

    def make(self) -> KVPolicy:
        """Return a new policy."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourPolicy, or a method make(self)")

    def test_no_more_blocks_are_saved_than_there_are(self) -> None:
        """A whole number from 0 on, whatever the load of the staging memory."""
        policy = self.make()
        for view in _save_views():
            legal(KVPolicy.admits_save, policy.admits_save(view), view)

    def test_waits_are_seconds_from_0_to_the_timeout(self) -> None:
        """Also while nothing was measured yet, and where a prediction is absurd."""
        policy = self.make()
        for view in _load_views():
            legal(KVPolicy.admits_load, policy.admits_load(view), view)

    def test_a_source_is_chosen_among_those_there_are(self) -> None:
        """One is enough to choose."""
        policy = self.make()
        for sources in _source_lists():
            legal(KVPolicy.choose_source, policy.choose_source(sources), sources)

    def test_prompts_go_to_an_engine_there_is_or_stay(self) -> None:
        """Also where there is none, and while nothing was measured yet."""
        policy = self.make()
        for view in _prefill_views():
            legal(KVPolicy.prefill_at, policy.prefill_at(view), view)

    def test_failures_are_computed_or_retried(self) -> None:
        """Whatever the cause, and also one that this version does not know."""
        policy = self.make()
        for view in _failure_views():
            legal(KVPolicy.on_failure, policy.on_failure(view), view)

    def test_retries_come_to_an_end(self) -> None:
        """A prefix that fails again and again is computed."""
        policy = self.make()
        for cause in TransferCause:
            view = FailureView(cause=cause, num_valid_tokens=0, num_lost_tokens=4096, num_attempts=100)
            assert policy.on_failure(view) == "compute", f"a load that was {cause} 100 times is tried once more"

    def test_same_views_have_same_answers(self) -> None:
        """In any order, and from another object: an answer follows from the view alone."""
        first, second = self.make(), self.make()
        calls = list(_calls())
        before = [answer(first, view) for answer, view in calls]
        shuffled = list(range(len(calls)))
        random.Random(1).shuffle(shuffled)
        for i in shuffled:
            answer, view = calls[i]
            assert answer(second, view) == before[i] == answer(first, view), f"two answers to {view}"

    def test_same_answers_in_a_process_that_hashes_differently(self) -> None:
        """Other engines answer for the same sources: no order of a set of names."""
        same_under_other_hashes(self, "_answers")

    def _answers(self) -> list[str]:
        policy = self.make()
        return [repr(answer(policy, view)) for answer, view in _calls()]

    def test_views_are_not_changed(self) -> None:
        """Also not the list of sources."""
        policy = self.make()
        for answer, view in _calls():
            held = list(view) if isinstance(view, list) else attrs.asdict(view)
            answer(policy, view)
            now = view if isinstance(view, list) else attrs.asdict(view)
            assert repr(now) == repr(held), "a view was changed"

    def test_answers_take_microseconds(self) -> None:
        """The engine thread waits for them."""
        policy = self.make()
        by_kind: dict[Callable[..., Any], list[float]] = {}
        for _ in range(3):
            for answer, view in _calls():
                begin_s = time.perf_counter()
                answer(policy, view)
                by_kind.setdefault(answer, []).append(time.perf_counter() - begin_s)
        for answer, times_s in by_kind.items():
            took_s = min(times_s)  # one of them is interrupted by no other process
            assert took_s < _MAX_CALL_S, f"{answer.__name__}() takes {took_s * 1e3:.1f} ms"


def _save(policy: KVPolicy, view: SaveView) -> int:
    return policy.admits_save(view)


def _load(policy: KVPolicy, view: LoadView) -> float:
    return policy.admits_load(view)


def _choose(policy: KVPolicy, sources: Sequence[SourceView]) -> int:
    return policy.choose_source(sources)


def _prefill(policy: KVPolicy, view: PrefillView) -> int | None:
    return policy.prefill_at(view)


def _fail(policy: KVPolicy, view: FailureView) -> str:
    return policy.on_failure(view)


def _calls() -> Iterator[tuple[Callable[[KVPolicy, Any], Any], Any]]:
    """Yield every method with every view."""
    yield from zip(itertools.repeat(_save), _save_views())
    yield from zip(itertools.repeat(_load), _load_views())
    yield from zip(itertools.repeat(_choose), _source_lists())
    yield from zip(itertools.repeat(_prefill), _prefill_views())
    yield from zip(itertools.repeat(_fail), _failure_views())


def _save_views() -> Iterator[SaveView]:
    for num_blocks, staged in itertools.product((1, 2, 17, 8192), (0.0, 0.5, 0.9, 0.95, 1.0)):
        yield SaveView(num_blocks=num_blocks, num_bytes=num_blocks * 65536, staged_fraction=staged)


def _load_views() -> Iterator[LoadView]:
    for num_tokens, load_s, compute_s, timeout_s in itertools.product(
        (1, 256, 131072), _SECONDS, _SECONDS, (1e-3, 30.0)
    ):
        yield load_view(num_tokens, load_s=load_s, compute_s=compute_s, timeout_s=timeout_s, num_local_tokens=16)


def _source_lists() -> Iterator[list[SourceView]]:
    rng = random.Random(0)
    for count in (1, 1, 2, 3, 9):
        for _ in range(40):
            yield [
                SourceView(
                    name=f"source {i}",
                    num_tokens=rng.choice((1, 16, 16, 4096)),
                    load_s=rng.choice(_SECONDS),
                    compute_s=rng.choice(_SECONDS),
                )
                for i in range(count)
            ]


def _prefill_views() -> Iterator[PrefillView]:
    rng = random.Random(0)
    for count, num_tokens, compute_s in itertools.product((0, 1, 2, 9), (1, 512, 131072), _SECONDS):
        engines = [
            PrefillEngineView(
                name=f"10.0.0.{i}:7400",
                num_waiting_tokens=rng.choice((0, 0, 16, 10**6)),
                remote_s=rng.choice(_SECONDS),
                affinity=rng.random(),
            )
            for i in range(count)
        ]
        yield prefill_view(*engines, num_tokens=num_tokens, compute_s=compute_s)


def _failure_views() -> Iterator[FailureView]:
    for cause, num_valid, num_lost, num_attempts in itertools.product(
        (*map(str, TransferCause), "unheard of"), (0, 16), (16, 4096), (1, 2, 50)
    ):
        yield FailureView(cause=cause, num_valid_tokens=num_valid, num_lost_tokens=num_lost, num_attempts=num_attempts)
