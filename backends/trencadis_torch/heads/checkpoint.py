"""Heads as published: EAGLE-3, in the format of speculators and in EAGLE's own; read and checked before anything is computed.

    config.json        what the head's layer is, which hidden states it reads, how its tokens are numbered
    *.safetensors      its weights; a name that is not known, or one that is missing, ends the start

Shapes: H hidden size of the head, T that of the model, S hidden states, V draft vocabulary, D head dimension.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from trencadis.errors import ModelLoadError
from trencadis.files import parse_json, read_text
from trencadis_torch.linear.formats.mapped import MappedTensors

__all__ = ["HeadFiles", "read_head"]

_OWN_FORMAT: Final = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
"""Architectures that EAGLE's own configurations name."""

_OTHERWISE: Final = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Keys by which a head computes something else than is computed here."""

_LAYER: Final = "layers.0."
_OPTIONAL: Final = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})


@attrs.frozen(kw_only=True, eq=False)
class HeadFiles:
    """A head's configuration and weights.

    Attributes:
        path: Directory of the head.
        layer: Configuration of its layer, as that of a Llama.
        num_states: S.
        state_layers: Layers of the model whose inputs are these hidden states, ascending; empty: the usual three.
        keeps_normed: The residual beside attention is the hidden state after its norm; else the one before.
        weights: By name, such as ``layers.0.self_attn.q_proj.weight``.
        target_ids: Token of the model for each draft token, int64 ``[V]``; None: the same number.
        fingerprint: Fingerprint of the head's files.
    """

    path: Path
    layer: Any
    num_states: int
    state_layers: tuple[int, ...]
    keeps_normed: bool
    weights: Mapping[str, torch.Tensor]
    target_ids: torch.Tensor | None
    fingerprint: str


def read_head(path: str, *, hidden_size: int, vocab_size: int) -> HeadFiles:
    """Return a head.

    Args:
        path: Directory of the head.
        hidden_size: T.
        vocab_size: Tokens of the model.

    Raises:
        ModelLoadError: There is none, it is of another kind, or it was not made for such a model; says what and what to do.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors"))
    if not (place / "config.json").is_file() or not files:
        raise ModelLoadError(
            f"model.head {path}: no config.json and *.safetensors there.",
            hint="Name the directory of an EAGLE-3 head, as downloaded.",
        )
    text = read_text(place / "config.json")
    layer, config = _configs(path, text)
    tensors = MappedTensors(files)
    weights = {_plain(name): tensors.tensor(name) for name in tensors.names()}
    reader = _Checked(path, layer, weights, hidden_size=hidden_size, vocab_size=vocab_size)
    reader.check()
    state_layers = tuple(map(int, config.get("eagle_aux_hidden_state_layer_ids") or ()))
    if state_layers and (len(state_layers) != reader.num_states or list(state_layers) != sorted(set(state_layers))):
        raise ModelLoadError(
            f"model.head {path}: eagle_aux_hidden_state_layer_ids = {list(state_layers)}, and fc reads {reader.num_states} hidden states: "
            "as many different layers have to be named, in ascending order."
        )
    sizes = "".join(f"{name} {tuple(weight.shape)}" for name, weight in sorted(weights.items()))
    norms = b"".join(weight.float().numpy().tobytes() for name, weight in sorted(weights.items()) if "norm" in name)
    return HeadFiles(
        path=place,
        layer=layer,
        num_states=reader.num_states,
        state_layers=state_layers,
        keeps_normed=bool(config.get("norm_before_residual", "speculators_model_type" in config)),
        weights=weights,
        target_ids=reader.target_ids(),
        fingerprint=hashlib.blake2b(f"{text}\0{sizes}".encode() + norms, digest_size=16).hexdigest(),
    )


