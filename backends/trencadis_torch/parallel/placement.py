"""Which rank has which experts: as many on each, in order, or by loads that were measured."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.files import read_json
from trencadis_torch.parallel.balancing import place_experts
from trencadis_torch.parallel.cuts import Cut

__all__ = ["ExpertPlacement", "ExpertSlots", "layer_of", "read_loads"]


@attrs.frozen(kw_only=True)
class ExpertSlots:
    """The experts of one layer on each rank.

    Attributes:
        num_experts: Number of experts of the model.
        ranks: For each rank its experts, as many on each; one that is there several times has copies.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def cut(self, rank: int) -> Cut:
        """Return a rank's part of a parameter whose first dimension is the experts. Pure."""
        return Cut(0, tuple(_ranges(self.ranks[rank])), len(self.ranks[rank]))

    def copies(self) -> list[list[tuple[int, int]]]:
        """Return for each expert its copies: rank, and place there. Pure."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.ranks):
            for place, expert in enumerate(experts):
                found[expert].append((rank, place))
        return found


def _ranges(experts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield experts in order as ranges, first and one past the last of each."""
    first = 0
    for place in range(1, len(experts) + 1):
        if place == len(experts) or experts[place] != experts[place - 1] + 1:
            yield experts[first], experts[place - 1] + 1
            first = place


@attrs.frozen(kw_only=True)
class ExpertPlacement:
    """How whole experts are spread over ranks, the same on every rank.

    Attributes:
        num_ranks: Over which they are spread.
        loads: Measured loads of the experts by layer; None: experts that follow each other are on one rank.
        num_redundant: Copies of a layer's experts beyond one of each.
        source: Names the loads in an error.
    """

    num_ranks: int
    loads: Mapping[int, tuple[float, ...]] | None = None
    num_redundant: int = 0
    source: str = ""

    def of(self, name: str, num_experts: int) -> ExpertSlots:
        """Return the experts of each rank. Pure.

        Args:
            name: Name of the module that has the experts.
            num_experts: Number of experts of the model.

        Raises:
            ConfigValueError: The loads are of another model.
            ModelLoadError: So many experts do not go over so many ranks.
        """
        self._check(name, num_experts)
        num_physical = num_experts + self.num_redundant
        placed = list(range(num_experts))
        if self.loads is not None:
            loads = self._loads_of(name, num_experts)
            placed = place_experts([loads], num_physical=num_physical, num_ranks=self.num_ranks)[0].tolist()
        each = num_physical // self.num_ranks
        ranks = tuple(tuple(placed[each * rank : each * rank + each]) for rank in range(self.num_ranks))
        return ExpertSlots(num_experts=num_experts, ranks=ranks)

    def _check(self, name: str, num_experts: int) -> None:
        if (num_experts + self.num_redundant) % self.num_ranks == 0:
            return
        if self.num_redundant:
            least = -num_experts % self.num_ranks
            raise ModelLoadError(
                f"[backend.torch] redundant_experts = {self.num_redundant}: {name} has {num_experts} experts, "
                f"{num_experts + self.num_redundant} with these, not a multiple of {self.num_ranks} ranks.",
                hint=f"Set it to one of: {least}, {least + self.num_ranks}, {least + 2 * self.num_ranks}.",
            )
        legal = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0][:12]
        raise ModelLoadError(
            f"[parallel] expert = {self.num_ranks}: {name} has {num_experts} experts, not a multiple of {self.num_ranks}.",
            hint=f"Set [parallel] tensor and expert to one of: {', '.join(legal)}; or expert to 1, for a share of every expert.",
        )

    def _loads_of(self, name: str, num_experts: int) -> tuple[float, ...]:
        assert self.loads is not None, "asked for where they are"
        layer = layer_of(name)
        loads = self.loads.get(layer)
        if loads is None or len(loads) != num_experts:
            found = f"nothing of layer {layer}" if loads is None else f"{len(loads)} loads in layer {layer}"
            raise ConfigValueError(
                f"{self.source}: it has {found}; {name} has {num_experts} experts.",
                hint='Measure loads with this model, or set [backend.torch] expert_placement = "linear".',
            )
        return loads

    @property
    def digest(self) -> int:
        """A number that is another one for other placements, 0 .. 2^32 - 1; 0 without loads."""
        if self.loads is None:
            return 0
        content = [self.num_redundant, sorted((layer, list(loads)) for layer, loads in self.loads.items())]
        return zlib.crc32(json.dumps(content).encode()) or 1


def layer_of(name: str) -> int:
    """Return the number of the layer in the name of a module, 0 if there is none. Pure."""
    number = re.search(r"\.(\d+)\.", name)
    return 0 if number is None else int(number[1])


def read_loads(path: str) -> tuple[dict[int, tuple[float, ...]], str]:
    """Return measured loads by layer, and words that name their file.

    Args:
        path: JSON: an object from the number of each layer to a list with one number for each expert, as
            ``trencadis expert-loads`` writes it.

    Raises:
        ConfigValueError: It cannot be read, or is no such object.
    """
    where = f'[backend.torch] expert_loads = "{path}"'
    hint = 'Write it with: trencadis expert-loads. It looks like {"0": [120, 98, 5, 77], "1": [...]}.'
    try:
        found: Any = read_json(Path(path).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # no such home
        raise ConfigValueError(f"{where}: it cannot be read: {error}.", hint=hint) from error
    if not isinstance(found, dict) or not found or not all(map(str.isdecimal, found)):
        raise ConfigValueError(f"{where}: it is no object from numbers of layers to lists.", hint=hint)
    for layer, loads in found.items():
        if not isinstance(loads, list) or not loads or not all(map(_is_load, loads)):
            raise ConfigValueError(f"{where}: layer {layer}: {str(loads)[:60]} is no list of numbers >= 0.", hint=hint)
    return {int(layer): tuple(map(float, loads)) for layer, loads in found.items()}, where


def _is_load(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and math.isfinite(value)
