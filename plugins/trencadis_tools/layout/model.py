"""Weights, attention heads and collectives of a model from its ``config.json``; transformers builds it without memory.

No weights are read. Tensors are divided by the plan of transformers (``model.tp_plan``, ``model.ep_plan``), in
the way of ``trencadis_torch.parallel.sharding``: a test compares both.
"""

from __future__ import annotations

import enum
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from trencadis.api import Config, ResolvedPlan, resolve_model_path
from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.files import read_json, read_toml

__all__ = ["Attention", "Division", "Exchange", "ModelPlan", "Weight", "divides", "read_model", "read_plan_file"]

_OTHER_NAMES: Final = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_WHOLE: Final = frozenset(
    {"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate", "first_rank"}
)
_PARTS: Final = {"colwise": 1, "packed_colwise": 2, "packed_colwise_3": 3}
_ROWS: Final = frozenset({"rowwise", "rowwise_split_input", "packed_rowwise"})
_SUMMED: Final = frozenset({"moe_tp_experts", "ep_dispatch_experts", "all_reduce"})
_STYLES: Final = (
    _WHOLE | _PARTS.keys() | _ROWS | _SUMMED | {"colwise_gather_output", "embedding_rowwise", "grouped_gemm"}
)
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "query_key_value", "c_attn", "qkv_proj")
_ONE_EACH: Final = ("kv_b_proj", "query_key_value", "c_attn")
_FUSED: Final = ("qkv_proj", "query_key_value", "c_attn")
_BY_HEADS: Final = frozenset({"colwise", "packed_colwise_3", "qkv"})
_ROUTES: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_num_active_experts",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_RECURRENT: Final = ("linear_attention", "mamba", "conv", "recurrent", "moe_linear", "hybrid")
_GENERATES: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_DEFAULT_MAX_MODEL_LEN: Final = 2048
_A_MODEL: Final = "Give a directory with config.json, a hub id such as Qwen/Qwen3-0.6B, or demo."


class Division(enum.Enum):
    """Division of a tensor over the ranks of a stage."""

    WHOLE = "every rank has all of it"
    EVEN = "in equal parts"
    KV_HEADS = "by KV heads; where there are more ranks than heads, several ranks have the same one"
    PADDED = "in equal parts, the last of which are padded"


@attrs.frozen(kw_only=True)
class Weight:
    """A parameter, or a part of one that is divided in one way.

    Attributes:
        name: Name of the parameter in the model of transformers.
        layer: Index of its layer; -1: before all layers, ``num_layers``: after them.
        num_bytes: Size of the whole tensor, bytes.
        division: Division of the tensor over ranks.
        size: Number of units that are divided: outputs, inputs, KV heads or tokens.
        heads: Query and KV heads of a fused projection; if they cannot be divided evenly, it is divided with padding. None: no
            fused projection.
        num_experts: Number of experts whose weights the tensor holds, if experts can be divided as wholes; else 0.
        is_of_experts: Whether the weight belongs to experts that can be divided as wholes; with expert parallelism its undivided
            parts are whole.
        is_tied: Whether the weight is also the output projection.
        is_head: Whether the weight is the output projection and divided over ranks; with data-parallel attention only it and
            experts are divided.
    """

    name: str
    layer: int
    num_bytes: int
    division: Division = Division.WHOLE
    size: int = 1
    heads: tuple[int, int] | None = None
    num_experts: int = 0
    is_of_experts: bool = False
    is_tied: bool = False
    is_head: bool = False


