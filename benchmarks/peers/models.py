"""Files of the models: random or trained weights as transformers reads them, and what the peers read, made from these. Made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from peers import environments
from peers.shapes import Shape

__all__ = ["ModelError", "files_of"]

MAKERS = {
    "gguf": ("gguf", "peers.makers.gguf_file"),
    "openvino": ("openvino_export", "peers.makers.openvino_model"),
    "published": ("gemma", "peers.makers.published"),
}
"""By kind: the environment and the module that make it."""
TRAINED = Path(__file__).parents[1] / "trained_model.py"
REASON_CHARACTERS = 300


class ModelError(Exception):
    """A file of a model could not be made; the message says why."""


def files_of(shape: Shape, kind: str, precision: str, cache: Path) -> Path:
    """Return the model as an engine reads it, made now if it is not there.

    Args:
        shape: Of the model.
        kind: ``hf``, ``hf_bf16``, ``gguf``, ``openvino`` or ``published``.
        precision: Of the weights; ``hf`` is always fp32, ``hf_bf16`` bfloat16, ``published`` as it was published.
        cache: Where models are.

    Raises:
        ModelError: It could not be made.
    """
    sizes = json.dumps(attrs.asdict(shape))
    digest = hashlib.blake2b(sizes.encode(), digest_size=4).hexdigest()  # a shape that changed is another model
    home = cache / "models" / f"{shape.name}-{digest}"
    source = home / "hf"
    if kind != "published":
        own = [str(TRAINED)] if shape.is_trained else ["-m", "peers.makers.hf", sizes]
        _made(source, [sys.executable, *own])
    if kind == "hf":
        return source
    if kind == "hf_bf16":
        return _made(home / kind, [sys.executable, "-m", "peers.makers.bf16", str(source)])
    environment, module = MAKERS[kind]
    prepared = environments.find(environment, cache)
    if prepared.reason:
        raise ModelError(f"the environment {environment} that makes {kind} files: {prepared.reason}")
    command = [str(prepared.python), "-m", module, str(source)]
    name = f"{kind}-{precision}" if kind == "openvino" else f"{precision}.gguf"
    return _made(home / name, command, precision)


def _made(target: Path, command: list[str], *more: str) -> Path:
    """Return ``target``, which ``command`` writes; half a file is never taken for one."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f"half-{target.name}")
    shutil.rmtree(half, ignore_errors=True)
    here = str(Path(__file__).resolve().parents[1])
    paths = [here, os.environ["PYTHONPATH"]] if command[0] == sys.executable and "PYTHONPATH" in os.environ else [here]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, str(half), *more], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise ModelError(f"{target.name} could not be made: {lines[-1][:REASON_CHARACTERS]}")
    half.rename(target)
    return target
