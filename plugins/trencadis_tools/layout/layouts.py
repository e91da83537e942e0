"""Parallel layouts of a model over devices: legal ones, memory and traffic of a rank, and the proposed one."""

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
    "attention_obstacle",
    "expert_obstacle",
    "local_bytes",
    "pipeline_obstacle",
    "propose",
    "stages",
    "tensor_obstacle",
    "traffic",
]

_TOKEN_BYTES = 8
"""Bytes per row sent by the output rank: token and number of accepted drafts, each int32. Source: ``trencadis_torch.parallel.tokens``."""


@attrs.frozen(kw_only=True)
class Limits:
    """Devices and configured sizes.

    Attributes:
        num_devices: Number of devices, N.
        memory_bytes: Memory of one device, bytes.
        memory_fraction: Share of the memory left by weights that the KV cache takes, 0 to 1.
        max_bytes: Maximum size of the KV cache of a rank, bytes; 0: no maximum.
        block_size: Tokens of a KV block.
        max_model_len: Longest sequence, tokens.
        max_num_seqs: Maximum rows of a decode step.
        max_num_batched_tokens: Maximum tokens of a prefill step.
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
    """Traffic of a rank in one step; with several pipeline stages, that of the stage with the most bytes.

    Attributes:
        num_bytes: Payload of collectives, bytes. A ring of n ranks moves 2 · (n - 1) / n of it for a sum.
        num_messages: Number of calls.
    """

    num_bytes: int = 0
    num_messages: int = 0


@attrs.frozen(kw_only=True)
class LayoutNeeds:
    """A legal layout with its memory and traffic.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Number of pipeline stages.
        expert: Ranks over which whole experts are divided, 1 or ``tensor``.
        attention: ``tensor``: ranks divide the heads; ``data``: each rank computes the attention of its own sequences.
        data: Number of copies of the model.
        weights_bytes: Weights of the rank with the most, bytes.
        kv_bytes_per_token: KV cache per token of the rank with the most, bytes.
        kv_heads: KV heads of a layer on a rank, the maximum over layers.
        kv_repeats: Ranks that hold the same KV head.
        num_tokens: Tokens in the KV cache of one copy.
        num_sequences: Number of sequences of the longest length that fit into ``num_tokens``.
        decode: Traffic of a step of ``max_num_seqs`` rows.
        prefill: Traffic of a step of ``max_num_batched_tokens`` tokens.
        unserved: Reason why the configured components cannot run the layout; empty: they can.
        misfit: Reason why the layout does not fit into memory; empty: it fits.
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
    attention: str = "tensor"
    unserved: str = ""
    misfit: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one copy."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """Parallel sizes above 1, such as ``tensor 2 x data 4``."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "data": self.data}
        words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"
        return f"{words}, attention of own sequences" if self.attention == "data" else words


# ------------------------------------------------------------------------------------------------------ legality


