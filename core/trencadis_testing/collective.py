"""Conformance suite of collectives: the contract ``trencadis.interfaces.Collective``."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective

if TYPE_CHECKING:
    import torch

__all__ = ["CollectiveConformance"]

_WAIT_S = 30.0
"""For which the suite waits for a rank that has to return."""
_LOOK_S = 0.3
"""For which the suite looks whether a rank returns that must not; one that does is noticed sooner."""
_LONG_S = 600.0
"""A timeout that no test waits for."""
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64")
_LENGTHS = (0, 1, 7, 1000, 300_007)
"""Elements of a tensor: the last one is more than a megabyte, and no multiple of anything."""


class CollectiveConformance:
    """What every collective must do; inherit from it, and set ``make``.

    Each rank's calls come from a thread of its own: of this process, or through objects that pass calls on to others. Example::

        class TestShared(CollectiveConformance):
            def make(self, size, *, timeout_s):
                return [Shared(rank, size, timeout_s) for rank in range(size)]

    Attributes:
        checks_calls: Ranks that make different calls raise; set it to False for a library that does not compare calls.
        abort_wakes: ``abort`` ends calls that wait; set it to False for a library that cannot, whose ranks have to be killed then.
        short_timeout_s: Timeout of the test in which a rank does not come, in seconds.
    """

    checks_calls: bool = True
    abort_wakes: bool = True
    short_timeout_s: float = 0.5

    def make(self, size: int, *, timeout_s: float) -> Sequence[Collective]:
        """Return a new group: its ranks in order; a rank waits ``timeout_s`` for another."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self, size, *, timeout_s)")

    # ------------------------------------------------------------------------------------------------ values

    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_sums_are_those_in_the_order_of_ranks_bit_for_bit(self, dtype: str) -> None:
        """((t0 + t1) + t2) on every rank, of 16-bit floats in float32 and rounded once: replicas must not drift apart."""
        import torch

        for size in (2, 3):
            with self._ranks(size) as ranks:
                for length in _LENGTHS:
                    parts = [_values(length, dtype, seed) for seed in range(size)]
                    found = ranks.run(_of_own(_summed, parts))
                    for rank, tensor in enumerate(found):
                        same = torch.equal(tensor, _ordered_sum(parts))
                        assert same, f"the sum of {length} {dtype} is wrong on rank {rank} of {size}"

    def test_tensors_keep_their_shape(self) -> None:
        """A sum is written where the tensor was, whatever its shape."""
        import torch

        with self._ranks(2) as ranks:
            for shape in ((), (1,), (2, 3), (4, 1, 5), (3, 0)):
                found = ranks.run(_of_own(_summed, [torch.full(shape, 1.0), torch.full(shape, 2.0)]))
                assert all(torch.equal(tensor, torch.full(shape, 3.0)) for tensor in found), f"shape {shape}"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
    def test_gathered_tensors_stand_in_the_order_of_ranks_along_the_last_dimension(self, dtype: str) -> None:
        """On every rank, also on those that are not the first; the rank's own tensor stays as it was."""
        import torch

        with self._ranks(3) as ranks:
            for shape in ((5,), (2, 3), (4, 1, 7), (3, 0), (0, 4), (300, 401), (2, 200_003)):
                parts = [_values(_numel(shape), dtype, seed).view(shape) for seed in range(3)]
                found = ranks.run(_of_own(_gathered, parts))
                expected = torch.cat(parts, dim=-1)
                for rank, tensor in enumerate(found):
                    assert tensor.shape == expected.shape, f"shape {tuple(tensor.shape)} on rank {rank}"
                    assert torch.equal(tensor, expected), f"gathered {shape} of {dtype} wrongly on rank {rank}"

    def test_gather_takes_tensors_that_are_not_contiguous(self) -> None:
        """Such as columns of logits."""
        import torch

        with self._ranks(2) as ranks:
            parts = [_values(12, "float32", seed).view(4, 3).T for seed in range(2)]
            found = ranks.run(_of_own(_gathered, parts))
            assert all(torch.equal(tensor, torch.cat(parts, dim=-1)) for tensor in found)

    @pytest.mark.parametrize("dtype", ["int32", "float16"])
    def test_broadcast_brings_the_tensor_of_its_source(self, dtype: str) -> None:
        """Each rank is the source in turn, and its own tensor stays as it was."""
        import torch

        with self._ranks(3) as ranks:
            for source in (2, 0, 1):
                for length in _LENGTHS:
                    parts = [_values(length, dtype, seed) for seed in range(3)]
                    found = ranks.run(_of_own(_received, parts, source))
                    same = [torch.equal(tensor, parts[source]) for tensor in found]
                    assert all(same), f"{length} {dtype} of rank {source} came to {same}"

    def test_messages_arrive_whole_and_in_order(self) -> None:
        """Between each pair, both ways, of any size; what goes to one rank does not reach another."""
        import torch

        messages = {
            (source, target): [
                _values(length, "bfloat16", 10 * source + target + length) for length in (3, 0, 70_001, 1)
            ]
            for source in range(3)
            for target in range(3)
            if source != target
        }

        def exchange(group: Collective) -> bool:
            right = True
            for (
                source,
                target,
            ), sent in messages.items():  # one pair after the other: a send may wait for its receiver
                for message in sent if group.rank in (source, target) else ():
                    if group.rank == source:
                        group.send(message, target=target)
                    else:
                        found = torch.zeros_like(message)
                        group.receive(found, source=source)
                        right = right and torch.equal(found, message)
            return right

        with self._ranks(3) as ranks:
            assert ranks.run(exchange) == [True] * 3

    def test_a_rank_receives_from_the_source_that_it_names(self) -> None:
        """Although another one has sent before."""
        import torch

        def receive(group: Collective) -> list[float]:
            found = torch.zeros(2)
            sources = []
            for source in (2, 1):
                group.receive(found, source=source)
                sources.append(float(found[0]))
            return sources

        with self._ranks(3) as ranks:
            early = ranks.start(1, lambda group: group.send(torch.ones(2), target=0))
            early.join(_LOOK_S)
            late = ranks.start(2, lambda group: group.send(torch.full((2,), 2.0), target=0))
            assert ranks.result(ranks.start(0, receive)) == [2.0, 1.0]
            ranks.result(early)
            ranks.result(late)

    def test_calls_of_all_kinds_follow_each_other(self) -> None:
        """Whatever one leaves behind must not reach the next."""
        import torch

        def run(group: Collective) -> list[torch.Tensor]:
            choose, found = random.Random(7), []
            for number in range(40):
                length, kind, source = choose.choice((1, 5, 4096, 40_000)), choose.randrange(5), choose.randrange(3)
                tensor = _values(length, "float32", 3 * number + group.rank)
                found.append(_any_call(group, kind, tensor, source))
            return found

        def expected(rank: int) -> list[torch.Tensor]:
            choose, found = random.Random(7), []
            for number in range(40):
                length, kind, source = choose.choice((1, 5, 4096, 40_000)), choose.randrange(5), choose.randrange(3)
                parts = [_values(length, "float32", 3 * number + other) for other in range(3)]
                found.append(_expected(kind, parts, source, rank))
            return found

        with self._ranks(3) as ranks:
            for rank, tensors in enumerate(ranks.run(run)):
                for number, (tensor, right) in enumerate(zip(tensors, expected(rank), strict=True)):
                    assert torch.equal(tensor, right), f"call {number} is wrong on rank {rank}"

    def test_a_source_that_runs_ahead_does_not_overwrite_what_others_still_read(self) -> None:
        """It may return before the others come, and then has to wait before it uses the same memory again."""
        import torch

        tensors = [_values(1000, "float32", seed) for seed in range(8)]
        with self._ranks(2) as ranks:
            ahead = ranks.start(0, lambda group: [group.broadcast(tensor.clone(), source=0) for tensor in tensors])
            ahead.join(_LOOK_S)
            late = ranks.start(1, lambda group: [_received(group, torch.zeros(1000), 0) for _ in tensors])
            ranks.result(ahead)
            found = ranks.result(late)
            assert [torch.equal(*pair) for pair in zip(found, tensors, strict=True)] == [True] * 8

    # ------------------------------------------------------------------------------------------------ waiting

    def test_no_rank_leaves_a_barrier_before_the_last_rank_has_come(self) -> None:
        """And all leave it then."""
        with self._ranks(3) as ranks:
            waiting = [ranks.start(rank, lambda group: group.barrier()) for rank in (0, 2)]
            waiting[0].join(_LOOK_S)
            assert all(thread.is_alive() for thread in waiting), "a rank left the barrier without rank 1"
            ranks.result(ranks.start(1, lambda group: group.barrier()))
            for thread in waiting:
                ranks.result(thread)

    def test_rank_and_size_are_the_places_in_the_group(self) -> None:
        """In the order in which ``make`` returns them."""
        with self._ranks(3) as ranks:
            assert [(group.rank, group.size) for group in ranks.groups] == [(0, 3), (1, 3), (2, 3)]

    # ------------------------------------------------------------------------------------------------ failures

    @pytest.mark.parametrize("call", ["barrier", "all_reduce", "all_gather", "broadcast", "receive"])
    def test_abort_ends_calls_that_wait_and_all_later_ones(self, call: str) -> None:
        """On every rank, whichever aborts, and long before the timeout; twice does no harm."""
        import torch

        with self._ranks(3) as ranks:
            if self.abort_wakes:
                waiting = [ranks.start(rank, lambda group: _waiting_call(group, call)) for rank in (0, 2)]
                waiting[0].join(_LOOK_S)
                ranks.groups[1].abort()
                assert all(isinstance(ranks.outcome(thread), CollectiveError) for thread in waiting)
            for group in ranks.groups if not self.abort_wakes else ranks.groups[1:2]:
                group.abort()
            later = [ranks.start(rank, lambda group: group.all_reduce(torch.zeros(3))) for rank in range(3)]
            assert all(isinstance(ranks.outcome(thread), CollectiveError) for thread in later), "a later call returned"

    @pytest.mark.parametrize("case", ["kind", "size", "dtype", "width", "source", "message"])
    def test_ranks_that_call_different_things_are_told_so(self, case: str) -> None:
        """All of them, in that call or in the next, with what two of them called."""
        if not self.checks_calls:
            pytest.skip("says that it does not compare calls")
        words, calls = _different_calls(case)

        def run(group: Collective) -> None:
            calls[group.rank](group)
            group.barrier()

        with self._ranks(3) as ranks:
            threads = [ranks.start(rank, run) for rank in range(3)]
            for rank, thread in enumerate(threads):
                error = ranks.outcome(thread)
                assert isinstance(error, CollectiveError), f"rank {rank} was told nothing: {error!r}"
                assert all(word in str(error) for word in words), f"{words} are not in: {error}"

    def test_timeout_names_the_rank_that_did_not_come(self) -> None:
        """And the call, on every rank that waited."""
        with self._ranks(3, timeout_s=self.short_timeout_s) as ranks:
            waiting = [ranks.start(rank, lambda group: group.barrier()) for rank in (0, 2)]
            for thread in waiting:
                error = ranks.outcome(thread)
                assert isinstance(error, CollectiveError), f"no timeout: {error!r}"
                assert re.search(r"\brank 1\b", str(error)), f"rank 1 is not named: {error}"
                assert "barrier" in str(error), f"the call is not named: {error}"

    def test_close_may_be_called_twice_and_ends_the_group(self) -> None:
        """Also after an abort; an abort after it does no harm."""
        with self._ranks(2) as ranks:
            ranks.run(lambda group: group.barrier())
            for group in ranks.groups:
                group.close()
                group.close()
                error = ranks.outcome(ranks.start(group.rank, lambda group: group.barrier()))
                assert isinstance(error, CollectiveError), f"a closed group was called and said {error!r}"
                group.abort()
        with self._ranks(2) as ranks:
            for group in ranks.groups:
                group.abort()
                group.close()
                group.close()

    @contextlib.contextmanager
    def _ranks(self, size: int, *, timeout_s: float = _LONG_S) -> Iterator[_Ranks]:
        ranks = _Ranks(self.make(size, timeout_s=timeout_s))
        try:
            yield ranks
        finally:
            ranks.end()