@attrs.frozen(kw_only=True)
class Attention:
    """The heads of one layer.

    Attributes:
        layer: Index of the layer.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        head_bytes: Key and value of one KV head for one token, bytes.
        division: ``whole``: every rank has all heads. ``heads``: ranks divide the heads. ``fused``: like ``heads`` if the heads
            divide evenly, else ``whole``.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_bytes: int
    division: str = "heads"

    def local_kv_heads(self, tensor: int) -> int:
        """Return the number of KV heads of a rank. Pure.

        Source: vLLM's ``QKVParallelLinear``: KV heads / ranks, at least one; with more ranks, ranks / KV heads of them share a head.
        """
        if self.division == "whole" or not divides(self.num_heads, self.num_kv_heads, tensor):
            return self.num_kv_heads
        return max(1, self.num_kv_heads // tensor)


@attrs.frozen(kw_only=True)
class Exchange:
    """A collective of a forward pass among the ranks of a stage.

    Attributes:
        layer: Index of the layer; -1: before all layers, ``num_layers``: after them.
        width: Numbers for each token, over all ranks.
        whole_experts: True: only if ranks have whole experts; False: only if ranks have a share of each expert; None: always.
        is_logits: Whether the exchange covers only rows with logits.
        heads: Query and KV heads; there is no exchange if they divide evenly over the ranks. None: no such condition.
    """

    layer: int
    width: int
    whole_experts: bool | None = None
    is_logits: bool = False
    heads: tuple[int, int] | None = None


@attrs.frozen(kw_only=True)
class ModelPlan:
    """Facts of a model that layouts depend on.

    Attributes:
        path: Model path in the configuration.
        architecture: Class name in transformers.
        dtype: Number type of weights, activations and KV cache.
        itemsize: Bytes of one number.
        num_layers: Number of layers, L.
        hidden_size: Hidden size, H.
        vocab_size: Size of the vocabulary, V.
        max_model_len: Longest sequence of the model, tokens.
        weights: All weights.
        attentions: Attention of each layer, in order.
        exchanges: Collectives of a stage with all layers.
        num_experts: E of each layer with experts that can be divided as wholes; 0: none.
        num_routes: Experts per token, k.
        obstacle: Reason why the model cannot be divided; empty: it can.
    """

    path: str
    architecture: str
    dtype: str
    itemsize: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    weights: tuple[Weight, ...]
    attentions: tuple[Attention, ...]
    exchanges: tuple[Exchange, ...]
    num_experts: int = 0
    num_routes: int = 0
    obstacle: str = ""


def divides(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Return whether heads divide evenly over ``size`` ranks: query heads divided, KV heads divided or repeated. Pure."""
    return num_kv_heads > 0 and num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def read_plan_file(path: str, setting: str) -> dict[str, str]:
    """Return styles by name of module or parameter, in the form that a backend reads.

    Args:
        path: Path of a TOML or JSON file.
        setting: Setting that names the file, for messages.

    Raises:
        ConfigValueError: The file cannot be read, or is not a table from names to styles.
    """
    try:
        file = Path(path).expanduser()
        found: Any = read_json(file) if path.endswith(".json") else read_toml(file)
    except (OSError, RuntimeError, ValueError) as error:  # no such home
        raise ConfigValueError(
            f'{setting} = "{path}": it cannot be read: {error}.', hint="Give a .toml or .json file."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(style, str) for style in found.values()):
        raise ConfigValueError(
            f'{setting} = "{path}": it is no table from names to styles.',
            hint='Such as: "model.layers.*.self_attn.q_proj" = "colwise". Names with dots need quotes.',
        )
    return found


def read_model(
    path: str,
    *,
    revision: str = "",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    configured: Mapping[str, str] | None = None,
) -> ModelPlan:
    """Return the plan of a model; imports torch, and builds the model without memory.

    Args:
        path: Model path, as in ``model.path``.
        revision: Revision of a hub id; empty: the default one.
        dtype: Number type, as in ``model.dtype``; ``auto``: the one in the model's configuration.
        trust_remote_code: Run code that comes with the model.
        configured: Styles that override the model's own plan.

    Raises:
        ModelLoadError: There is no model at the path, or it does not generate with a paged KV cache.
    """
    config = _config(path, revision, trust_remote_code)
    text = config.get_text_config(decoder=True)
    _check(path, config, text)
    model = _built(path, config, trust_remote_code)
    return _Reader(path, model, text, dtype, dict(configured or {})).plan()


def read_configured_model(config: Config, chosen: ResolvedPlan) -> ModelPlan:
    """Return :func:`read_model` of a configuration, with the backend's ``tensor_plan`` file if there is one.

    Args:
        config: Configuration; table ``model`` is read.
        chosen: Resolved components of the configuration.

    Raises:
        ConfigError: The plan's file cannot be read.
        ModelLoadError: There is no model at the path, or it does not generate with a paged KV cache.
    """
    model, backend = config.model, chosen.choices["backend"]
    plan_file = getattr(backend.options, "tensor_plan", "")
    return read_model(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        configured=read_plan_file(plan_file, f"[backend.{backend.component.name}] tensor_plan") if plan_file else None,
    )


