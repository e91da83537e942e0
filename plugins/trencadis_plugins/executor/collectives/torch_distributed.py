"""Collectives over ``torch.distributed``: ``gloo`` between CPUs, ``nccl`` between GPUs, ``hccl`` between Gaudis.

Sums have the bits that those in shared memory have: parts travel in their own dtype and every element is summed once, in the order of
ranks. Small tensors are gathered and summed on every rank; of large ones each rank sums a slice (all-to-all), and the sums are
gathered: as many bytes as a ring sends. Two ranks and whole numbers have one possible sum, which the library computes.

``gloo`` and ``hccl`` do not compare calls: ranks that call different things wait until the timeout, or get something wrong.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective
from trencadis_plugins.executor.collectives.owner import GroupAddress
from trencadis_plugins.executor.collectives.sums import ordered_sum, require_summable

__all__ = ["TorchCollective", "open_torch_group"]

_STORES: Final[Any] = dist
"""torch.distributed, whose stores are public and not in the list of what it exports."""
_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR: Final = 0x8915
"""Source: netdevice(7)."""
_REPORT_S: Final = 1.0
"""For which a rank whose call failed waits for the others to say the same; who says nothing is named."""
_SHARED_DEVICE: Final = "Duplicate GPU detected"
"""In the error of NCCL, if two ranks are on one device."""
_GATHERED_BYTES: Final = 256 * 1024
"""All ranks' parts together; up to here one gather is quicker than two exchanges of less."""


def open_torch_group(address: GroupAddress) -> Collective:
    """Open the world of this process, or a subgroup of it.

    Raises:
        CollectiveError: The others did not come, the software of the device is missing, or the world is not open.
    """
    limit = datetime.timedelta(seconds=address.timeout_s)
    if address.kind == "hccl":
        _load_hccl()
    try:
        if not address.members:
            store = _STORES.PrefixStore(f"generation {address.generation}", _store(address, limit))
            dist.init_process_group(
                address.kind, store=store, rank=address.rank, world_size=address.size, timeout=limit
            )
            return TorchCollective(address, dist.group.WORLD, store)
        group = dist.new_group(list(address.members), timeout=limit, use_local_synchronization=True)
        return TorchCollective(
            address, group, _STORES.PrefixStore(f"generation {address.generation}", _store(address, limit))
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f'Rank {address.rank} of {address.size} cannot open its group "{address.kind}" at {address.name}: {error}'
        ) from error


def _store(address: GroupAddress, limit: datetime.timedelta) -> Any:
    where = urlsplit(address.name)
    if where.scheme == "tcp" and where.hostname and where.port:
        if address.kind == "gloo" and (interface := _interface_to(where.hostname, where.port)):
            os.environ.setdefault(_INTERFACE, interface)
        return _STORES.TCPStore(where.hostname, where.port, is_master=False, timeout=limit)
    if where.scheme == "file":
        # Size -1: it does not count its users, so it never removes the file under those who come later.
        return _STORES.FileStore(where.path, -1)
    raise CollectiveError(f"{address.name!r} is no place to meet: tcp://host:port, or file:///path.")