def tensor_obstacle(plan: ModelPlan, tensor: int, *, expert: int = 1) -> str:
    """Return why layers cannot be divided over ``tensor`` ranks, with the legal sizes; empty: they can. Pure.

    Source: ``trencadis_torch.parallel``, which refuses the same: heads (``heads``), equal parts (``cuts``), plans (``plan``).

    Args:
        plan: Plan of the model.
        tensor: Number of ranks.
        expert: Ranks over which whole experts are divided; above 1, sizes inside an expert need not be divisible.
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
    """Return why layers cannot be divided over ``pipeline`` stages; empty: they can. Pure."""
    return "" if pipeline <= plan.num_layers else f"{plan.num_layers} layers make 1 to {plan.num_layers} stages"


def expert_obstacle(plan: ModelPlan, expert: int) -> str:
    """Return why whole experts cannot be divided over ``expert`` ranks; empty: they can. Pure."""
    if expert == 1:
        return ""
    if not plan.num_experts:
        return "the model has no experts, or its plan does not divide them as wholes"
    if plan.num_experts % expert:
        legal = _listed(plan.num_experts, lambda n: plan.num_experts % n == 0)
        return f"{plan.num_experts} experts go over {legal} ranks"
    return ""


def attention_obstacle(plan: ModelPlan, size: int, *, max_num_seqs: int) -> str:
    """Return why attention cannot be data-parallel over ``size`` ranks that also divide the experts; empty: it can. Pure.

    Args:
        plan: Plan of the model.
        size: Number of ranks.
        max_num_seqs: Sequences over all ranks, divided evenly.
    """
    if size > 1 and not expert_obstacle(plan, size) and max_num_seqs % size:
        legal = _listed(max_num_seqs, lambda n: max_num_seqs % n == 0)
        return f"{max_num_seqs} rows (engine.max_num_seqs) go over {legal} ranks with sequences of their own"
    return expert_obstacle(plan, size)


def _listed(most: int, is_legal: Callable[[int], bool]) -> str:
    legal = [str(n) for n in range(1, most + 1) if is_legal(n)]
    return ", ".join(legal[:12]) + (" ..." if len(legal) > 12 else "")


# ------------------------------------------------------------------------------------------------ what it needs


def local_bytes(weight: Weight, tensor: int, expert: int = 1, attention: str = "tensor") -> int:
    """Return the bytes of a weight on the rank that has the most of it. Pure.

    KV heads: :meth:`Attention.local_kv_heads`. Vocabulary: divided by the ranks, rounded up. Source: that of :func:`tensor_obstacle`.

    Args:
        weight: Weight of the model.
        tensor: Ranks that share each layer.
        expert: Ranks over which whole experts are divided.
        attention: ``data``: each rank computes the attention of its own sequences, and holds everything but experts and output
            projection whole.
    """
    if expert > 1 and weight.is_of_experts:
        return weight.num_bytes // (expert if weight.num_experts else 1)
    if attention == "data":
        part = weight.num_bytes // weight.size * -(-weight.size // tensor) if weight.is_head else 0
        return part if weight.is_head and not weight.is_tied else weight.num_bytes + part
    division = weight.division
    if weight.heads is not None and not divides(*weight.heads, tensor):
        # The two parts of a fused weight, each rounded up.
        return -(-weight.num_bytes // tensor)
    if division is Division.WHOLE:
        return weight.num_bytes
    if division is Division.KV_HEADS:
        return weight.num_bytes // weight.size * max(1, weight.size // tensor)
    return weight.num_bytes // weight.size * -(-weight.size // tensor)


def stages(plan: ModelPlan, *, tensor: int, pipeline: int, expert: int = 1) -> list[range]:
    """Return the layers of each stage, balanced by the bytes on a rank as in ``trencadis_torch.parallel.stages``. Pure.

    Args:
        plan: Plan of the model.
        tensor: Ranks that share each layer.
        pipeline: Number of stages, at most the number of layers.
        expert: Ranks over which whole experts are divided.
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
    plan: ModelPlan,
    *,
    tensor: int,
    pipeline: int = 1,
    expert: int = 1,
    attention: str = "tensor",
    num_tokens: int,
    num_logits: int,
) -> Traffic:
    """Return the traffic of one step. Pure.

    With T tokens, hidden size H and b bytes per number: each all-reduce of a stage is T · H · b, two in a plain layer and one for the
    embeddings; gathering logits takes rows · V · b; a stage sends T · H · b to the next; with one stage, tokens are sent with 8 bytes per
    row. Whole experts cost as much as divided ones, since every rank of a stage has every token and outputs are summed.

    With ``attention = "data"`` attention needs no exchange. Each layer with experts gathers hidden states, expert ids and weights of all
    tokens, T · (H · b + k · (4 + b)), padded to the rank with the most tokens, and sums T · H · b; hidden states of rows with logits are
    gathered before the logits. The count assumes equal tokens per rank. (All-to-all would send T · k · H · b · (1 - 1 / ranks) to
    experts, and as much back; no backend does that.)
    Source: Shoeybi et al., Megatron-LM (2019), section 3; Lepikhin et al., GShard (2020), section 3.2.

    Args:
        plan: Plan of the model.
        tensor: Ranks that share each layer.
        pipeline: Number of stages.
        expert: Ranks over which whole experts are divided.
        attention: ``data``: each rank computes the attention of its own sequences.
        num_tokens: Tokens of the step, T.
        num_logits: Rows of the step with logits.
    """
    if tensor * pipeline == 1:
        return Traffic()
    if attention == "data":
        return _traffic_of_own_tokens(plan, tensor, num_tokens, num_logits)
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


