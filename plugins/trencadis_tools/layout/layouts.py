"""Layouts of a model over some devices: which are legal, what each needs of a rank, and which one is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

import attrs

from trencadis.records import divide_layers
from trencadis_tools.layout.model import Attention, Division, Exchange, ModelPlan, Weight, divides

__all__ = [
    "LayoutNeeds",
    "Limits",
    "Traffic",
    "all_layouts",
    "expert_obstacle",
    "local_bytes",
    "pipeline_obstacle",
    "propose",
    "stages",
    "tensor_obstacle",
    "traffic",
]

_TOKEN_BYTES = 8
"""Of each row, the output rank sends its token and how many drafts stand, int32. Source: ``trencadis_torch.parallel.tokens``."""


@attrs.frozen(kw_only=True)
class Limits:
    """What the devices and the configuration give.

    Attributes:
        num_devices: N.
        memory_bytes: Of one device.
        memory_fraction: Share of what weights leave that the KV cache takes.
        max_bytes: The KV cache takes no more; 0: no cap.
        block_size: Tokens of a KV block.
        max_model_len: Longest sequence, tokens.
        max_num_seqs: Rows of a decode step.
        max_num_batched_tokens: Tokens of a prefill step.
    """

    num_devices: int
    memory_bytes: int
    memory_fraction: float
    max_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@attrs.frozen(kw_only=True)
class Traffic:
    """What a rank hands to collectives in one step; of several stages, that of the one with the most bytes.

    Attributes:
        num_bytes: Payload. A ring of n ranks moves 2 · (n - 1) / n of it for a sum.
        num_messages: Calls.
    """

    num_bytes: int = 0
    num_messages: int = 0


@attrs.frozen(kw_only=True)
class LayoutNeeds:
    """A legal layout.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Ranks over which whole experts are divided, 1 or ``tensor``.
        data: Copies.
        weights_bytes: Of the rank with the most.
        kv_bytes_per_token: Of the rank with the most.
        kv_heads: KV heads of a layer on a rank, most of all layers.
        kv_repeats: Ranks that have the same KV head.
        num_tokens: KV cache of one copy, tokens.
        num_sequences: Of these, sequences of the longest length.
        decode: Of a step of ``max_num_seqs`` rows.
        prefill: Of a step of ``max_num_batched_tokens`` tokens.
        unserved: Why it cannot be started with the configured components; empty: it can.
        misfit: Why it does not fit; empty: it does.
    """

    tensor: int
    pipeline: int
    expert: int
    data: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_heads: int
    kv_repeats: int
    num_tokens: int
    num_sequences: int
    decode: Traffic
    prefill: Traffic
    unserved: str = ""
    misfit: str = ""

    @property
    def num_ranks(self) -> int:
        """Of one copy."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """Sizes above 1, such as ``tensor 2 x data 4``."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "data": self.data}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


# ------------------------------------------------------------------------------------------------------ legality


def tensor_obstacle(plan: ModelPlan, tensor: int, *, expert: int = 1) -> str:
    """Return why layers cannot be divided over so many ranks, with the sizes that are legal; empty: they can. Pure.

    Source: ``trencadis_torch.parallel``, which refuses the same: heads (``heads``), equal parts (``cuts``), plans (``plan``).

    Args:
        plan: The model.
        tensor: Ranks.
        expert: Ranks over which whole experts are divided: the sizes of an expert are free then.
    """
    if tensor == 1:
        return ""
    if plan.obstacle:
        return plan.obstacle
    for one in plan.attentions:
        if one.division == "heads" and not divides(one.num_heads, one.num_kv_heads, tensor):
            legal = _listed(one.num_heads, lambda n, one=one: divides(one.num_heads, one.num_kv_heads, n))  # type: ignore[misc]
            return f"{one.num_heads} query heads and {one.num_kv_heads} KV heads go over {legal} ranks"
    for weight in plan.weights:
        if not _is_even(weight, tensor, expert):
            legal = _listed(weight.size, lambda n, size=weight.size: size % n == 0)  # type: ignore[misc]
            return f"{weight.size} outputs or inputs of {weight.name} go over {legal} ranks"
    return ""


def _is_even(weight: Weight, tensor: int, expert: int) -> bool:
    if weight.division is not Division.EVEN or (expert > 1 and weight.is_of_experts):
        return True
    return weight.size % tensor == 0 or (weight.heads is not None and not divides(*weight.heads, tensor))


def pipeline_obstacle(plan: ModelPlan, pipeline: int) -> str:
    """Return why there cannot be so many stages; empty: there can. Pure."""
    return "" if pipeline <= plan.num_layers else f"{plan.num_layers} layers make 1 to {plan.num_layers} stages"


def expert_obstacle(plan: ModelPlan, expert: int) -> str:
    """Return why whole experts cannot be divided over so many ranks; empty: they can. Pure."""
    if expert == 1:
        return ""
    if not plan.num_experts:
        return "the model has no experts, or its plan does not divide them as wholes"
    if plan.num_experts % expert:
        legal = _listed(plan.num_experts, lambda n: plan.num_experts % n == 0)
        return f"{plan.num_experts} experts go over {legal} ranks"
    return ""


