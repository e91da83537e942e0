"""A model that was built without weights becomes one rank's share of it: modules of local size, and which parts of which weights they need.

    colwise                  q_proj, gate_proj …   fewer outputs, by heads where they are heads
    rowwise                  o_proj, down_proj …   fewer inputs, outputs summed
    colwise_gather_output    lm_head …             fewer outputs, gathered; a vocabulary is padded to equal parts
    rowwise_split_input                            whole inputs, of which a part is taken
    packed_colwise, _rowwise gate_up_proj          the same share of each half (packed_colwise_3: of each third)
    embedding_rowwise        embed_tokens          some tokens' rows
    moe_tp_experts, all_reduce                     outputs summed
    grouped_gemm             experts               some of the experts, whole
    ep_dispatch_experts                            what is routed to them, summed
    first_rank               biases of experts     whole on the first rank, zeros on the others

Source of the styles: ``transformers.distributed.tensor_parallel``, transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.interfaces import Collective
from trencadis_torch.parallel.cuts import Cut, even, halves, padded
from trencadis_torch.parallel.experts import OwnExperts
from trencadis_torch.parallel.fused import gates_side_by_side, heads_side_by_side
from trencadis_torch.parallel.heads import Heads, divides, set_local_heads
from trencadis_torch.parallel.modules import GatheredLinear, RowLinear, Summed, VocabEmbedding, sum_outputs
from trencadis_torch.parallel.placement import ExpertPlacement, ExpertSlots
from trencadis_torch.parallel.plan import expand_plan, plan_of

__all__ = ["Piece", "Sharding", "keep_whole", "shard"]

_KV: Final = ("k_proj", "v_proj")
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "query_key_value", "c_attn", "qkv_proj")
_ONE_EACH: Final = ("kv_b_proj", "query_key_value", "c_attn")
"""Projections of attentions in which every query head has a KV head of its own."""

_BY_HEADS: Final = {"colwise", "packed_colwise_3", "qkv"}
_SIZES: Final = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim")
_PARTS: Final = {"packed_colwise": 2, "packed_rowwise": 2, "packed_colwise_3": 3}


@attrs.frozen
class Piece:
    """Where a parameter of the share comes from.

    Attributes:
        names: Names of the whole parameter in the model as transformers builds it; several, if it is tied.
        cut: The part; None: all of it.
        transposed: The whole one is stored the other way round.
    """

    names: tuple[str, ...]
    cut: Cut | None = None
    transposed: bool = False


@attrs.frozen(kw_only=True)
class Sharding:
    """Result of :func:`shard`.

    Attributes:
        pieces: By the ``id`` of each parameter of the share.
        num_parameters: Elements of the whole model.
        num_divided: Number of these elements that the ranks divide.
        heads: First and one past the last KV head here, counted over all ranks; None: layers differ.
        num_heads: Query heads of a layer here.
        expert_widths: Hidden sizes of experts here.
        layers: Those of this stage; None: all.
    """

    pieces: dict[int, Piece]
    num_parameters: int
    num_divided: int
    heads: tuple[int, int] | None
    num_heads: int
    expert_widths: frozenset[int] = frozenset()
    layers: range | None = None


def shard(
    model: Any,
    group: Collective,
    configured: dict[str, str],
    *,
    experts: ExpertPlacement | None = None,
    own_tokens: bool = False,
) -> Sharding:
    """Make a model one rank's share, in place.

    Args:
        model: Model as transformers builds it, its parameters without memory.
        group: The ranks.
        configured: Styles from the configuration, before those of the model.
        experts: Where whole experts are; None: each rank has a share of every expert.
        own_tokens: Ranks have different tokens; see :func:`plan_of`.

    Raises:
        ConfigValueError: The configuration names what is not there, or loads of experts are of another model.
        ModelLoadError: There is no plan, or it cannot be followed.
    """
    plan = plan_of(model, configured, whole_experts=experts is not None, own_tokens=own_tokens)
    styles = expand_plan(model, plan)
    _check_names(model, configured)
    return _Sharder(model, group, styles, experts or ExpertPlacement(num_ranks=group.size)).run()


def keep_whole(model: Any) -> Sharding:
    """Return the sharding of a model whose layers are whole on each rank.

    Args:
        model: Model as transformers builds it.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    config = model.config.get_text_config(decoder=True)
    return Sharding(
        pieces={key: Piece(tuple(own)) for key, own in names.items()},
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_divided=0,
        heads=None,
        num_heads=int(getattr(config, "num_attention_heads", 0) or 0),
    )


