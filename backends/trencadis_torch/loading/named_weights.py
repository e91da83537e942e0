"""A checkpoint's weights by the names that the model has for them: renamed, split, stacked as transformers does it, a few at a time.

Published names differ from a model's: prefixes, one weight of each expert where the model has one for all, projections side by side that
the model has one by one. transformers' own rules say which (``transformers.conversion_mapping``); here they are applied to the weights of
one layer, not to a whole checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.held import FloatWeight, HeldWeight, JoinedWeight, Matrices, StackedWeight

__all__ = ["NamedWeights"]


@attrs.frozen(eq=False)
class _Group:
    """Weights of the files that become one or several of the model.

    Attributes:
        targets: Names in the model.
        sources: Names in the files, each with the pattern of the rule that it matched.
        rule: Rule of transformers; None: the one weight is as it is.
    """

    targets: tuple[str, ...]
    sources: list[tuple[str, str]]
    rule: Any | None


class NamedWeights:
    """Weights of a source, by a model's names.

    Args:
        model: Model of transformers; its weights need no memory.
        source: The checkpoint.
        names: Those of its weights that are the model's; None: all.
        rules: Rules of transformers, by which weights are renamed and converted; None: the model's.
    """

    def __init__(
        self, model: Any, source: WeightSource, *, names: Iterable[str] | None = None, rules: list[Any] | None = None
    ) -> None:
        self._model = model
        self._source = source
        self._groups: dict[str, _Group] = {}
        self._wanted: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        for name, renamed, rule, pattern in self._renamed(source.names() if names is None else names, rules):
            first = self._groups.get(renamed)
            if first is None:
                targets = [renamed]
                if rule is not None:
                    targets = [renamed.replace(rule.target_patterns[0], other) for other in rule.target_patterns]
                first = _Group(tuple(targets), [], copy.deepcopy(rule))
                self._groups.update(dict.fromkeys(targets, first))
            first.sources.append((name, pattern))

    def _renamed(self, names: Iterable[str], rules: list[Any] | None) -> Iterable[tuple[str, str, Any | None, str]]:
        """Yield the name of each weight of the files, its name in the model, and the rule with its pattern, if there is one.

        Source: ``transformers.core_model_loading.convert_and_load_state_dict_in_model``, transformers 5.24.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(self._model) if rules is None else rules
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, wanted = self._model.base_model_prefix, self._wanted
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if renamed not in wanted and name in wanted:
                renamed, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
            if renamed in wanted:
                yield name, renamed, None if pattern is None else by_pattern[pattern], pattern or ""

    def has(self, name: str) -> bool:
        """Return whether there is a weight of that name in the model."""
        return name in self._groups

    def names(self) -> frozenset[str]:
        """Return the names in the model of all weights that there are."""
        return frozenset(self._groups)

    def of_another_shape(self) -> list[str]:
        """Return names of weights that need no rule and whose shape is not the model's."""
        return [
            name
            for name, group in self._groups.items()
            if group.rule is None and self._source.shape(group.sources[0][0]) != tuple(self._wanted[name].shape)
        ]

    def matrix(self, name: str) -> HeldWeight | None:
        """Return a matrix that is in the files as it is; None: it is made of others, or not there.

        Args:
            name: In the model.

        Raises:
            ModelLoadError: The source cannot read a tensor.
        """
        group = self._groups.get(name)
        return self._source.weight(group.sources[0][0]) if group is not None and group.rule is None else None

    def read(
        self,
        names: Iterable[str],
        is_matrix: Callable[[str], bool],
        is_stack: Callable[[str], bool] = lambda _: False,
    ) -> Iterator[tuple[str, HeldWeight | StackedWeight | torch.Tensor]]:
        """Yield weights by their names in the model, and those that are made together with them; nothing is kept here meanwhile.

        Args:
            names: In the model.
            is_matrix: Whether a name is a matrix that may be held in a form of its own; any other comes as a tensor.
            is_stack: Whether a name is the matrices of a layer's experts, which may be so as well.

        Raises:
            ModelLoadError: The source cannot read a tensor.
        """
        groups = {id(group): group for name in names if (group := self._groups.get(name)) is not None}
        for group in groups.values():
            target = group.targets[0]
            if is_stack(target) and (group.rule is None or _stacks(group)):
                yield target, self._stacked(group)
            elif group.rule is None:
                (target,), ((name, _),) = group.targets, group.sources[:1]
                yield target, self._source.weight(name) if is_matrix(target) else self._source.tensor(name)
            else:
                for target, tensor in self._made(group).items():
                    yield target, FloatWeight(tensor) if is_matrix(target) else tensor

    def _stacked(self, group: _Group) -> StackedWeight:
        """Return matrices of experts, each in the form of the file."""
        if group.rule is None:
            return self._source.stack(group.sources[0][0])
        names = [[name for name, one in group.sources if one == pattern] for pattern in group.rule.source_patterns]
        return StackedWeight(Matrices([partial(self._expert, each) for each in zip(*names, strict=True)]))

    def _expert(self, names: Sequence[str]) -> HeldWeight:
        parts = [self._source.weight(name) for name in names]
        return parts[0] if len(parts) == 1 else JoinedWeight(parts)

    def _made(self, group: _Group) -> dict[str, torch.Tensor]:
        """Return weights that are made by a rule of transformers."""
        rule = group.rule
        assert rule is not None
        for name, pattern in group.sources:
            rule.collected_tensors[pattern].append(lambda name=name: self._source.tensor(name))
        made = rule.convert(group.targets[0], model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def let_go(self) -> None:
        """Take pages of mapped files out of this process's memory."""
        self._source.let_go()


def _stacks(group: _Group) -> bool:
    """Return whether a rule puts one matrix of each expert into one weight, or several of each, side by side."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    merge, *more = list[Any](group.rule.operations if group.rule is not None else [None])
    patterns = {pattern for _, pattern in group.sources}
    is_merged = type(merge) is MergeModulelist and merge.dim == 0 and len(group.targets) == 1
    is_beside = len(more) == 1 and type(more[0]) is Concatenate and more[0].dim == 1
    return is_merged and (is_beside if len(patterns) > 1 else not more)