class _Thread(threading.Thread):
    """One rank's calls, and what they returned or raised."""

    def __init__(self, group: Collective, work: Callable[[Collective], Any]) -> None:
        super().__init__(daemon=True, name=f"rank-{group.rank}")
        self._group = group
        self._work = work
        self.result: Any = None

    def run(self) -> None:
        try:
            self.result = self._work(self._group)
        except BaseException as error:
            self.result = error


class _Ranks:
    """The ranks of a group, each of which runs functions on a thread.

    Attributes:
        groups: One for each rank.
    """

    def __init__(self, groups: Sequence[Collective]) -> None:
        self.groups = groups
        self._threads: list[_Thread] = []

    def start(self, rank: int, work: Callable[[Collective], Any]) -> _Thread:
        """Let a rank run a function."""
        thread = _Thread(self.groups[rank], work)
        self._threads.append(thread)
        thread.start()
        return thread

    def outcome(self, thread: _Thread) -> Any:
        """Return what a function returned, or the error that it raised."""
        thread.join(_WAIT_S)
        assert not thread.is_alive(), f"{thread.name} still waits after {_WAIT_S} s"
        return thread.result

    def result(self, thread: _Thread) -> Any:
        """Return what a function returned, or raise what it raised."""
        found = self.outcome(thread)
        if isinstance(found, BaseException):
            raise found
        return found

    def run(self, work: Callable[[Collective], Any]) -> list[Any]:
        """Let all ranks run a function, and return what each returned."""
        threads = [self.start(rank, work) for rank in range(len(self.groups))]
        return [self.result(thread) for thread in threads]

    def end(self) -> None:
        """Abort if a rank still waits, and close."""
        for group in self.groups if any(thread.is_alive() for thread in self._threads) else ():
            group.abort()
        for group in self.groups:
            group.close()


