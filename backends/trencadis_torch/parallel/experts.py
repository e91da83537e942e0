"""Whole experts on each of several ranks, and counts of the tokens that are routed to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from torch import nn

from trencadis.interfaces import Collective
from trencadis.records import Pass
from trencadis_torch.device import to_device
from trencadis_torch.parallel.balancing import balance_ratio
from trencadis_torch.parallel.modules import summing
from trencadis_torch.parallel.placement import ExpertSlots, layer_of

__all__ = ["ExpertLoads", "OwnExperts", "load_metrics", "real_tokens"]


class OwnExperts(nn.Module):
    """Experts, each rank of which has some; each computes what is routed to its own, and the ranks' outputs are summed.

    The ranks hold the same tokens, so nothing has to be sent to where an expert is, and one sum brings the outputs together: as many
    exchanges as where every rank has a share of every expert. The experts are called with one route for each row.

    On a CPU rows of routes to other ranks are left out. On a device, where their number would have to be waited for, they are
    computed with an expert that is here, from zeros and with weight 0.

    Of an expert with copies one is chosen for each token by the sum of the experts that the token is routed to. Every rank chooses
    alike, the choice does not depend on what else is in the batch, and tokens with other companions of the expert go elsewhere.

    Args:
        local: The experts of this rank, called with hidden states, the experts of each token, and their weights.
        slots: Experts of the layer on each rank.
        group: The ranks.

    Attributes:
        count: Called with the experts of each token, ``[T, k]``, before they are computed; None: nothing is.
    """

    _places: torch.Tensor
    _num_copies: torch.Tensor

    def __init__(self, local: nn.Module, slots: ExpertSlots, group: Collective) -> None:
        super().__init__()
        self.local = local
        self.slots = slots
        self.count: Callable[[torch.Tensor], None] | None = None
        self._sum = summing(group)
        copies = slots.copies()
        num_copies = [len(one) for one in copies]
        places = torch.full((max(num_copies), slots.num_experts), -1)
        for expert, own in enumerate(copies):
            for copy, (rank, place) in enumerate(own):
                if rank == group.rank:
                    places[copy, expert] = place
        self._has_copies = max(num_copies) > 1
        self.register_buffer("_places", places, persistent=False)
        self.register_buffer("_num_copies", torch.tensor(num_copies), persistent=False)

    def forward(self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return ``[T, hidden size]`` on every rank.

        Args:
            hidden_states: ``[T, hidden size]``.
            experts: Experts of each token, counted over the model, int64 ``[T, k]``.
            weights: Theirs, ``[T, k]``.
        """
        if self.count is not None:
            self.count(experts)
        places = self._places_of(experts)
        compute = self._compute_own if hidden_states.device.type == "cpu" else self._compute_all
        return self._sum(compute(hidden_states, places, weights))

    def _places_of(self, experts: torch.Tensor) -> torch.Tensor:
        """Return where here each route is computed, -1 of those that another rank computes, int64 ``[T, k]``."""
        if not self._has_copies:
            return self._places[0][experts]
        copy = experts.sum(-1, keepdim=True) % self._num_copies[experts]
        return self._places[copy, experts]

    def _compute_own(self, hidden_states: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the outputs; computes its own routes alone, and waits for their number."""
        tokens, routes = (places >= 0).nonzero(as_tuple=True)
        out = torch.zeros_like(hidden_states)
        if len(tokens):
            routed = self.local(hidden_states[tokens], places[tokens, routes, None], weights[tokens, routes, None])
            out.index_add_(0, tokens, routed.to(out.dtype))
        return out

    def _compute_all(self, hidden_states: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the same from as many rows as there are routes; looks at nothing on the host."""
        num_tokens, num_routes = places.shape
        is_other = (places < 0).view(-1, 1)
        # Zeros, for an expert that a token was not routed to may overflow, and no weight makes a number of that.
        rows = hidden_states.repeat_interleave(num_routes, 0).masked_fill(is_other, 0)
        routed = self.local(
            rows, places.reshape(-1, 1).masked_fill(is_other, 0), weights.reshape(-1, 1).masked_fill(is_other, 0)
        )
        out: torch.Tensor = routed.view(num_tokens, num_routes, -1).sum(1).to(hidden_states.dtype)
        return out.contiguous()


@attrs.frozen
class _Layer:
    """Experts of one layer, and where their counts are."""

    slots: ExpertSlots
    totals: torch.Tensor


class ExpertLoads:
    """Counts the tokens that each expert of a share gets in passes; padding is left out. One thread counts, any reads.

    Args:
        model: A share whose ranks have whole experts.
    """

    def __init__(self, model: Any) -> None:
        self._layers: dict[int, _Layer] = {}
        self._device = torch.device("cpu")
        self._weights: torch.Tensor | None = None
        for name, module in model.named_modules():
            if isinstance(module, OwnExperts):
                self._device = next(module.buffers(recurse=False)).device
                totals = torch.zeros(module.slots.num_experts, dtype=torch.int64, device=self._device)
                layer = self._layers[layer_of(name)] = _Layer(module.slots, totals)
                module.count = self._counter(layer.totals)

    def _counter(self, totals: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def count(experts: torch.Tensor) -> None:
            if self._weights is not None:
                totals.index_add_(0, experts.reshape(-1), self._weights[:, None].expand_as(experts).reshape(-1))

        return count

    @contextlib.contextmanager
    def counting(self, real: npt.NDArray[np.int64]) -> Iterator[None]:
        """Count what is routed within this context; what is outside of passes is not counted.

        Args:
            real: 1 for each token and 0 for padding, in the order in which experts get them, int64 ``[T]``.
        """
        self._weights = to_device(real, self._device)
        try:
            yield
        finally:
            self._weights = None

    def metrics(self) -> str:
        """Return the counts in Prometheus' text format; waits for what the device has to do."""
        counts = {index: layer.totals.cpu().numpy() for index, layer in self._layers.items()}
        return load_metrics(counts, {index: layer.slots for index, layer in self._layers.items()})


def real_tokens(one: Pass, *, padded: bool) -> npt.NDArray[np.int64]:
    """Return 1 for each token of a pass and 0 for padding, int64 ``[T]``. Pure.

    Args:
        one: The pass.
        padded: It is padded to its bucket.
    """
    if not padded:
        return np.ones(int(one.query_lens.sum()), np.int64)
    lengths = np.zeros(one.bucket.batch_size, np.int64)
    lengths[: len(one.query_lens)] = one.query_lens
    real: npt.NDArray[np.int64] = (np.arange(one.bucket.query_len) < lengths[:, None]).astype(np.int64)
    return real.reshape(-1)


def load_metrics(counts: Mapping[int, npt.NDArray[np.int64]], slots: Mapping[int, ExpertSlots]) -> str:
    """Return counts of tokens in Prometheus' text format. Pure.

    Args:
        counts: Number of tokens of each expert, by layer.
        slots: Experts of each layer on each rank.
    """
    tokens = CounterMetricFamily(
        "trencadis_torch_expert_tokens", "Tokens routed to an expert, padding left out.", labels=("layer", "expert")
    )
    balance = GaugeMetricFamily(
        "trencadis_torch_expert_balance_ratio",
        "Mean by greatest of the tokens that ranks computed with a layer's experts: 1 where all have as much to do.",
        labels=("layer",),
    )
    for layer, own in counts.items():
        for expert, number in enumerate(own.tolist()):
            tokens.add_metric((str(layer), str(expert)), number)
        ranks = slots[layer].ranks
        ratio = balance_ratio([own], [np.concatenate(ranks)], num_ranks=len(ranks))
        balance.add_metric((str(layer),), float(ratio[0]))
    registry = CollectorRegistry()
    registry.register(_Families([tokens, balance]))
    return generate_latest(registry).decode()


class _Families:
    """Families of metrics as a collector."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        """Return them."""
        return self._families
