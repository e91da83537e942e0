"""How a model's own files say a text becomes one vector: the layout of sentence-transformers.

    modules.json   Transformer ─▶ Pooling ─▶ Dense … ─▶ Normalize
                   1_Pooling/config.json     2_Dense/config.json, model.safetensors

Whatever stands there and is not computed here is refused, in words: another vector than the model was made for is no vector.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.nn.functional import gelu, linear, normalize, relu, silu

from trencadis.errors import ModelLoadError
from trencadis_torch.loading.loader import ModelFiles

__all__ = ["Dense", "PoolingConfig", "read_pooling_config"]

logger = logging.getLogger("trencadis.torch")

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_COMPUTED = ("last", "mean", "cls")

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
}


@attrs.frozen(kw_only=True, eq=False)
class Dense:
    """A layer after pooling.

    Attributes:
        weight: float32 ``[out_features, in_features]``.
        bias: float32 ``[out_features]``, or None.
        activation: Applied to the sum.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``[num_texts, out_features]``. Pure."""
        return self.activation(linear(vectors, self.weight, self.bias))

    def to(self, device: torch.device) -> Dense:
        """Return the same with its weights on a device. Pure."""
        bias = None if self.bias is None else self.bias.to(device)
        return attrs.evolve(self, weight=self.weight.to(device), bias=bias)


@attrs.frozen(kw_only=True, eq=False)
class PoolingConfig:
    """From the hidden states of texts to vectors.

    Attributes:
        pooling: ``last``, ``mean`` or ``cls``.
        dense: Layers after it, in order.
        normalize: Scale to length 1 at the end.
        max_seq_length: Longest text the files allow, tokens; 0: they name none.
    """

    pooling: str
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    max_seq_length: int = 0

    def vectors(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_texts, embedding_size]``. Pure.

        Args:
            hidden: Last hidden states of all texts, one after the other, ``[T, hidden_size]``.
            lengths: Tokens of each text, int64 ``[num_texts]``, on the same device.
        """
        return self.finished(_pooled(hidden, lengths, self.pooling))

    def finished(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return pooled vectors through the dense layers and scaled: float32 ``[num_texts, embedding_size]``. Pure."""
        for layer in self.dense:
            vectors = layer(vectors)
        return normalize(vectors, dim=-1) if self.normalize else vectors

    def to(self, device: torch.device) -> PoolingConfig:
        """Return the same with its weights on a device. Pure."""
        return attrs.evolve(self, dense=tuple(layer.to(device) for layer in self.dense))


def _pooled(hidden: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    ends = lengths.cumsum(0)
    match pooling:
        case "last":
            return hidden[ends - 1].float()
        case "cls":
            return hidden[ends - lengths].float()
        case _:
            return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, unsafe=True)


def read_pooling_config(files: ModelFiles, *, default_pooling: str, device: torch.device) -> PoolingConfig:
    """Return how a model embeds; reads its files, if it has any of sentence-transformers.

    Args:
        files: The model.
        default_pooling: If neither the configuration nor the model's files name one.
        device: Where the weights of dense layers go.

    Raises:
        ModelLoadError: The files ask for something that is not computed here.
    """
    asked = files.source.pooling
    reader = _Reader(files, device)
    modules = reader.modules()
    pooling = default_pooling if asked == "auto" else asked
    if asked == "auto" and "Pooling" in modules:
        pooling = reader.pooling(modules["Pooling"][0])
    logger.info("Texts are embedded by %s pooling.", pooling)
    return PoolingConfig(
        pooling=pooling,
        dense=tuple(reader.dense(place) for place in modules.get("Dense", ())),
        normalize=files.source.normalize_embeddings,
        max_seq_length=reader.max_seq_length(),
    )


class _Reader:
    """Reads the files of one model; from a hub id they are fetched, if they are not here already."""

    def __init__(self, files: ModelFiles, device: torch.device) -> None:
        self._files = files
        self._device = device
        self._path = files.source.path

    def modules(self) -> dict[str, list[str]]:
        """Return folders by kind of module; empty without ``modules.json``."""
        content: list[dict[str, Any]] = self._json("modules.json") or []
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in content]
        order = [kind for kind, _ in found]
        dense = ["Dense"] * order.count("Dense")
        allowed = (["Transformer", "Pooling", *dense], ["Transformer", "Pooling", *dense, "Normalize"])
        if found and order not in allowed:
            raise ModelLoadError(
                f"{self._path}: modules.json asks for {' ▶ '.join(order)}; embedded is by Transformer ▶ Pooling ▶ "
                "Dense … ▶ Normalize.",
            )
        places: dict[str, list[str]] = {}
        for kind, place in found:
            places.setdefault(kind, []).append(place)
        self._check_prompts()
        return places

    def pooling(self, place: str) -> str:
        name = f"{place}/config.json"
        content = self._needed_json(name)
        given = content.get("pooling_mode")
        modes = [mode for key, mode in _POOLINGS.items() if content.get(key)] if given is None else given
        modes = [modes] if isinstance(modes, str) else list(modes)
        modes = ["last" if mode == "lasttoken" else mode for mode in modes] or ["mean"]
        if len(modes) != 1 or modes[0] not in _COMPUTED:
            raise ModelLoadError(
                f"{self._path}: {name} asks for {' and '.join(modes)} pooling; computed are: {', '.join(_COMPUTED)}.",
                hint="[embedding] pooling overrides it, with other vectors than the model was made for.",
            )
        return modes[0]

    def dense(self, place: str) -> Dense:
        from safetensors.torch import load_file

        content = self._needed_json(f"{place}/config.json")
        activation = str(content.get("activation_function", "torch.nn.modules.activation.Tanh"))
        kind = activation.rpartition(".")[2]
        renamed = content.get("module_input_name", "sentence_embedding") != "sentence_embedding"
        if kind not in _ACTIVATIONS or not activation.startswith("torch.nn.") or renamed or content.get("use_residual"):
            raise ModelLoadError(
                f"{self._path}: {place}/config.json asks for a dense layer ({activation}) that is not computed here.",
                hint=f"Computed are layers without residual, activated by: {', '.join(_ACTIVATIONS)}.",
            )
        file = self._file(f"{place}/model.safetensors")
        if file is None:
            raise ModelLoadError(
                f"{self._path}: no {place}/model.safetensors there.",
                hint="Weights are read from safetensors: pickled files can run code.",
            )
        tensors = {name: tensor.to(self._device, torch.float32) for name, tensor in load_file(file).items()}
        bias = tensors.get("linear.bias")
        if "linear.weight" not in tensors or (bias is None) == bool(content.get("bias", True)):
            raise ModelLoadError(f"{self._path}: {place}/model.safetensors lacks weights; it has {sorted(tensors)}.")
        return Dense(weight=tensors["linear.weight"], bias=bias, activation=_ACTIVATIONS[kind])

    def max_seq_length(self) -> int:
        content = self._json("sentence_bert_config.json") or {}
        tokenizer = self._json("tokenizer_config.json") or {}
        if content.get("do_lower_case") and not tokenizer.get("do_lower_case"):
            raise ModelLoadError(
                f"{self._path}: sentence_bert_config.json has texts lower-cased before they are tokenized, which is not "
                "done here.",
                hint="Lower-case the texts yourself, and set do_lower_case to false in that file.",
            )
        longest = content.get("max_seq_length") or tokenizer.get("model_max_length") or 0
        # Tokenizers without a limit say so with a huge number.
        return int(longest) if longest < 1e9 else 0

    def _check_prompts(self) -> None:
        content = self._json("config_sentence_transformers.json") or {}
        prompt = (content.get("prompts") or {}).get(content.get("default_prompt_name"))
        if prompt:
            logger.warning("%s expects %r before every text. Texts are embedded as they come.", self._path, prompt)

    def _needed_json(self, name: str) -> dict[str, Any]:
        content = self._json(name)
        if not isinstance(content, dict):
            raise ModelLoadError(f"{self._path}: no {name} there, which modules.json names.")
        return content

    def _json(self, name: str) -> Any:
        file = self._file(name)
        if file is None:
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelLoadError(f"{self._path}: {name} cannot be read: {error}") from error

    def _file(self, name: str) -> Path | None:
        if "gguf_file" in self._files.options:
            return None
        if Path(self._files.name).is_dir():
            file = Path(self._files.name) / name
            return file if file.is_file() else None
        from transformers.utils import cached_file

        found = cached_file(
            self._files.name,
            name,
            revision=self._files.options.get("revision"),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(found) if found else None