def _traffic_of_own_tokens(plan: ModelPlan, num_ranks: int, num_tokens: int, num_logits: int) -> Traffic:
    row = plan.hidden_size * plan.itemsize
    padded, kept = (-(-number // num_ranks) * num_ranks for number in (num_tokens, num_logits))
    payloads = [_TOKEN_BYTES * num_logits, kept * row]
    for one in plan.exchanges:
        if one.is_logits:
            payloads.append(num_logits * one.width * plan.itemsize)
        elif one.whole_experts:
            payloads += [padded * (row + plan.num_routes * (4 + plan.itemsize)), num_tokens * row]
    return Traffic(num_bytes=sum(payloads), num_messages=len(payloads))


def _add(found: list[Traffic], stage: int, num_bytes: int) -> None:
    was = found[stage]
    found[stage] = Traffic(num_bytes=was.num_bytes + num_bytes, num_messages=was.num_messages + 1)


def _needs(
    plan: ModelPlan, limits: Limits, tensor: int, pipeline: int, expert: int, attention: str = "tensor"
) -> LayoutNeeds:
    parts = stages(plan, tensor=tensor, pipeline=pipeline, expert=expert)
    weights, kept = [0] * pipeline, [0] * pipeline
    for weight in plan.weights:
        num_bytes = local_bytes(weight, tensor, expert, attention)
        weights[_stage_of(weight, parts)] += num_bytes
        if weight.is_tied and pipeline > 1:
            weights[-1] += num_bytes
    # With data-parallel attention heads are not divided, and the copy has ``tensor`` times the blocks of a rank.
    sharing, num_pools = (1, tensor) if attention == "data" else (tensor, 1)
    for one in plan.attentions:
        kept[_stage_of(one, parts)] += one.local_kv_heads(sharing) * one.head_bytes
    num_blocks = min(_num_blocks(limits, *pair) for pair in zip(weights, kept, strict=True))
    most = max(plan.attentions, key=lambda one: one.local_kv_heads(sharing))
    of_step = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    needs = LayoutNeeds(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        data=limits.num_devices // (tensor * pipeline),
        weights_bytes=max(weights),
        kv_bytes_per_token=max(kept),
        attention=attention,
        kv_heads=most.local_kv_heads(sharing),
        kv_repeats=most.local_kv_heads(sharing) * sharing // most.num_kv_heads,
        num_tokens=num_pools * num_blocks * limits.block_size,
        num_sequences=num_pools * (num_blocks // -(-limits.max_model_len // limits.block_size)),
        decode=traffic(
            plan,
            **of_step,
            attention=attention,
            num_tokens=limits.max_num_seqs,
            num_logits=limits.max_num_seqs,
        ),
        prefill=traffic(
            plan,
            **of_step,
            attention=attention,
            num_tokens=limits.max_num_batched_tokens,
            num_logits=min(limits.max_num_batched_tokens, limits.max_num_seqs),
        ),
    )
    return attrs.evolve(needs, misfit=_misfit(needs, limits))


def _num_blocks(limits: Limits, weights_bytes: int, kv_bytes_per_token: int) -> int:
    """Return the KV blocks that fit beside the weights. Source: ``trencadis.engine.cache.cache_size``, without activations."""
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
    """Return the legal layouts of up to N devices, each with the maximum number of copies, and why other sizes are not legal. Pure.

    Args:
        plan: Plan of the model.
        limits: Devices and configured sizes.
        unserved: Returns why the configured components do not support ``tensor``, ``pipeline``, ``expert`` or ``attention`` (as
            ``data``) with a number of ranks; empty: they do.

    Returns:
        The layouts, and the reason of each illegal size by ``tensor``, ``pipeline``, ``expert`` and ``attention``.
    """
    sizes = range(1, limits.num_devices + 1)
    refused: dict[str, dict[int, str]] = {
        "tensor": {n: why for n in sizes if (why := tensor_obstacle(plan, n))},
        "pipeline": {n: why for n in sizes if (why := pipeline_obstacle(plan, n))},
        "expert": {n: why for n in sizes if (why := expert_obstacle(plan, n) or tensor_obstacle(plan, n, expert=n))},
        "attention": {n: why for n in sizes if (why := attention_obstacle(plan, n, max_num_seqs=limits.max_num_seqs))},
    }
    found = []
    for tensor in sizes:
        for pipeline in range(1, limits.num_devices // tensor + 1):
            for expert in sorted({1, tensor}):
                blocked = expert in refused["expert"] if expert > 1 else tensor in refused["tensor"]
                if blocked or pipeline in refused["pipeline"]:
                    continue
                found.append(_needs(plan, limits, tensor, pipeline, expert))
        if tensor > 1 and tensor not in refused["attention"]:
            found.append(_needs(plan, limits, tensor, 1, tensor, "data"))
    found = [attrs.evolve(needs, unserved=_unserved(needs, unserved)) for needs in found]
    return found, refused


def _unserved(needs: LayoutNeeds, unserved: Callable[[str, int], str]) -> str:
    sizes = {name: getattr(needs, name) for name in ("tensor", "pipeline", "expert")}
    sizes["attention"] = needs.tensor if needs.attention == "data" else 1
    return next(filter(None, (unserved(name, size) for name, size in sizes.items())), "")


def propose(layouts: Iterable[LayoutNeeds]) -> LayoutNeeds | None:
    """Return the proposed layout, or None if none fits. Pure.

    Among layouts that are supported, fit, and have at least half of the largest KV cache over all devices: the smallest copy, since
    copies exchange nothing; then the fewest stages, which a token passes one after the other; then the fewest bytes moved
    for each token of KV cache.
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
