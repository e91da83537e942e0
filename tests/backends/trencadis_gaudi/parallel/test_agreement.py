"""What ranks see alike, and the sums that are checked at the start."""

from __future__ import annotations

import pytest
import torch

from support.backends.gaudi_ranks import make_gaudi
from trencadis.errors import BackendError
from trencadis_gaudi.parallel.agreement import Agreement, check_sums
from trencadis_gaudi.parallel.group import on_device


def test_one_rank_agrees_with_itself():
    alone = Agreement()
    assert (alone.least(3), alone.most(3), alone.all_hold(False), alone.common("ab")) == (3, 3, False, "ab")


def test_numbers_and_decisions_are_those_of_all_ranks(ranks):
    def ask(groups):
        agreement, rank = Agreement(groups.tensor), groups.rank
        return [
            agreement.least(10 - 20 * rank),
            agreement.most(1 << 40 if rank else 0),
            agreement.all_hold(True),
            agreement.all_hold(rank == 0),
            agreement.common(f"0{rank}ff"),
            agreement.common(""),
        ]

    first, second, third = ranks(lambda groups: groups, 3).call(ask)
    assert first == second == third
    assert first[:4] == [-30, 1 << 40, True, False]
    assert len(bytes.fromhex(first[4])) == 16
    assert first[5] == ""
    other = ranks(lambda groups: groups, 3).call(lambda groups: Agreement(groups.tensor).common("00ff"))
    assert other[0] != first[4]


class Loses:
    """A group in which nothing arrives from one rank, as far as another can see."""

    def __init__(self, group, *, at, source):
        self._group, self._loses, self._source = group, group.rank in at, source

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_reduce(self, tensor):
        own = tensor.clone()
        self._group.all_reduce(tensor)
        if self._loses:
            tensor.copy_(tensor - own if self._group.rank == self._source else tensor - 1)

    def all_gather(self, tensor):
        gathered = self._group.all_gather(tensor)
        if self._loses:
            gathered[..., self._source] = 0
        return gathered


def joined(groups, *, at=(), source=0):
    """Check the sums of a rank's device, some of whose exchanges are wrong."""
    habana = make_gaudi().habana
    host = groups.tensor
    broken = Loses(groups.tensor, at=at, source=source)
    group = on_device(groups, habana, host=host).tensor
    group._group = broken
    with habana.active(), torch.inference_mode():
        check_sums(group, habana.device)


def test_sums_that_arrive_are_right(ranks):
    assert ranks(lambda groups: groups, 2).errors(joined) == [None, None]


@pytest.mark.parametrize(("at", "told"), [((1,), "rank 1 got 2, 1, 2, 0"), ((0, 1, 2), "rank 0 got 2, 1, 2, 0")])
def test_ranks_that_get_something_wrong_are_named_on_every_rank(ranks, at, told):
    for error in ranks(lambda groups: groups, 3).errors(lambda groups: joined(groups, at=at, source=2)):
        assert isinstance(error, BackendError)
        assert told in str(error)
        assert str(error).count(" got ") == len(at)
        assert "hl-smi" in error.hint
