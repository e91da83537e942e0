"""The suite of collectives passes a small correct group of threads and fails every broken one, each for the right reason."""

from __future__ import annotations

import collections
import threading

import pytest
import torch

from support.mutants import broken, proofs
from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective
from trencadis_testing.collective import CollectiveConformance


class Board:
    """What the ranks of a group share; all of it under one lock."""

    def __init__(self, size, timeout_s):
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.slots = [[None, None] for _ in range(size)]
        self.headers = [[None, None] for _ in range(size)]
        self.stamps = [0] * size
        self.boxes = collections.defaultdict(collections.deque)
        self.ended = ""


class Simple(Collective):
    """Correct: two slots for each rank, and one stamp. Each mutant breaks one thing."""

    num_slots = 2
    checks_abort = True

    def __init__(self, rank, board):
        self.rank = rank
        self.size = board.size
        self.board = board
        self.is_closed = False

    def all_reduce(self, tensor):
        tensor.copy_(self.total(self.meet(("all_reduce", tensor), tensor)))

    def total(self, parts):
        wide = [part.float() if part.is_floating_point() and part.itemsize == 2 else part for part in self.order(parts)]
        total = wide[0].clone()
        for part in wide[1:]:
            total = total + part
        return total

    def order(self, parts):
        return parts

    def all_gather(self, tensor):
        return self.joined(self.meet(("all_gather", tensor), tensor))

    def joined(self, parts):
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor, *, source=0):
        is_source = self.rank == source
        parts = self.meet(("broadcast", tensor, source), tensor if is_source else None, () if is_source else (source,))
        tensor.copy_(tensor if is_source else parts[source])

    def barrier(self):
        self.meet(("barrier", torch.empty(0)), None)

    def send(self, tensor, *, target):
        with self.board.changed:
            self.look("send")
            self.box(self.rank, target).append(tensor.clone())
            self.board.changed.notify_all()

    def receive(self, tensor, *, source):
        with self.board.changed:
            box = self.box(source, self.rank)
            self.wait(lambda: box, "receive", (source,))
            found = self.take(box)
            if (found.dtype, found.numel()) != (tensor.dtype, tensor.numel()):
                self.end(f"sent {found.nbytes} bytes, expected {tensor.nbytes}")
            tensor.copy_(found)

    def box(self, source, target):
        return self.board.boxes[source, target]

    def take(self, box):
        return box.popleft()

    def abort(self):
        with self.board.changed:
            self.board.ended = self.board.ended or "aborted"
            self.board.changed.notify_all()

    def close(self):
        self.is_closed = True

    def meet(self, call, part, awaited=None):
        board, others = self.board, [rank for rank in range(self.size) if rank != self.rank]
        with board.changed:
            before = board.stamps[self.rank]
            stamp = before + 1
            if self.num_slots == 2:
                self.wait(lambda: all(board.stamps[rank] >= before for rank in others), call[0], others, before)
            self.look(call[0])
            board.slots[self.rank][stamp % self.num_slots] = None if part is None else part.clone()
            board.headers[self.rank][stamp % 2] = self.header(call)
            board.stamps[self.rank] = stamp
            board.changed.notify_all()
            awaited = others if awaited is None else awaited
            self.wait(lambda: all(board.stamps[rank] >= stamp for rank in awaited), call[0], awaited, stamp)
            for rank in awaited:
                if board.headers[rank][stamp % 2] != self.header(call):
                    self.end(f"rank {self.rank}: {self.header(call)}, rank {rank}: {board.headers[rank][stamp % 2]}")
            return [slots[stamp % self.num_slots] for slots in board.slots]

    def header(self, call):
        name, tensor, *source = call
        width = f"last dimension {tensor.shape[-1]}" if name == "all_gather" else ""
        return f"{name} of {tensor.nbytes} bytes, {tensor.dtype}, {width} from rank {source}".replace("[", "").replace(
            "]", ""
        )

    def wait(self, reached, name, ranks, stamp=0):
        while not reached():
            self.look(name)
            if not self.board.changed.wait(self.board.timeout_s) and not reached():
                self.late(name, [rank for rank in ranks if self.board.stamps[rank] < stamp])
        self.look(name)

    def late(self, name, ranks):
        self.end(f"{name}: " + ", ".join(f"rank {rank}" for rank in ranks) + " did not come")

    def look(self, name):
        if self.is_closed or (self.board.ended and self.checks_abort):
            raise CollectiveError(self.board.ended or "closed")

    def end(self, reason):
        self.board.ended = self.board.ended or reason
        self.board.changed.notify_all()
        raise CollectiveError(self.board.ended)


def maker(kind):
    def make(size, *, timeout_s):
        board = Board(size, timeout_s)
        return [kind(rank, board) for rank in range(size)]

    return make