def _check_names(model: Any, configured: dict[str, str]) -> None:
    unknown = [name for name in configured if not expand_plan(model, {name: "colwise"})]
    if unknown:
        raise ConfigValueError(
            f"tensor_plan of the backend: {type(model).__name__} has no module or parameter {', '.join(sorted(unknown))}.",
            hint="Names are those of the model in transformers, numbers of layers and experts written as *.",
        )


class _Sharder:
    """One model on its way."""

    def __init__(self, model: Any, group: Collective, styles: dict[str, str], experts: ExpertPlacement) -> None:
        self._model = model
        self._group = group
        self._styles = styles
        self._experts = experts
        self._slots: dict[str, ExpertSlots] = {}
        self._place = {"rank": group.rank, "size": group.size}
        self._names: dict[int, list[str]] = {}
        self._whole: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
            self._whole[id(parameter)] = parameter
        self._made: dict[tuple[int, Piece], nn.Parameter] = {}
        self._pieces: dict[int, Piece] = {}
        self._divided: set[int] = set()
        self._expert_widths: set[int] = set()
        # Of each attention: the first KV head here, one past the last, and how many all ranks have.
        self._kv_heads: set[tuple[int, int, int]] = set()
        config = model.config.get_text_config(decoder=True)
        self._num_heads = int(getattr(config, "num_attention_heads", 0) or 0)
        self._local_heads = self._num_heads
        self._all_heads = self._find_heads()

    def run(self) -> Sharding:
        self._split_fused()
        modules = dict(self._model.named_modules())
        # Parameters first: a module's style may say what becomes of its output, and that is all then.
        for name, style in self._styles.items():
            if name not in modules:
                self._parameter(name, style)
        for name, module in modules.items():
            if name in self._styles:
                self._module(name, module, self._styles[name])
        self._set_heads()
        for parameter in self._model.parameters():
            if id(parameter) not in self._pieces:
                self._pieces[id(parameter)] = Piece(tuple(self._names[id(parameter)]))
        sizes = {key: parameter.numel() for key, parameter in self._whole.items()}
        return Sharding(
            pieces=self._pieces,
            num_parameters=sum(sizes.values()),
            num_divided=sum(sizes[key] for key in self._divided),
            heads=self._kv_heads.pop()[:2] if len(self._kv_heads) == 1 else None,
            num_heads=self._local_heads,
            expert_widths=frozenset(self._expert_widths),
        )

    # ---------------------------------------------------------------------------------------------- parameters

    def _cut(self, module: nn.Module, name: str, cut: Cut, *, transposed: bool = False) -> None:
        """Give a module a part of a parameter; tied ones stay tied."""
        whole = getattr(module, name)
        if whole is None:
            return
        piece = Piece(tuple(self._names[id(whole)]), cut, transposed)
        made = self._made.get((id(whole), piece))
        if made is None:
            shape = cut.shape(whole.t().shape if transposed else whole.shape)
            made = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), requires_grad=False)
            self._made[id(whole), piece] = made
            self._pieces[id(made)] = piece
            self._divided.add(id(whole))
        setattr(module, name, made)

    def _parameter(self, name: str, style: str) -> None:
        """Divide a parameter that a plan names itself: experts, sinks."""
        owner, _, own = name.rpartition(".")
        module = self._model.get_submodule(owner)
        whole = getattr(module, own)
        if whole is None:
            return
        if style == "first_rank":
            if self._group.rank:
                self._cut(module, own, Cut(0, (), whole.shape[0]))
            return
        if style == "grouped_gemm":
            slots = self._slots[owner] = self._experts.of(owner, whole.shape[0])
            cut = slots.cut(self._group.rank)
            self._cut(module, own, cut)
            module.num_experts = cut.size
            return
        dims = {"colwise": -2, "packed_colwise": -2, "packed_colwise_3": -2, "rowwise": -1, "packed_rowwise": -1}
        if style not in dims:
            raise ModelLoadError(
                f'{type(self._model).__name__}: its plan divides {name} as "{style}"; that is for modules.'
            )
        if whole.dim() == 1 and dims[style] == -1:
            return  # a bias of outputs that every rank has
        dim = 0 if whole.dim() == 1 else whole.dim() + dims[style]
        parts = _PARTS.get(style, 1)
        cut = halves(whole.shape[dim], dim=dim, what=name, parts=parts, **self._place)
        self._cut(module, own, cut)
        if whole.dim() == 3:
            self._expert_widths.add(cut.size // parts)
        for attribute in _SIZES:
            if module.__dict__.get(attribute) == whole.shape[dim] // parts:
                setattr(module, attribute, cut.size // parts)

    # ------------------------------------------------------------------------------------------------- modules

    def _module(self, name: str, module: Any, style: str) -> None:
        if style == "moe_tp_experts":
            self._put(name, Summed(module, self._group))
        elif style == "all_reduce":
            sum_outputs(module, self._group)
        elif style == "ep_dispatch_experts":
            if name not in self._slots:
                raise ModelLoadError(
                    f'{type(self._model).__name__}: its plan gives {name} the style "{style}", and none of its parameters "grouped_gemm".'
                )
            self._put(name, OwnExperts(module, self._slots[name], self._group))
        elif style == "embedding_rowwise":
            self._embedding(name, module)
        else:
            linear, is_transposed = self._linear(name, module, style)
            if style.startswith("rowwise"):
                self._row(name, linear, is_transposed, splits=style == "rowwise_split_input")
            else:
                self._column(name, linear, is_transposed, style)

    def _linear(self, name: str, module: Any, style: str) -> tuple[nn.Linear, bool]:
        """Return a linear layer as a plain one, and whether its weight is stored the other way round, as GPT-2's are."""
        if isinstance(module, nn.Linear):
            return module, False
        if type(module).__name__ != "Conv1D":
            raise ModelLoadError(
                f'{type(self._model).__name__}: its plan divides {name} as "{style}", and that is a {type(module).__name__}, no linear '
                "layer.",
                hint='Give it the style "replicate" in the tensor_plan of the backend.',
            )
        num_inputs, num_outputs = module.weight.shape
        linear = nn.Linear(num_inputs, num_outputs, device="meta", dtype=module.weight.dtype)
        linear.weight, linear.bias = module.weight, module.bias
        self._put(name, linear)
        return linear, True

    def _row(self, name: str, linear: nn.Linear, is_transposed: bool, *, splits: bool) -> None:
        cut = even(linear.in_features, dim=1, what=name, **self._place)
        bias: nn.Parameter | None = linear.bias
        linear.register_parameter("bias", None)
        self._cut(linear, "weight", cut, transposed=is_transposed)
        linear.in_features = cut.size
        self._put(name, RowLinear(linear, bias, self._group, splits=splits))

    def _column(self, name: str, linear: nn.Linear, is_transposed: bool, style: str) -> None:
        num = linear.out_features
        if style == "colwise_gather_output":
            cut = padded(num, dim=0, **self._place)
        else:
            cut = self._outputs(name, linear, style)
        self._cut(linear, "weight", cut, transposed=is_transposed)
        self._cut(linear, "bias", cut)
        linear.out_features = cut.size
        if style == "colwise_gather_output":
            self._put(name, GatheredLinear(linear, num, self._group))

    def _outputs(self, name: str, linear: nn.Linear, style: str) -> Cut:
        """Return which outputs are this rank's: whole heads, if they are keys or values."""
        owner, _, own = name.rpartition(".")
        if own in _ATTENTION and style in _BY_HEADS and owner in self._all_heads:
            self._heads_of(owner)  # first: sizes that only the width goes over are not legal
        if own in _KV and style == "colwise":
            heads = self._heads_of(owner)
            dim = linear.out_features // self._all_heads[owner][1]
            last_kv = heads.first_kv + heads.num_kv
            return Cut(0, ((heads.first_kv * dim, last_kv * dim),), heads.num_kv * dim)
        if style == "qkv":
            heads, (num_heads, num_kv_heads) = self._heads_of(owner), self._all_heads[owner]
            dim = linear.out_features // (num_heads + 2 * num_kv_heads)
            starts = [heads.first_query, num_heads + heads.first_kv, num_heads + num_kv_heads + heads.first_kv]
            sizes = [heads.num_query, heads.num_kv, heads.num_kv]
            pairs = zip(starts, sizes, strict=True)
            ranges = tuple((first * dim, (first + num) * dim) for first, num in pairs)
            return Cut(0, ranges, sum(sizes) * dim)
        return halves(linear.out_features, dim=0, what=name, parts=_PARTS.get(style, 1), **self._place)

    def _embedding(self, name: str, module: Any) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            raise ModelLoadError(
                f"{type(self._model).__name__}: {name} is a {type(module).__name__}, no plain embedding.",
                hint='Give it the style "replicate" in the tensor_plan of the backend.',
            )
        cut = padded(module.num_embeddings, dim=0, **self._place)
        self._cut(module, "weight", cut)
        module.num_embeddings, module.padding_idx = cut.size, None
        first, last = cut.ranges[0] if cut.ranges else (0, 0)
        self._put(name, VocabEmbedding(module, first=first, num_rows=last - first, group=self._group))

    def _put(self, name: str, module: nn.Module) -> None:
        owner, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(owner), own, module)

    # --------------------------------------------------------------------------------------------------- heads

    def _find_heads(self) -> dict[str, tuple[int, int]]:
        """Return query and KV heads of each attention module over all ranks; before anything is divided.

        What the weights say counts more than the configuration, which some layers deviate from.
        """
        found = {}
        for name, module in self._model.named_modules():
            if "layer_idx" not in module.__dict__ or not any(hasattr(module, own) for own in _ATTENTION):
                continue
            config = getattr(module, "config", None) or self._model.config.get_text_config(decoder=True)
            num_heads = _number(module, config, ("num_heads", "num_attention_heads")) or self._num_heads
            num_kv_heads = _number(module, config, ("num_key_value_heads",)) or num_heads
            if any(hasattr(module, own) for own in _ONE_EACH):
                num_kv_heads = num_heads
            dim, keys = module.__dict__.get("head_dim"), getattr(module, "k_proj", None)
            if dim and isinstance(keys, nn.Linear) and keys.out_features % dim == 0:
                num_kv_heads = keys.out_features // dim
            fused = getattr(module, "qkv_proj", None)
            if dim and isinstance(fused, nn.Linear) and fused.out_features % dim == 0:
                num_kv_heads = (fused.out_features // dim - num_heads) // 2
            found[name] = num_heads, num_kv_heads
        return found

    def _heads_of(self, owner: str) -> Heads:
        """Return this rank's heads of an attention module."""
        if owner not in self._all_heads:
            raise ModelLoadError(
                f"{type(self._model).__name__}: its plan divides keys of {owner}, whose heads are not known here.",
                hint='Give them the style "replicate" in the tensor_plan of the backend, or set [parallel] tensor = 1.',
            )
        num_heads, num_kv_heads = self._all_heads[owner]
        return Heads.of(num_heads, num_kv_heads, what=f"{type(self._model).__name__} ({owner})", **self._place)

    def _set_heads(self) -> None:
        """Give attention modules whose heads were divided the numbers of this rank, and note its KV heads."""
        for name, (num_heads, num_kv_heads) in self._all_heads.items():
            if not {self._styles.get(f"{name}.{own}") for own in _ATTENTION} & _BY_HEADS:
                self._kv_heads.add((0, num_kv_heads, num_kv_heads))
                continue
            heads = self._heads_of(name)
            module = self._model.get_submodule(name)
            set_local_heads(module, heads, num_heads=num_heads, num_kv_heads=num_kv_heads)
            self._kv_heads.add((heads.first_kv, heads.first_kv + heads.num_kv, num_kv_heads))
            self._local_heads = self._num_heads // self._group.size

    def _split_fused(self) -> None:
        """Divide fused projections of attentions and MLPs whose outputs would be gathered, where a trial shows how."""
        for name, fused, out in list(self._fused_pairs()):
            module = self._model.get_submodule(name)
            if fused == "gate_up_proj":
                is_known = gates_side_by_side(module, fused=fused, out=out)
                style = "packed_colwise"
            else:
                num_heads, num_kv_heads = self._all_heads.get(name, (0, 0))
                is_known = divides(num_heads, num_kv_heads, self._group.size) and heads_side_by_side(
                    module, num_heads=num_heads, num_kv_heads=num_kv_heads, fused=fused, out=out
                )
                style = "qkv"
            if is_known:
                self._styles.update({f"{name}.{fused}": style, f"{name}.{out}": "rowwise"})

    def _fused_pairs(self) -> Iterator[tuple[str, str, str]]:
        for name in self._styles:
            owner, _, own = name.rpartition(".")
            out = {"qkv_proj": "o_proj", "gate_up_proj": "down_proj"}.get(own, "")
            if (
                self._styles[name] == "colwise_gather_output"
                and self._styles.get(f"{owner}.{out}") == "rowwise_split_input"
            ):
                yield owner, own, out


def _number(module: Any, config: Any, names: tuple[str, ...]) -> int:
    """Return the first number that a module, or else its configuration, has under one of some names; 0: none."""
    for place in (module, config):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and value:
                return value
    return 0
