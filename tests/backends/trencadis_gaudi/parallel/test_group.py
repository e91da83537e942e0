"""Exchanges as operations of the emulated device: what its recorder makes of them, and what ranks get."""

from __future__ import annotations

import gc

import pytest
import torch

from support.backends.gaudi_ranks import make_gaudi
from trencadis.errors import BackendError
from trencadis_gaudi.emulated.tensor import HpuTensor
from trencadis_gaudi.parallel import group as group_module
from trencadis_gaudi.parallel.agreement import Agreement, check_sums
from trencadis_gaudi.parallel.group import on_device

NUMBERS = torch.arange(6.0).view(2, 3)


class Rank:
    """A device of its own, and its group."""

    def __init__(self, groups, mode="lazy"):
        self.habana = make_gaudi(mode=mode).habana
        self.groups = groups
        self.group = on_device(groups, self.habana).tensor

    @torch.inference_mode()
    def run(self, use):
        with self.habana.active():
            return use(self)


@pytest.fixture
def two(ranks):
    def start(mode="lazy"):
        started = ranks(lambda groups: Rank(groups, mode))
        return lambda use: started.call(lambda rank: rank.run(use))

    return start


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_sums_gathers_and_broadcasts_are_new_tensors_of_the_device(two, mode):
    def exchange(rank):
        own = (NUMBERS + 10 * rank.group.rank).to(rank.habana.device)
        told = own.clone()
        rank.group.broadcast(told, source=1)
        made = (rank.group.summed(own), rank.group.all_gather(own), told, own)
        assert all(isinstance(one, HpuTensor) for one in made)
        rank.group.all_reduce(own)
        return [one.cpu() for one in made]

    for summed, gathered, told, own in two(mode)(exchange):
        assert torch.equal(summed, 2 * NUMBERS + 10)
        assert torch.equal(gathered, torch.cat([NUMBERS, NUMBERS + 10], -1))
        assert torch.equal(told, NUMBERS + 10)
        assert torch.equal(own, summed)


def test_tensors_of_the_host_take_the_way_between_the_hosts(two):
    def exchange(rank):
        own = NUMBERS + 10 * rank.group.rank
        rank.group.barrier()
        gathered = rank.group.all_gather(own)
        rank.group.broadcast(own, source=1)
        assert not rank.group.num_calls
        return gathered, rank.group.summed(own.mT), own

    for gathered, summed, told in two()(exchange):
        assert torch.equal(gathered, torch.cat([NUMBERS, NUMBERS + 10], -1))
        assert torch.equal(told, NUMBERS + 10)
        assert torch.equal(summed, 2 * told.mT)


def test_an_exchange_is_part_of_the_recipe_and_of_a_graph(two):
    """The run before it ends with a mark in lazy mode; within a graph the same operations are replayed."""

    class Layer(torch.nn.Module):
        def __init__(self, group):
            super().__init__()
            self._group = group

        def forward(self, x):
            return self._group.all_gather(self._group.summed(x * 2))

    def exchange(rank):
        device = rank.habana.emulated
        own = (NUMBERS + rank.group.rank).to(rank.habana.device)
        rank.habana.mark_step()
        marks, compiled = device.num_mark_steps, device.num_compilations
        rank.group.summed(own * 2)
        assert device.num_mark_steps == marks + 1
        rank.habana.mark_step()
        assert device.num_compilations == compiled + 2
        graphed = rank.habana.hpu.wrap_in_hpu_graph(Layer(rank.group), disable_tensor_cache=True)
        captured = graphed(own).cpu()
        compiled = device.num_compilations
        replayed = graphed(own + 1).cpu()
        assert device.num_compilations == compiled + 1  # the addition
        return captured, replayed

    for captured, replayed in two()(exchange):
        expected = 4 * NUMBERS + 2
        assert torch.equal(captured, torch.cat([expected, expected], -1))
        assert torch.equal(replayed, captured + 4)


def test_a_warm_up_that_only_compiles_exchanges_nothing(two):
    def compile_only(rank):
        own = NUMBERS.to(rank.habana.device)
        with rank.habana.internal.bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True):
            shapes = [tuple(rank.group.summed(own).shape), tuple(rank.group.all_gather(own).shape)]
        assert not rank.group.num_calls
        return shapes

    assert two()(compile_only) == [[(2, 3), (2, 6)]] * 2


def test_groups_of_ended_ranks_are_forgotten(ranks):
    started = ranks(Rank)
    numbers = [rank.group._number for rank in started.all]
    assert len({one for one in numbers if one in group_module._GROUPS}) == 2
    started.all.clear()
    started.close()
    gc.collect()
    assert not [one for one in numbers if one in group_module._GROUPS]


def test_abort_reaches_whoever_waits(ranks):
    started = ranks(Rank)

    def exchange(rank):
        if rank.group.rank == 1:
            rank.group.abort()
            return
        rank.run(lambda one: one.group.summed(NUMBERS.to(one.habana.device)))

    first, second = started.errors(exchange)
    assert "another rank ended" in str(first)
    assert second is None


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
