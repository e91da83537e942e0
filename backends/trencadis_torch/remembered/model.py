"""What is remembered of a decoder that runs in one call, and the model that a start makes of it without transformers.

    load and prove ─▶ remember ─▶ store                       once
    key ─▶ store ─▶ recall ─▶ RememberedModel                 each start after that
                                  └▶ original                 modules of transformers, made when something needs them, with these weights

The key is of all that decides what was remembered: the model's files, how it is to be held, versions, this package's own text, the CPU.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from trencadis.errors import ModelLoadError
from trencadis.records import ModelFacts, ModelSource
from trencadis_torch.attention import adapter
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear.decoder import FusedDecoder, attach, decoder_of
from trencadis_torch.linear.fused import RotaryAttention
from trencadis_torch.linear.native import native
from trencadis_torch.linear.native_decoder import native_decoder
from trencadis_torch.linear.packed import PackedLinear
from trencadis_torch.linear.replacement import Replacement, put
from trencadis_torch.loading.fingerprint import fingerprint
from trencadis_torch.loading.loader import ModelFiles, find_model, locate
from trencadis_torch.loading.positions import fix_dynamic_frequencies
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.native_build import cpu_key
from trencadis_torch.remembered.store import ModelStore
from trencadis_torch.remembered.values import MODULES, NotPlainError

__all__ = ["RememberedModel", "key_of", "recall", "remember"]

logger = logging.getLogger("trencadis.torch")

_WITHOUT_EFFECT: Final = {"device", "max_prefill_batch_size", "num_threads", "prefault_cache"}
"""Keys of ``[backend.torch]`` that change nothing of a model on the CPU."""

_SETTINGS: Final = "generation_config.json", "modules.json", "*/config.json"
"""Files beside ``config.json`` that decide what is loaded."""


class RememberedModel:
    """Stands for a model of transformers whose passes run in one call.

    Args:
        found: Remembered model as it was read.
        files: Where it was found.
        make: Makes the model itself.

    Attributes:
        device: Device of the weights.
        dtype: Data type of the activations.
        architecture: Name of the model's class.
        num_heads: Query heads.
        layers: Attention layers of the model.
        facts: About it.
        replacement: Record of the replaced modules.
        files: Where it was found.
        trencadis_decoder: Decoder that runs.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, found: dict[str, Any], files: ModelFiles, make: Callable[[], Any]) -> None:
        self.architecture: str = found["architecture"]
        self.num_heads: int = found["num_heads"]
        self.layers: tuple[AttentionLayer, ...] = found["layers"]
        self.facts: ModelFacts = found["facts"]
        self.replacement: Replacement = found["replacement"]
        self.trencadis_decoder: FusedDecoder = found["decoder"]
        self.files = files
        self._found = found
        self._make = make
        self._lock = threading.Lock()
        self._original: Any = None

    def original(self) -> Any:
        """Return the model of transformers, its modules replaced and its weights these; made at the first call.

        Raises:
            ModelLoadError: The model's files have changed.
        """
        with self._lock:
            if self._original is None:
                logger.info("%s: its modules are made, for what does not run in one call.", self.architecture)
                with torch.inference_mode(False):  # a step may have asked for it
                    self._original = self._filled(self._make())
            return self._original

    @torch.no_grad()
    def _filled(self, model: Any) -> Any:
        for name, module in self._found["modules"].items():
            if isinstance(module, RotaryAttention):
                module.take_place_of(model.get_submodule(name))
            put(model, name, module)
        for name, tensor in self._found["tensors"].items():
            parent, _, own = name.rpartition(".")
            owner = model.get_submodule(parent)
            kind = "_parameters" if own in vars(owner)["_parameters"] else "_buffers"
            vars(owner)[kind][own] = (
                torch.nn.Parameter(tensor, requires_grad=False) if kind == "_parameters" else tensor
            )
        left = [name for name, part in model.named_parameters() if part.is_meta]
        if left or not adapter.switch(model, adapter.PAGED):
            raise ModelLoadError(f"{self.architecture}: what is remembered of it lacks {left[:1] or 'its attention'}.")
        attach(model, self.trencadis_decoder)
        return model


