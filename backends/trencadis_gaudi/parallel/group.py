"""Collectives between ranks as operators of the device with static shapes, which captured and compiled graphs can contain.

    module ─▶ mark_step (lazy mode) ─▶ torch.ops.trencadis_gaudi.all_reduce(tensor, group) ─▶ a new tensor

A graph may neither write through a view nor run code that torch.compile cannot trace, so each collective returns a new tensor, and names
its group by a number. On a Gaudi the operation is one of HCCL. On the emulated device the recorder records it like any operation, and
runs it on the inner CPU tensors, by shared memory or gloo.

Source of ``mark_step`` before an exchange, without which lazy collectives are wrong: vllm-gaudi 091bbadd,
distributed/device_communicators/hpu_communicator.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Final

import attrs
import torch

from trencadis.interfaces import Collective, RankGroups
from trencadis_gaudi.habana import Habana

__all__ = ["DeviceGroup", "on_device"]

_GROUPS: Final[weakref.WeakValueDictionary[int, DeviceGroup]] = weakref.WeakValueDictionary()
_NUMBERS: Final = itertools.count()


class DeviceGroup(Collective):
    """Group of ranks for tensors of the device, and of the host: sizes, decisions, and the forward of the check.

    Args:
        group: Group for tensors of the device.
        habana: Device of this rank.
        host: Group for tensors of the CPU; on the emulated device the same group.

    Attributes:
        num_calls: Number of calls by collective, without those that a Gaudi replays within a graph.
    """

    def __init__(self, group: Collective, habana: Habana, *, host: Collective) -> None:
        self.rank, self.size = group.rank, group.size
        self.num_calls: Counter[str] = Counter()
        self._group = group
        self._host = host
        # None outside lazy mode, since torch.compile should not trace even an empty method.
        self._mark_step = habana.core.mark_step if habana.is_lazy else None
        self._number = next(_NUMBERS)
        _GROUPS[self._number] = self

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, for ``trencadis_torch.parallel.modules.summing``."""
        if tensor.device.type == "cpu":
            total = tensor.contiguous()
            self._host.all_reduce(total)
            return total
        if self._mark_step is not None:
            self._mark_step()
        summed: torch.Tensor = torch.ops.trencadis_gaudi.all_reduce(tensor, self._number)
        return summed

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        if tensor.device.type == "cpu":
            self._host.all_reduce(tensor)
        else:
            tensor.copy_(self.summed(tensor))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks along the last dimension."""
        if tensor.device.type == "cpu":
            return self._host.all_gather(tensor)
        if self._mark_step is not None:
            self._mark_step()
        gathered: torch.Tensor = torch.ops.trencadis_gaudi.all_gather(tensor, self._number)
        return gathered

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank."""
        if tensor.device.type == "cpu":
            self._host.broadcast(tensor, source=source)
            return
        if self._mark_step is not None:
            self._mark_step()
        tensor.copy_(torch.ops.trencadis_gaudi.broadcast(tensor, source, self._number))

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Send a tensor to a rank; not allowed in graphs."""
        self._group.send(tensor, target=target)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite a tensor with the next one sent by a rank; not allowed in graphs."""
        self._group.receive(tensor, source=source)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._host.barrier()

    def abort(self) -> None:
        """Make waiting calls on all ranks raise."""
        self._group.abort()
        self._host.abort()

    def close(self) -> None:
        """Leave the group."""
        self._host.close()
        self._group.close()

    def replaced(self, name: str, tensor: torch.Tensor, **options: int) -> torch.Tensor:
        """Return the result of a collective that replaces a tensor; called by its operator."""
        self.num_calls[name] += 1
        copied = tensor.clone(memory_format=torch.contiguous_format)
        getattr(self._group, name)(copied, **options)
        return copied

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks; called by its operator."""
        self.num_calls["all_gather"] += 1
        return self._group.all_gather(tensor)


def on_device(groups: RankGroups, habana: Habana, *, host: Collective | None = None) -> RankGroups:
    """Return the groups of a rank for tensors of its device.

    Args:
        groups: Groups made by the executor, with one stage.
        habana: Device of this rank.
        host: Group of the same ranks for tensors of the CPU; None: the executor's groups are used.
    """
    tensor = DeviceGroup(groups.tensor, habana, host=host or groups.tensor)
    return attrs.evolve(groups, tensor=tensor, world=tensor)


@torch.library.custom_op("trencadis_gaudi::all_reduce", mutates_args=())
def _all_reduce(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return _GROUPS[group].replaced("all_reduce", tensor)


@torch.library.custom_op("trencadis_gaudi::all_gather", mutates_args=())
def _all_gather(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return _GROUPS[group].gathered(tensor)


@torch.library.custom_op("trencadis_gaudi::broadcast", mutates_args=())
def _broadcast(tensor: torch.Tensor, source: int, group: int) -> torch.Tensor:
    return _GROUPS[group].replaced("broadcast", tensor, source=source)


# Shapes of results, for compilers and for a compile-only warm-up.


@_all_reduce.register_fake
def _(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@_all_gather.register_fake
def _(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape[:-1], _GROUPS[group].size * tensor.shape[-1]))


@_broadcast.register_fake
def _(tensor: torch.Tensor, source: int, group: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)