def _configs(path: str, text: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the configuration of a head's layer, and the head's own."""
    from transformers import LlamaConfig

    try:
        config = parse_json(text)
    except ValueError as error:
        raise ModelLoadError(f"model.head {path}: config.json is no JSON: {error}.") from error
    config = config if isinstance(config, Mapping) else {}
    kind, architectures = config.get("speculators_model_type"), config.get("architectures") or ["nothing"]
    if kind == "eagle3":
        layer = config.get("transformer_layer_config")
    elif kind is None and _OWN_FORMAT & set(architectures):
        layer = config
    else:
        raise ModelLoadError(
            f"model.head {path}: config.json has speculators_model_type = {kind!r} and architectures = {architectures}, which is no EAGLE-3.",
            hint='Served are speculators_model_type "eagle3" and the architecture LlamaForCausalLMEagle3.',
        )
    layer = layer if isinstance(layer, Mapping) else {}
    strange = [key for key in _OTHERWISE if config.get(key) or layer.get(key)]
    if strange or layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers", 1) != 1:
        found = ", ".join(strange) or f"{layer.get('num_hidden_layers', 1)} layers of {layer.get('model_type')}"
        raise ModelLoadError(f"model.head {path}: its layer is another one ({found}); one layer of a Llama is served.")
    made = LlamaConfig(**{key: value for key, value in layer.items() if key not in ("architectures", "model_type")})
    if made.hidden_act != "silu":
        raise ModelLoadError(f'model.head {path}: hidden_act = "{made.hidden_act}"; a head with "silu" is served.')
    return made, config


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return _LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


class _Checked:
    """Names and shapes of a head's weights against its configuration and the model."""

    def __init__(
        self, path: str, layer: Any, weights: Mapping[str, torch.Tensor], *, hidden_size: int, vocab_size: int
    ) -> None:
        self._path, self._layer, self._weights = path, layer, weights
        self._hidden_size, self._vocab_size = hidden_size, vocab_size
        fc = weights.get("fc.weight")
        self.num_states = 0 if fc is None or fc.dim() != 2 else fc.shape[1] // hidden_size

    def check(self) -> None:
        """Compare.

        Raises:
            ModelLoadError: A weight is missing, not known or of another shape.
        """
        expected, weights = self._shapes(), self._weights
        missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys() - _OPTIONAL
        if missing or unknown:
            names = f"lack {sorted(missing)[:3]}" if missing else f"have {sorted(unknown)[:3]}, which are not known"
            raise ModelLoadError(
                f"model.head {self._path}: its files {names}.", hint="Name an EAGLE-3 head of one layer."
            )
        wrong = [name for name, shape in expected.items() if tuple(weights[name].shape) != shape]
        if wrong or not self.num_states:
            name = (wrong or ["fc.weight"])[0]
            raise ModelLoadError(
                f"model.head {self._path}: {name} is {tuple(weights[name].shape)}, and {expected[name]} would go with a model of hidden "
                f"size {self._hidden_size}.",
                hint="Name a head that was trained for this model in model.path.",
            )
        self._check_tokens()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config, size = self._layer, self._layer.hidden_size
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, self.num_states * self._hidden_size),
            "norm.weight": (size,),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            found[f"{_LAYER}{name}.weight"] = (size,)
        projections = (("q", heads, 2 * size), ("k", kv_heads, 2 * size), ("v", kv_heads, 2 * size), ("o", size, heads))
        for name, outputs, inputs in projections:
            found[f"{_LAYER}self_attn.{name}_proj.weight"] = (outputs, inputs)
            if config.attention_bias:
                found[f"{_LAYER}self_attn.{name}_proj.bias"] = (outputs,)
        wide = config.intermediate_size
        for name, outputs, inputs in (("gate", wide, size), ("up", wide, size), ("down", size, wide)):
            found[f"{_LAYER}mlp.{name}_proj.weight"] = (outputs, inputs)
            if config.mlp_bias:
                found[f"{_LAYER}mlp.{name}_proj.bias"] = (outputs,)
        return found

    def _check_tokens(self) -> None:
        """Compare what has a row for each token; the model's own embeddings and output projection stand in for missing ones."""
        size, weights = self._layer.hidden_size, self._weights
        embeddings, head, table = (weights.get(name) for name in ("embed_tokens.weight", "lm_head.weight", "d2t"))
        stands_in = size == self._hidden_size
        if (embeddings is None and not stands_in) or (head is None and not (stands_in and table is None)):
            raise ModelLoadError(
                f"model.head {self._path}: it has no embeddings or output projection of its own, and the model's are of another size."
            )
        sizes = [(name, one) for name, one in (("embed_tokens", embeddings), ("lm_head", head)) if one is not None]
        for name, one in sizes:
            fits = one.dim() == 2 and one.shape[1] == size
            enough = len(one) >= self._vocab_size if name == "embed_tokens" or table is None else len(one) == len(table)
            if not (fits and enough):
                raise ModelLoadError(
                    f"model.head {self._path}: {name} is {tuple(one.shape)}, and the model has {self._vocab_size} tokens.",
                    hint="Name a head that was trained for this model in model.path.",
                )
        ids = self.target_ids()
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
            raise ModelLoadError(f"model.head {self._path}: d2t names tokens beyond the model's {self._vocab_size}.")

    def target_ids(self) -> torch.Tensor | None:
        """Return the token of each draft token; ``d2t`` says how far apart the two numbers are."""
        table = self._weights.get("d2t")
        return None if table is None else torch.arange(len(table)) + table.long()