def _interface_to(host: str, port: int) -> str:
    """Return the name of the network interface that reaches a host; empty where none has an IPv4 address that does.

    By itself gloo takes the address of the machine's name, which is 127.0.0.1 or 127.0.1.1 on many.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((host, port))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return ""


def _load_hccl() -> None:
    try:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    except ImportError as error:
        raise CollectiveError(
            f'The collectives "hccl" need the Gaudi software: {error}.', hint='On CPUs use "shared_memory" or "gloo".'
        ) from error


class TorchCollective(Collective):
    """A process group of ``torch.distributed``.

    ``abort`` ends calls of ``nccl`` that wait. It cannot end one of ``gloo``, which raises when a peer's process ends (0.05 s) or at
    the timeout, which is as long as a rank may load or compile: the executor, which sees who is stopped or silent, kills the ranks.

    Args:
        address: With which it was opened.
        group: Process group of torch.
        store: Through which ranks say that a call failed.
    """

    def __init__(self, address: GroupAddress, group: Any, store: Any) -> None:
        self.rank = address.rank
        self.size = address.size
        self._address = address
        self._group = group
        self._store = store
        self._ranks = (
            [dist.get_global_rank(group, rank) for rank in range(self.size)]
            if address.members
            else list(range(self.size))
        )
        self._num_calls = 0
        self._ended = ""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of the ranks', in the order of ranks."""
        require_summable(tensor)
        with self._call("all_reduce", tensor):
            if tensor.numel():
                with self._reachable(tensor) as held:
                    self._sum(held)
            else:
                dist.barrier(self._group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks along the last dimension."""
        if tensor.dim() == 0:
            raise CollectiveError("all_gather needs a tensor of at least one dimension.")
        with self._call("all_gather", tensor):
            if not tensor.numel():
                dist.barrier(self._group)
                return tensor.new_empty((*tensor.shape[:-1], self.size * tensor.shape[-1]))
            with self._reachable(tensor.contiguous(), writes=False) as own:
                parts = [torch.empty_like(own) for _ in range(self.size)]
                dist.all_gather([self._flat(part) for part in parts], self._flat(own), group=self._group)
                return torch.cat(parts, dim=-1).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank."""
        self._require_rank(source, "broadcast from")
        with self._call("broadcast", tensor):
            if tensor.numel():
                with self._reachable(tensor) as held:
                    dist.broadcast(self._flat(held), self._ranks[source], group=self._group)

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Send a tensor to a rank."""
        self._require_rank(target, "send to", other=True)
        with self._call("send", tensor):
            if tensor.numel():
                with self._reachable(tensor.contiguous(), writes=False) as held:
                    dist.send(self._flat(held), self._ranks[target], group=self._group)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite a tensor with the next that a rank sent."""
        self._require_rank(source, "receive from", other=True)
        with self._call("receive", tensor):
            if tensor.numel():
                with self._reachable(tensor) as held:
                    dist.recv(self._flat(held), self._ranks[source], group=self._group)

    def barrier(self) -> None:
        """Return when every rank is here."""
        with self._call("barrier"):
            dist.barrier(self._group)

    def abort(self) -> None:
        """Let later calls raise and, with a library that can, those that wait."""
        self._ended = self._ended or "The group was aborted."
        if self._address.kind != "gloo" and hasattr(self._group, "abort"):
            with contextlib.suppress(RuntimeError):
                self._group.abort()

    def close(self) -> None:
        """Leave the group; that of the world ends its subgroups as well."""
        group, self._group = self._group, None
        # One that was aborted is gone, and to destroy it would wait for ranks that are.
        if group is not None and dist.is_initialized() and not (self._ended and self._address.kind != "gloo"):
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)

    # ------------------------------------------------------------------------------------------------- innards

    def _sum(self, tensor: torch.Tensor) -> None:
        is_exact = not (tensor.is_floating_point() or tensor.is_complex())
        num_bytes = tensor.numel() * tensor.element_size()
        if (is_exact and tensor.element_size() >= 4) or (self.size <= 2 and tensor.element_size() >= 4):
            dist.all_reduce(tensor, group=self._group)
        elif num_bytes * self.size <= _GATHERED_BYTES:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather([self._flat(part) for part in parts], self._flat(tensor), group=self._group)
            ordered_sum(parts, tensor)
        else:
            self._sum_slices(tensor)

    def _sum_slices(self, tensor: torch.Tensor) -> None:
        """Sum one slice on each rank, and gather the sums."""
        flat = tensor.view(-1)
        share = -(-flat.numel() // self.size)
        own, theirs = flat.new_zeros((2, self.size, share))
        own.view(-1)[: flat.numel()] = flat
        dist.all_to_all_single(self._flat(theirs), self._flat(own), group=self._group)
        ordered_sum(list(theirs), theirs[0])
        dist.all_gather([self._flat(part) for part in own], self._flat(theirs[0]), group=self._group)
        flat.copy_(own.view(-1)[: flat.numel()])

    @contextlib.contextmanager
    def _reachable(self, tensor: torch.Tensor, *, writes: bool = True) -> Iterator[torch.Tensor]:
        """Yield a tensor where the library reads and writes it: gloo is for host memory, to and from which others are copied.

        Args:
            tensor: Contiguous.
            writes: Whether its content is copied back afterwards.
        """
        if self._address.kind != "gloo" or tensor.device.type == "cpu":
            yield tensor
            return
        held = tensor.cpu()
        yield held
        if writes:
            tensor.copy_(held)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor in one dimension; as bytes for gloo, which does not know every dtype."""
        flat = tensor.view(-1)
        return flat.view(torch.uint8) if self._address.kind == "gloo" else flat

    @contextlib.contextmanager
    def _call(self, name: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        if self._group is None:
            raise CollectiveError(f"Rank {self.rank} has closed the group.")
        if self._ended:
            raise CollectiveError(self._ended)
        if tensor is not None and name not in ("all_gather", "send") and not tensor.is_contiguous():
            raise CollectiveError(
                f"{name} needs a contiguous tensor, not strides {tensor.stride()} of {tuple(tensor.shape)}."
            )
        self._num_calls += 1
        try:
            yield
        except RuntimeError as error:
            if not self._ended:
                told = f"{name} (call {self._num_calls}) of rank {self.rank} failed"
                self._ended = f"{told}: {_first_words(error)}.{self._silent()}"
            raise CollectiveError(self._ended, hint=_hint(error)) from error

    def _silent(self) -> str:
        """Say that a call failed, and return which ranks do not say so."""
        keys = {rank: f"failed {self._address.members} {rank}" for rank in range(self.size)}
        missing: list[int] = []
        with contextlib.suppress(RuntimeError):
            self._store.set(keys[self.rank], "")
            others = [key for rank, key in keys.items() if rank != self.rank]
            with contextlib.suppress(RuntimeError):
                self._store.wait(others, datetime.timedelta(seconds=_REPORT_S))
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
        return f" Not heard of: rank {', '.join(map(str, missing))}." if missing else ""

    def _require_rank(self, rank: int, said: str, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            raise CollectiveError(f"Rank {self.rank} cannot {said} rank {rank} in a group of {self.size}.")


def _first_words(error: RuntimeError) -> str:
    """Return the first line of an error, without the advice to look elsewhere, and the reason that NCCL gives after it. Pure."""
    first, _, rest = str(error).partition("\n")
    _, _, reason = rest.partition("Last error:\n")
    words = [first.partition(". This is typically")[0], *reason.splitlines()[:1]]
    return "; ".join(one.strip().rstrip(".") for one in words)


def _hint(error: RuntimeError) -> str:
    """Return the remedy of an error that has one. Pure."""
    if _SHARED_DEVICE not in str(error):
        return ""
    return 'NCCL takes one rank for each CUDA device: name more devices, start fewer ranks, or set collective = "gloo" in the executor\'s table.'
