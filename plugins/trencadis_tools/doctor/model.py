"""Checks of the model's files, its tokenizer, and its memory, without loading it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trencadis.api import (
    Config,
    Tokenizer,
    check_model_path,
    is_hub_id,
    load_tokenizer,
    resolve_model_path,
    vocabulary_of,
)
from trencadis.errors import ModelLoadError
from trencadis.gguf_file import read_gguf
from trencadis.records import ModelFacts
from trencadis_tools.doctor.chat import check_ends, check_template
from trencadis_tools.doctor.findings import Findings
from trencadis_tools.doctor.memory import check_memory
from trencadis_tools.doctor.weights import check_weights

__all__ = ["check_model"]

_LOOK = "Correct model.path: a directory with config.json and *.safetensors, a .gguf file, a hub id, or demo."


def check_model(found: Findings, config: Config, sources: Mapping[str, str]) -> ModelFacts | None:
    """Check path, weights, tokenizer, chat template and memory; return the facts from the model's files.

    Args:
        found: Findings to add to.
        config: Configuration; tables ``model``, ``cache`` and ``engine`` are read.
        sources: Source of each value, by dotted path.
    """
    path = config.model.path
    place = Path(resolve_model_path(path))
    facts = None
    if place.is_dir():
        facts = _check_directory(found, place, path)
    elif place.is_file():
        _check_gguf(found, place)
    elif is_hub_id(path):
        cached = _cached(path, config.model.revision)
        if cached is None:
            check_model_path(path, where=_where(path, sources), revision=config.model.revision)
            found.warn(
                f"model {path}: not on this machine; taken for a hub id that is fetched at the first start",
                "Fetch it before: huggingface-cli download, or set model.path to a directory.",
            )
            return None
        facts = _check_directory(found, cached, path)
    else:
        found.fail(f"{_where(path, sources)}: there is no such file or directory", _LOOK)
        return None
    tokenizer = found.run("model", _check_tokenizer, config)
    if tokenizer is not None and tokenizer.has_text:
        found.run("model", _check_token_bytes, tokenizer)
    if tokenizer is not None and facts is not None and tokenizer.vocab_size > facts.vocab_size:
        found.warn(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, the model {facts.vocab_size}",
            "Check that model.tokenizer belongs to this model.",
        )
    if tokenizer is not None and tokenizer.has_text:
        found.run("model", check_template, tokenizer)
        found.run("model", check_ends, tokenizer, _files_of(place, path, config.model.revision))
    if facts is not None:
        found.run("memory", check_memory, config, facts)
    return facts


def _where(path: str, sources: Mapping[str, str]) -> str:
    """Return the setting of the model's path, with its source."""
    source = sources.get("model.path", "default")
    return f"[model] path = {json.dumps(path)} (from {source})"


def _files_of(place: Path, path: str, revision: str) -> Path | None:
    """Return the directory with a model's JSON files; None for a .gguf file, which contains its tokenizer."""
    if place.is_file():
        return None
    return place if place.is_dir() else _cached(path, revision)


def _check_directory(found: Findings, place: Path, path: str) -> ModelFacts | None:
    """Check a model directory; return its facts if it can be loaded."""
    if not os.access(place, os.R_OK | os.X_OK):
        found.fail(f"model {path}: the directory may not be read by this user", f"Run chmod or chown on {place}.")
        return None
    description = place / "config.json"
    try:
        told: Mapping[str, Any] = json.loads(description.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.fail(f"model {path}: config.json is missing in {place}", _LOOK)
        return None
    except (OSError, ValueError) as error:
        found.fail(f"model {path}: config.json cannot be read: {error}", "Fetch the model again.")
        return None
    num_bytes = check_weights(found, place, path)
    facts = facts_of(told, num_bytes)
    if num_bytes:
        found.ok(f"model {path}: {facts.architecture}, {facts.dtype}, {num_bytes / 2**20:,.0f} MiB of weights")
    return facts


def _check_gguf(found: Findings, place: Path) -> None:
    if place.suffix != ".gguf":
        found.fail(f"model {place}: a file, but no .gguf file", _LOOK)
        return
    if importlib.util.find_spec("gguf") is None:
        found.fail(f"model {place}: a .gguf file takes the package gguf", "Run pip install 'trencadis[gguf]'.")
        return
    try:
        file = read_gguf(place)
    except ModelLoadError as error:
        found.fail(f"model {error}".rstrip("."), "Fetch the file again, or give another one.")
        return
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind.name] += tensor.num_bytes
    total = max(1, sizes.total())
    kinds = ", ".join(f"{kind} ({100 * size / total:.0f} %)" for kind, size in sizes.most_common(4))
    found.ok(f"model {place}: {file.architecture}, .gguf, {total / 2**20:,.0f} MiB of weights: {kinds}")


def _check_tokenizer(found: Findings, config: Config) -> Tokenizer:
    model = config.model
    tokenizer = load_tokenizer(
        model.tokenizer or model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    if not tokenizer.has_text:
        found.ok("tokenizer: none, as configured: prompts are token ids")
    elif tokenizer.chat_template:
        found.ok(f"tokenizer: {tokenizer.vocab_size} tokens, with a chat template")
    else:
        found.warn(
            f"tokenizer: {tokenizer.vocab_size} tokens, no chat template: chats will be refused",
            "Set model.tokenizer to one that has a template, or send plain completions.",
        )
    return tokenizer


def _check_token_bytes(found: Findings, tokenizer: Tokenizer) -> None:
    """Check that a text equals the bytes of its tokens, which structured output requires."""
    vocabulary = vocabulary_of(tokenizer)
    fault = vocabulary.fault()
    if fault:
        found.warn(
            f"tokenizer: requests with structured output will be refused: {fault}",
            "Set model.tokenizer to one whose decoder joins its tokens, or do without structured output.",
        )
    else:
        found.ok(
            f"tokenizer: it decodes its {len(vocabulary.tokens)} tokens to their bytes, as structured output needs"
        )


def facts_of(told: Mapping[str, Any], weights_bytes: int) -> ModelFacts:
    """Return the facts of a ``config.json`` that components and memory checks need. Pure.

    The KV cache is estimated as for grouped-query attention in every layer: 2 × layers × KV heads × head dimension.
    Source: the KV cache of transformers' ``DynamicCache``; models with latent or windowed attention need less.

    Args:
        told: Content of ``config.json``.
        weights_bytes: Size of the weights, bytes.
    """
    inner = told.get("text_config") if isinstance(told.get("text_config"), Mapping) else told
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else told
    heads = int(text.get("num_attention_heads") or 1)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    layers = int(text.get("num_hidden_layers") or 0)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or told.get("dtype") or "float32").removeprefix("torch.")
    width = 4 if dtype == "float32" else 2
    names = told.get("architectures") or ["unknown"]
    return ModelFacts(
        architecture=str(names[0]),
        dtype=dtype,
        vocab_size=int(text.get("vocab_size") or 32_000),
        max_model_len=int(text.get("max_position_embeddings") or 2048),
        eos_token_ids=(),
        num_parameters=weights_bytes // width,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * width,
    )


def _cached(path: str, revision: str) -> Path | None:
    """Return the directory in which the hub's own library keeps a model, or None."""
    hub: Any = importlib.import_module("huggingface_hub")
    config = hub.try_to_load_from_cache(path, "config.json", revision=revision or None)
    return Path(config).parent if isinstance(config, str) else None