def _listed(most: int, is_legal: Callable[[int], bool]) -> str:
    legal = [str(n) for n in range(1, most + 1) if is_legal(n)]
    return ", ".join(legal[:12]) + (" ..." if len(legal) > 12 else "")


# ------------------------------------------------------------------------------------------------ what it needs


def local_bytes(weight: Weight, tensor: int, expert: int = 1) -> int:
    """Return the bytes of a weight on the rank that has the most of it. Pure.

    KV heads: as many as :meth:`Attention.local_kv_heads`. Tokens: vocabulary / ranks, rounded up. Source: as ``tensor_obstacle``.

    Args:
        weight: Of the model.
        tensor: Ranks that share each layer.
        expert: Ranks that share the experts as wholes.
    """
    if expert > 1 and weight.is_of_experts:
        return weight.num_bytes // (expert if weight.num_experts else 1)
    division = weight.division
    if weight.heads is not None and not divides(*weight.heads, tensor):
        # In two parts that were one: rounded up for both.
        return -(-weight.num_bytes // tensor)
    if division is Division.WHOLE:
        return weight.num_bytes
    if division is Division.KV_HEADS:
        return weight.num_bytes // weight.size * max(1, weight.size // tensor)
    return weight.num_bytes // weight.size * -(-weight.size // tensor)


def stages(plan: ModelPlan, *, tensor: int, pipeline: int, expert: int = 1) -> list[range]:
    """Return the layers of each stage, shared out by the bytes on a rank, as ``trencadis_torch.parallel.stages`` does. Pure.

    Args:
        plan: The model.
        tensor: Ranks that share each layer.
        pipeline: Stages, at most as many as layers.
        expert: Ranks that share the experts as wholes.
    """
    sizes, first, last = [0] * plan.num_layers, 0, 0
    for weight in plan.weights:
        num_bytes = local_bytes(weight, tensor, expert)
        if 0 <= weight.layer < plan.num_layers:
            sizes[weight.layer] += num_bytes
        else:
            is_first = weight.layer < 0
            first += num_bytes * is_first
            last += num_bytes * (not is_first or weight.is_tied)
    return divide_layers(sizes, num_stages=pipeline, first=first, last=last)


def _stage_of(item: Weight | Exchange | Attention, parts: list[range]) -> int:
    if item.layer < 0:
        return 0
    return next((stage for stage, part in enumerate(parts) if item.layer in part), len(parts) - 1)


def traffic(
    plan: ModelPlan, *, tensor: int, pipeline: int = 1, expert: int = 1, num_tokens: int, num_logits: int
) -> Traffic:
    """Return what one step exchanges. Pure.

    With T tokens, hidden size H, b bytes of a number: sums of a stage's ranks are T · H · b each, two in a plain layer and one for the
    embeddings; logits are gathered, rows · V · b; a stage sends T · H · b to the next; of one stage tokens are sent with 8 bytes for each row. Whole
    experts cost as much as shares of them: every rank of a stage has every token, so that outputs are summed. (Ranks with tokens of
    their own would send them to experts and back, 2 · T · k · H · b · (1 - 1 / ranks): no backend does.)
    Source: Shoeybi et al., Megatron-LM (2019), section 3; Lepikhin et al., GShard (2020), section 3.2.

    Args:
        plan: The model.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Ranks that share the experts as wholes.
        num_tokens: T.
        num_logits: Rows with logits.
    """
    if tensor * pipeline == 1:
        return Traffic()
    parts = stages(plan, tensor=tensor, pipeline=pipeline, expert=expert)
    tokens = Traffic() if pipeline > 1 else Traffic(num_bytes=_TOKEN_BYTES * num_logits, num_messages=1)
    found = [tokens] * pipeline
    for one in plan.exchanges if tensor > 1 else ():
        if one.heads is not None and divides(*one.heads, tensor):
            continue
        if one.whole_experts not in (None, expert > 1):
            continue
        payload = (num_logits if one.is_logits else num_tokens) * one.width * plan.itemsize
        _add(found, _stage_of(one, parts), payload)
    for stage in range(pipeline - 1):
        _add(found, stage, num_tokens * plan.hidden_size * plan.itemsize)
    return max(found, key=lambda one: (one.num_bytes, one.num_messages))


def _add(found: list[Traffic], stage: int, num_bytes: int) -> None:
    was = found[stage]
    found[stage] = Traffic(num_bytes=was.num_bytes + num_bytes, num_messages=was.num_messages + 1)


def _needs(plan: ModelPlan, limits: Limits, tensor: int, pipeline: int, expert: int) -> LayoutNeeds:
    parts = stages(plan, tensor=tensor, pipeline=pipeline, expert=expert)
    weights, kept = [0] * pipeline, [0] * pipeline
    for weight in plan.weights:
        num_bytes = local_bytes(weight, tensor, expert)
        weights[_stage_of(weight, parts)] += num_bytes
        if weight.is_tied and pipeline > 1:
            weights[-1] += num_bytes
    for one in plan.attentions:
        kept[_stage_of(one, parts)] += one.local_kv_heads(tensor) * one.head_bytes
    num_blocks = min(_num_blocks(limits, *pair) for pair in zip(weights, kept, strict=True))
    most = max(plan.attentions, key=lambda one: one.local_kv_heads(tensor))
    needs = LayoutNeeds(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        data=limits.num_devices // (tensor * pipeline),
        weights_bytes=max(weights),
        kv_bytes_per_token=max(kept),
        kv_heads=most.local_kv_heads(tensor),
        kv_repeats=most.local_kv_heads(tensor) * tensor // most.num_kv_heads,
        num_tokens=num_blocks * limits.block_size,
        num_sequences=num_blocks // -(-limits.max_model_len // limits.block_size),
        decode=traffic(
            plan,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            num_tokens=limits.max_num_seqs,
            num_logits=limits.max_num_seqs,
        ),
        prefill=traffic(
            plan,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            num_tokens=limits.max_num_batched_tokens,
            num_logits=min(limits.max_num_batched_tokens, limits.max_num_seqs),
        ),
    )
    return attrs.evolve(needs, misfit=_misfit(needs, limits))


def _num_blocks(limits: Limits, weights_bytes: int, kv_bytes_per_token: int) -> int:
    """Return the KV blocks beside so many weights. Source: ``trencadis.engine.cache.cache_size``, activations left out."""
    usable = int(max(0, limits.memory_bytes - weights_bytes) * Fraction(str(limits.memory_fraction)))
    if limits.max_bytes:
        usable = min(usable, limits.max_bytes)
    return usable // (kv_bytes_per_token * limits.block_size)


def _misfit(needs: LayoutNeeds, limits: Limits) -> str:
    if needs.weights_bytes > limits.memory_bytes:
        return "weights do not fit"
    if not needs.num_sequences:
        return f"no sequence of {limits.max_model_len} tokens fits"
    return ""


# ------------------------------------------------------------------------------------------------------ all of them


def all_layouts(
    plan: ModelPlan, limits: Limits, unserved: Callable[[str, int], str] = lambda _, __: ""
) -> tuple[list[LayoutNeeds], dict[str, dict[int, str]]]:
    """Return the legal layouts of up to N devices, each with as many copies as there is room for, and why others are not. Pure.

    Args:
        plan: The model.
        limits: Devices and sizes.
        unserved: Says of ``tensor``, ``pipeline`` or ``expert`` and a size why the configured components do not serve it.

    Returns:
        The layouts, and by ``tensor``, ``pipeline`` and ``expert`` why a size is not legal.
    """
    sizes = range(1, limits.num_devices + 1)
    refused: dict[str, dict[int, str]] = {
        "tensor": {n: why for n in sizes if (why := tensor_obstacle(plan, n))},
        "pipeline": {n: why for n in sizes if (why := pipeline_obstacle(plan, n))},
        "expert": {n: why for n in sizes if (why := expert_obstacle(plan, n) or tensor_obstacle(plan, n, expert=n))},
    }
    found = []
    for tensor in sizes:
        for pipeline in range(1, limits.num_devices // tensor + 1):
            for expert in sorted({1, tensor}):
                blocked = expert in refused["expert"] if expert > 1 else tensor in refused["tensor"]
                if blocked or pipeline in refused["pipeline"]:
                    continue
                needs = _needs(plan, limits, tensor, pipeline, expert)
                reasons = (unserved(name, getattr(needs, name)) for name in ("tensor", "pipeline", "expert"))
                found.append(attrs.evolve(needs, unserved=next(filter(None, reasons), "")))
    return found, refused


def propose(layouts: Iterable[LayoutNeeds]) -> LayoutNeeds | None:
    """Return the layout to take, or None if none fits. Pure.

    Of those that are served, fit, and keep at least half of the most KV cache that one gives over all devices: the smallest copy, for
    copies exchange nothing; of these the one with the fewest stages, which a token passes one after the other; of these the one that
    moves the fewest bytes for each token of KV cache.
    Source: "When there is enough GPU memory, always favor data parallelism for throughput", SGLang's page on tuning; vLLM's on
    parallelism and scaling: one device if the model fits, else tensor parallelism, stages where sizes do not divide. Half: our choice.
    """
    able = [one for one in layouts if not one.misfit and not one.unserved]
    most = max((one.num_tokens * one.data for one in able), default=0)
    roomy = [one for one in able if 2 * one.num_tokens * one.data >= most]
    return min(
        roomy,
        key=lambda one: (one.num_ranks, one.pipeline, Fraction(one.decode.num_bytes, one.num_tokens * one.data)),
        default=None,
    )