def key_of(source: ModelSource, config: TorchConfig) -> str:
    """Return the key of what may be remembered of a model; empty: nothing may, or its files are not here.

    Args:
        source: Where it comes from and how it is to be held.
        config: Configuration of the backend.
    """
    if not source.remember or source.trust_remote_code or source.head:
        return ""
    files = _files_here(source)
    found = "" if files is None else fingerprint(files)
    if not found or files is None:
        return ""
    settings = {name: value for name, value in attrs.asdict(config).items() if name not in _WITHOUT_EFFECT}
    parts = [
        *(found, _settings_digest(files), json.dumps(settings, default=str, sort_keys=True)),
        *(source.dtype, source.pooling, str(source.normalize_embeddings), str(source.is_draft)),
        *(torch.__version__, importlib.metadata.version("transformers"), platform.python_version()),
        *(_own_text(), cpu_key()),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _files_here(source: ModelSource) -> ModelFiles | None:
    """Return a model whose files lie in a directory here; None: they do not. Asks the hub for the newest of a hub id."""
    try:
        name, options = locate(source)
    except ModelLoadError:
        return None  # said by who loads it
    if not Path(name).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            name = str(Path(hf_hub_download(name, "config.json", revision=options.get("revision"))).parent)
        except Exception:  # without a network, or without such a model: said by who loads it
            return None
    return ModelFiles(source=source, name=name, options=options, config=None)


def _settings_digest(files: ModelFiles) -> str:
    digest, folder = hashlib.sha256(), Path(files.name)
    if "gguf_file" not in files.options:
        for path in sorted(itertools.chain.from_iterable(map(folder.glob, _SETTINGS))):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _own_text() -> str:
    """Return the digest of this package's text: another version may pack, or read, in another way."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def remember(store: ModelStore, key: str, model: Any, **facts: Any) -> str:
    """Write a model that was proven, if it runs in one call; returns why it is not remembered, or an empty string.

    Args:
        store: Where.
        key: Key of the model.
        model: Model of transformers, its modules replaced.
        facts: The other attributes of :class:`RememberedModel` by their names.
    """
    decoder = decoder_of(model)
    if decoder is None:
        return "it does not run in one call"
    modules = {name: part for name, part in model.named_modules() if isinstance(part, MODULES)}
    tops = {name: part for name, part in modules.items() if not any(name.startswith(f"{one}.") for one in modules)}
    persistent = model.state_dict(keep_vars=True)
    tensors = {
        name: one.detach() for name, one in persistent.items() if not name.startswith(tuple(f"{top}." for top in tops))
    }
    value = {
        **facts,
        "architecture": type(model).__name__,
        "modules": tops,
        "tensors": tensors,
        "decoder": attrs.evolve(decoder, held=()),
    }
    try:
        size = store.write(key, value, tensors=_tensors_of(decoder))
    except (NotPlainError, OSError) as error:
        return str(error)
    logger.info("%s is remembered, %.0f MiB: the next start maps it.", type(model).__name__, size / 2**20)
    return ""


def _tensors_of(decoder: FusedDecoder) -> list[torch.Tensor]:
    """Return the tensors that a decoder's structure points at."""
    found: list[torch.Tensor] = []
    for one in decoder.held:
        if isinstance(one, PackedLinear):
            found.extend(part for part in one.packed if isinstance(part, torch.Tensor))
        elif isinstance(one, torch.Tensor):
            found.append(one)
    return found


def recall(store: ModelStore, key: str, source: ModelSource, config: TorchConfig) -> RememberedModel | None:
    """Return the model that was remembered under a key; None: none was, or its kernels are not here.

    Args:
        store: Where.
        key: Key of the model.
        source: Where it comes from, for its modules.
        config: Configuration of the backend.
    """
    libraries = {type(one).__name__: one for one in (native(), native_decoder()) if one is not None}
    found = store.read(key, libraries) if len(libraries) == 2 else None
    if found is None:
        return None
    decoder: FusedDecoder = found["decoder"]
    files = _files_here(source)
    assert files is not None, "there is a key"
    # Structures keep what they point at but for tensors.
    found["decoder"] = attrs.evolve(decoder, held=(found["modules"], found["tensors"]))

    def make() -> Any:
        if key_of(source, config) != key:
            raise ModelLoadError(
                f"{source.path}: its files have changed since this start.", hint="Start the engine again."
            )
        files = find_model(source)
        adapter.register()
        model = skeleton(attrs.evolve(files, config=copy.deepcopy(files.config))).eval().requires_grad_(False)
        fix_dynamic_frequencies(model)
        return model

    return RememberedModel(found, files, make)