def _config(path: str, revision: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    place = Path(resolve_model_path(path)).expanduser()
    if place.suffix == ".gguf":
        raise ModelLoadError(
            f"{path}: a .gguf file has no config.json, which layouts are computed from.", hint=_A_MODEL
        )
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")
    if place.is_dir() and not (place / "config.json").is_file():
        raise ModelLoadError(f"{path}: no config.json there.", hint=_A_MODEL)
    if not place.is_dir() and not is_hub_id:
        raise ModelLoadError(f"{path}: there is no such directory.", hint=_A_MODEL)
    name = str(place) if place.is_dir() else path
    try:
        return AutoConfig.from_pretrained(name, revision=revision or None, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelLoadError(f"{path}: its config.json cannot be read: {reason}", hint=_A_MODEL) from error


def _check(path: str, config: Any, text: Any) -> None:
    """Refuse models without a KV cache.

    Raises:
        ModelLoadError: The model has no KV cache; the message gives the reason.
    """
    names = list(config.architectures or ())
    if config.is_encoder_decoder or (names and not any(name.endswith(_GENERATES) for name in names)):
        raise ModelLoadError(
            f"{path}: {names[0] if names else config.model_type} is no decoder, and only decoders are divided over ranks.",
            hint="Serve an encoder with [parallel] tensor = 1.",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(
            f"{path}: it is quantised in its files: its sizes are not those of config.json.",
            hint="Take the model it was made from: weights that are divided over ranks are dequantised before.",
        )
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if any(word in kind for word in _RECURRENT):
            raise ModelLoadError(f"{path}: layer {layer} is {kind}; recurrent state is not served, nor laid out.")


def _built(path: str, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    torch: Any = importlib.import_module("torch")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelLoadError(f"{path} ({config.model_type}) cannot be built: {reason}") from error


class _Reader:
    """Reads a :class:`ModelPlan` from a model built without memory."""

    def __init__(self, path: str, model: Any, text: Any, dtype: str, configured: dict[str, str]) -> None:
        self._path, self._model, self._text = path, model, text
        own = next(one.dtype for one in model.parameters() if one.is_floating_point())
        self._dtype = str(own).removeprefix("torch.") if dtype == "auto" else dtype
        self._itemsize = own.itemsize if dtype == "auto" else {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
        self._modules = dict(model.named_modules())
        self._num_layers = int(text.num_hidden_layers)
        self._tp_plan = {**(getattr(model, "tp_plan", None) or {}), **configured}
        own_ep_plan = getattr(model, "ep_plan", None) or {}
        self._ep_plan = {name: style for name, style in own_ep_plan.items() if name not in configured}
        names = [*self._modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
        self._styles = {name: style for name in names if (style := self._style(name, self._tp_plan))}
        head = model.get_output_embeddings()
        self._head_style = next((self._styles.get(name, "") for name, one in self._modules.items() if one is head), "")
        self._heads = dict(self._find_heads())
        self._fused = set(self._find_fused())

    def plan(self) -> ModelPlan:
        """Return the plan of the model.

        Raises:
            ModelLoadError: A layer's attention is not supported here.
        """
        attentions = sorted(self._attentions(), key=lambda one: one.layer)
        if [one.layer for one in attentions] != list(range(self._num_layers)):
            missing = sorted(set(range(self._num_layers)) - {one.layer for one in attentions})
            raise ModelLoadError(
                f"{self._path}: the attention of layers {', '.join(map(str, missing[:8])) or 'that share one'} of "
                f"{type(self._model).__name__} has projections that are not known here, so what its KV cache takes cannot be said.",
                hint="Start the engine: its log says what it takes.",
            )
        weights = tuple(one for pair in self._model.named_parameters() for one in self._weights(*pair))
        text = self._text
        return ModelPlan(
            path=self._path,
            architecture=type(self._model).__name__,
            dtype=self._dtype,
            itemsize=self._itemsize,
            num_layers=self._num_layers,
            hidden_size=int(text.hidden_size),
            vocab_size=int(self._model.get_output_embeddings().weight.shape[0]),
            max_model_len=int(getattr(text, "max_position_embeddings", None) or _DEFAULT_MAX_MODEL_LEN),
            weights=weights,
            attentions=tuple(attentions),
            exchanges=tuple(self._exchanges()),
            num_experts=max(one.num_experts for one in weights),
            num_routes=next((int(one) for name in _ROUTES if (one := getattr(text, name, None))), 0),
            obstacle=self._obstacle(),
        )

    def _obstacle(self) -> str:
        if not self._tp_plan:
            return (
                f"{type(self._model).__name__} comes without a plan of how its layers are divided (write one and name it in "
                "[backend.torch] tensor_plan)"
            )
        unknown = sorted({style for style in self._styles.values() if style not in _STYLES})
        return f'its plan has the style "{unknown[0]}", which is not known here' if unknown else ""

    # --------------------------------------------------------------------------------------------------- names

    @staticmethod
    def _style(name: str, plan: Mapping[str, str]) -> str:
        """Return a plan's style for a module or parameter (``*`` matches any number); empty: none. Pure."""
        style = plan.get(name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), ""))
        return _OTHER_NAMES.get(style, style)

    def _layer(self, name: str) -> int:
        """Return the layer of a module or parameter; outside of layers, -1 for embeddings, else ``num_layers``."""
        numbers = re.search(r"\.(\d+)(?=\.|$)", name)
        if numbers:
            return int(numbers[1])
        owner = name.rpartition(".")[0]
        is_embedding = any(type(self._modules.get(one)).__name__.endswith("Embedding") for one in (name, owner))
        return -1 if is_embedding else self._num_layers

    def _find_heads(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield query and KV heads of each attention module, from its weights before the configuration."""
        for name, module in self._modules.items():
            if "layer_idx" not in module.__dict__ or not any(hasattr(module, own) for own in _ATTENTION):
                continue
            num_heads = _number(module, self._text, ("num_heads", "num_attention_heads"))
            num_kv_heads = _number(module, self._text, ("num_key_value_heads",)) or num_heads
            if any(hasattr(module, own) for own in _ONE_EACH):
                num_kv_heads = num_heads
            dim, keys = module.__dict__.get("head_dim"), getattr(module, "k_proj", None)
            if dim and keys is not None and keys.weight.shape[0] % dim == 0:
                num_kv_heads = keys.weight.shape[0] // dim
            yield name, (num_heads, num_kv_heads)

    def _find_fused(self) -> Iterator[str]:
        """Yield fused projections whose outputs the plan gathers and that the backend divides after a trial run."""
        for name, style in self._styles.items():
            owner, _, own = name.rpartition(".")
            out = {"qkv_proj": "o_proj", "gate_up_proj": "down_proj"}.get(own, "")
            if style == "colwise_gather_output" and self._styles.get(f"{owner}.{out}") == "rowwise_split_input":
                yield name

    # -------------------------------------------------------------------------------------------- what there is

    def _attentions(self) -> Iterator[Attention]:
        for name, (num_heads, found) in self._heads.items():
            module, num_kv_heads = self._modules[name], found
            dim = _number(module, self._text, ("head_dim",)) or self._text.hidden_size // num_heads
            keys = values = dim
            fused = next((own for own in _FUSED if hasattr(module, own)), "")
            if hasattr(module, "kv_b_proj"):
                keys, values = module.qk_head_dim, module.v_head_dim
            elif fused:
                # Outputs beyond the queries; a layer may have fewer KV heads than the configuration.
                num_kv_heads = (_num_outputs(getattr(module, fused)) // dim - num_heads) // 2
            elif hasattr(module, "v_proj"):
                values = module.v_proj.weight.shape[0] // num_kv_heads
            is_divided = bool({self._styles.get(f"{name}.{own}") for own in _ATTENTION} & _BY_HEADS)
            is_fused = f"{name}.qkv_proj" in self._fused
            yield Attention(
                layer=module.layer_idx,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_bytes=(keys + values) * self._itemsize,
                division="heads" if is_divided else "fused" if is_fused else "whole",
            )

    def _weights(self, name: str, parameter: Any) -> Iterator[Weight]:
        """Yield the weights of a parameter, one for each part with its own division."""
        owner, projection = name.rpartition(".")[0], self._model.get_output_embeddings()
        head = projection.weight
        is_head = parameter is head or self._modules[owner] is projection
        whole = Weight(
            name=name,
            layer=self._layer(name),
            num_bytes=parameter.numel() * self._itemsize,
            num_experts=parameter.shape[0] if self._style(name, self._ep_plan) == "grouped_gemm" else 0,
            is_of_experts=self._is_of_experts(name),
            is_tied=parameter is head and parameter is self._model.get_input_embeddings().weight,
            is_head=is_head and self._head_style == "colwise_gather_output",
        )
        if name in self._styles:
            yield self._divided_itself(whole, parameter, self._styles[name])
        elif owner in self._fused and owner.endswith("qkv_proj"):
            yield from self._queries_keys_values(whole, owner)
        else:
            yield self._divided_module(whole, parameter, owner)

    def _is_of_experts(self, name: str) -> bool:
        """Return whether a name belongs to experts that can be divided as wholes."""
        places = name.split(".")
        owners = (".".join(places[:length]) for length in range(1, len(places) + 1))
        return any(self._style(owner, self._ep_plan) == "ep_dispatch_experts" for owner in owners)

    def _divided_itself(self, whole: Weight, parameter: Any, style: str) -> Weight:
        """Return the weight of a parameter that the plan names itself, such as experts and sinks."""
        if style in _ROWS:
            parts = 2 if style == "packed_rowwise" else 1
            return whole if parameter.dim() == 1 else _even(whole, parameter.shape[-1] // parts)
        if style == "grouped_gemm":
            return _even(whole, parameter.shape[0])
        if style in _PARTS:
            size = parameter.shape[0] if parameter.dim() == 1 else parameter.shape[-2]
            return _even(whole, size // _PARTS[style])
        return whole

    def _divided_module(self, whole: Weight, parameter: Any, owner: str) -> Weight:
        """Return the weight of a parameter by its module's style, whole if the plan has none."""
        style, own = self._styles.get(owner, ""), owner.rpartition(".")[2]
        is_transposed = type(self._modules[owner]).__name__ == "Conv1D" and parameter.dim() == 2
        num_outputs, num_inputs = parameter.shape[0], parameter.shape[-1]
        if is_transposed:
            num_outputs, num_inputs = num_inputs, num_outputs
        if style in _ROWS:
            return whole if parameter.dim() == 1 else _even(whole, num_inputs)
        if style == "embedding_rowwise" or (style == "colwise_gather_output" and owner not in self._fused):
            return attrs.evolve(whole, division=Division.PADDED, size=num_outputs)
        if owner in self._fused:
            return _even(whole, num_outputs // 2)
        heads = self._heads.get(owner.rpartition(".")[0])
        if style == "colwise" and own in ("k_proj", "v_proj") and heads is not None:
            return attrs.evolve(whole, division=Division.KV_HEADS, size=heads[1])
        return _even(whole, num_outputs // _PARTS[style]) if style in _PARTS else whole

    def _queries_keys_values(self, whole: Weight, owner: str) -> Iterator[Weight]:
        num_heads, num_kv_heads = heads = self._heads[owner.rpartition(".")[0]]
        of_queries = whole.num_bytes * num_heads // (num_heads + 2 * num_kv_heads)
        yield attrs.evolve(whole, num_bytes=of_queries, division=Division.EVEN, size=num_heads, heads=heads)
        of_others = whole.num_bytes - of_queries
        yield attrs.evolve(whole, num_bytes=of_others, division=Division.KV_HEADS, size=num_kv_heads, heads=heads)

    def _exchanges(self) -> Iterator[Exchange]:
        """Yield the collectives of a pass.

        Source: of each style, ``transformers.distributed.tensor_parallel``; modules of ``trencadis_torch.parallel.modules``.
        """
        head = self._model.get_output_embeddings()
        for name, module in self._modules.items():
            style, layer = self._styles.get(name, ""), self._layer(name)
            shares = False if self._is_of_experts(name) else None
            if self._style(name, self._ep_plan) == "ep_dispatch_experts":
                yield Exchange(layer=layer, width=int(self._text.hidden_size), whole_experts=True)
            if style in _ROWS:
                yield Exchange(layer=layer, width=_num_outputs(module), whole_experts=shares)
            elif style in _SUMMED:
                yield Exchange(layer=layer, width=int(self._text.hidden_size), whole_experts=shares)
            elif style == "embedding_rowwise":
                yield Exchange(layer=layer, width=module.weight.shape[1])
            elif style == "colwise_gather_output" and not (name in self._fused and name.endswith("gate_up_proj")):
                heads = self._heads[name.rpartition(".")[0]] if name in self._fused else None
                width = _num_outputs(module)
                yield Exchange(layer=layer, width=width, whole_experts=shares, is_logits=module is head, heads=heads)


def _even(whole: Weight, size: int) -> Weight:
    return attrs.evolve(whole, division=Division.EVEN, size=int(size))


def _num_outputs(module: Any) -> int:
    return int(module.weight.shape[1] if type(module).__name__ == "Conv1D" else module.weight.shape[0])


def _number(module: Any, config: Any, names: tuple[str, ...]) -> int:
    """Return the first nonzero integer under one of the names, in the module, else in its configuration; 0: none. Pure."""
    for place in (module, config):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and value:
                return value
    return 0