def _values(length: int, dtype: str, seed: int) -> torch.Tensor:
    """Return numbers of many magnitudes, so that sums in another order have other bits. Pure."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).to(kind)
    if not kind.is_floating_point:
        return torch.randint(-(2**30), 2**30, (length,), generator=generator).to(kind)
    magnitude = torch.randint(-6, 6, (length,), generator=generator)
    return torch.randn(length, generator=generator, dtype=torch.float64).mul(2.0**magnitude).to(kind)


def _ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ((t0 + t1) + t2) + ..., of 16-bit floats in float32. Pure."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype.is_floating_point and dtype.itemsize == 2 else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return total.to(dtype)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def _of_own(
    call: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], *more: int
) -> Callable[[Collective], Any]:
    """Return a function that makes a call with the rank's own one of some tensors."""
    return lambda group: call(group, parts[group.rank], *more)


def _gathered(group: Collective, tensor: torch.Tensor) -> torch.Tensor:
    """Return what ``all_gather`` returns, and check that the rank's own tensor stays."""
    import torch

    before = tensor.clone()
    found = group.all_gather(tensor)
    assert torch.equal(tensor, before), "all_gather changed the rank's own tensor"
    return found


def _summed(group: Collective, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, as ``all_reduce`` leaves it in a copy."""
    own = tensor.clone()
    group.all_reduce(own)
    return own


def _received(group: Collective, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Return what ``broadcast`` leaves in a copy."""
    own = tensor.clone()
    group.broadcast(own, source=source)
    return own


def _any_call(group: Collective, kind: int, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Make a call of one of five kinds, and return what came of it."""
    if kind == 0:
        return _summed(group, tensor)
    if kind == 1:
        return group.all_gather(tensor)
    if kind == 2:
        return _received(group, tensor, source)
    if kind == 3:
        group.barrier()
        return tensor
    target = (source + 1) % group.size
    own = tensor.clone()
    if group.rank == source:
        group.send(own, target=target)
    elif group.rank == target:
        group.receive(own, source=source)
    return own


def _expected(kind: int, parts: Sequence[torch.Tensor], source: int, rank: int) -> torch.Tensor:
    """Return what comes of ``_any_call`` on a rank. Pure."""
    import torch

    if kind == 0:
        return _ordered_sum(parts)
    if kind == 1:
        return torch.cat(list(parts), dim=-1)
    takes_sources = kind == 2 or (kind == 4 and rank == (source + 1) % len(parts))
    return parts[source if takes_sources else rank]


def _waiting_call(group: Collective, call: str) -> None:
    """Make a call that waits for rank 1."""
    import torch

    tensor = torch.zeros(5)
    if call == "barrier":
        group.barrier()
    elif call == "all_reduce":
        group.all_reduce(tensor)
    elif call == "all_gather":
        group.all_gather(tensor)
    elif call == "broadcast":
        group.broadcast(tensor, source=1)
    else:
        group.receive(tensor, source=1)


def _different_calls(case: str) -> tuple[tuple[str, ...], list[Callable[[Collective], object]]]:
    """Return words that errors must have, and what each of three ranks calls: the last something else than the others."""
    import torch

    floats, whole = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    words: tuple[str, ...]
    if case == "kind":
        words, usual, other = ("all_reduce", "all_gather"), _call("all_reduce", floats), _call("all_gather", floats)
    elif case == "size":
        words, usual, other = ("16", "20"), _call("all_reduce", floats), _call("all_reduce", torch.zeros(5))
    elif case == "dtype":
        words, usual, other = ("float32", "int32"), _call("all_reduce", floats), _call("all_reduce", whole)
    elif case == "width":
        words = ("all_gather",)
        usual, other = _call("all_gather", floats.view(2, 2)), _call("all_gather", floats.view(1, 4))
    elif case == "source":
        words = ("rank 0", "rank 1")
        usual, other = _call("broadcast", floats, source=0), _call("broadcast", floats, source=1)
    else:
        sends, receives = _call("send", floats, target=2), _call("receive", torch.zeros(5), source=0)
        return ("16", "20"), [sends, lambda _group: None, receives]
    return words, [usual, usual, other]


def _call(name: str, tensor: torch.Tensor, **more: int) -> Callable[[Collective], object]:
    """Return a function that makes a call with a copy of a tensor."""
    return lambda group: getattr(group, name)(tensor.clone(), **more)