class TestSimple(CollectiveConformance):
    make = staticmethod(maker(Simple))


class RoundsEachSum(Simple):
    def total(self, parts):
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part
        return total


class FlatSums(Simple):
    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        tensor.resize_(tensor.numel())


class RemembersSums(Simple):
    def __init__(self, rank, board):
        super().__init__(rank, board)
        self.seen = {}

    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        tensor.copy_(self.seen.setdefault((tensor.dtype, tensor.numel()), tensor.clone()))


class RanksFromOne(Simple):
    def __init__(self, rank, board):
        super().__init__(rank, board)
        self.size = board.size + 1


class AbortsOnce(Simple):
    """Wakes those who wait, and forgets it."""

    def look(self, name):
        super().look(name if name != "all_reduce" else self.revive())

    def revive(self):
        self.board.ended = ""


class AbortsItself(Simple):
    def abort(self):
        self.is_closed = True


class ComparesNothing(Simple):
    def header(self, call):
        return ""

    def all_reduce(self, tensor):
        self.meet(("all_reduce", tensor), tensor)


class ClosesOnce(Simple):
    def close(self):
        self.look("close")
        super().close()


SUMS = "test_sums_are_those_in_the_order_of_ranks_bit_for_bit"
GATHERS = "test_gathered_tensors_stand_in_the_order_of_ranks_along_the_last_dimension"
ABORTS = "test_abort_ends_calls_that_wait_and_all_later_ones"
DIFFERS = "test_ranks_that_call_different_things_are_told_so"
TIMEOUT = "test_timeout_names_the_rank_that_did_not_come"
CLOSES = "test_close_may_be_called_twice_and_ends_the_group"
MUTANTS = {
    SUMS: [
        broken(
            "OwnPartFirst",
            Simple,
            order=lambda self, parts: [
                parts[self.rank],
                *(part for rank, part in enumerate(parts) if rank != self.rank),
            ],
        ),
        RoundsEachSum,
    ],
    "test_tensors_keep_their_shape": [FlatSums],
    GATHERS: [
        broken("GathersBackwards", Simple, joined=lambda self, parts: torch.cat(parts[::-1], dim=-1)),
        broken("GathersRows", Simple, joined=lambda self, parts: torch.cat(parts, dim=0)),
    ],
    "test_gather_takes_tensors_that_are_not_contiguous": [
        broken(
            "GathersMemory",
            Simple,
            all_gather=lambda self, tensor: Simple.all_gather(
                self, tensor if tensor.is_contiguous() else tensor.T.reshape(tensor.shape)
            ),
        )
    ],
    "test_broadcast_brings_the_tensor_of_its_source": [
        broken(
            "AlwaysFromRank0",
            Simple,
            broadcast=lambda self, tensor, *, source=0: Simple.broadcast(self, tensor, source=0),
        )
    ],
    "test_messages_arrive_whole_and_in_order": [broken("LastMessageFirst", Simple, take=lambda self, box: box.pop())],
    "test_a_rank_receives_from_the_source_that_it_names": [
        broken("OneMailboxForEachRank", Simple, box=lambda self, source, target: self.board.boxes[target])
    ],
    "test_a_source_that_runs_ahead_does_not_overwrite_what_others_still_read": [broken("OneSlot", Simple, num_slots=1)],
    "test_calls_of_all_kinds_follow_each_other": [RemembersSums],
    "test_no_rank_leaves_a_barrier_before_the_last_rank_has_come": [
        broken("OpenBarrier", Simple, barrier=lambda self: None)
    ],
    "test_rank_and_size_are_the_places_in_the_group": [RanksFromOne],
    ABORTS: [AbortsOnce, AbortsItself],
    DIFFERS: [ComparesNothing],
    TIMEOUT: [
        broken("NamesItself", Simple, late=lambda self, name, ranks: self.end(f"{name}: rank {self.rank} gave up"))
    ],
    CLOSES: [ClosesOnce, broken("WorksAfterClose", Simple, close=lambda self: None)],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(
    CollectiveConformance,
    MUTANTS,
    make=maker,
    # after which no thread is left
    patches={"trencadis_testing.collective._WAIT_S": 1.0, "trencadis_testing.collective._LONG_S": 3.0},
)


@pytest.mark.parametrize("says", ["checks_calls", "abort_wakes"])
def test_a_library_that_cannot_says_so_and_passes(failures_of, says):
    kind, test = (ComparesNothing, DIFFERS) if says == "checks_calls" else (AbortsItself, ABORTS)
    suite = type("Suite", (CollectiveConformance,), {says: False})
    assert failures_of(suite, maker(kind), only=test) == set()
