"""Run as a program: loads a model, and prints how much memory it took at most, how much its weights take, and what its logits are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def main(path: str, options: str) -> None:
    """Print the JSON of what loading a model took.

    Args:
        path: Of the model.
        options: JSON of ``[backend.torch]``.
    """
    # What is imported anyhow is no part of a load.
    from transformers.models.llama import modeling_llama  # noqa: F401

    from trencadis.clock import SystemClock
    from trencadis.records import ModelSource
    from trencadis_testing.backend import ArgmaxSampler
    from trencadis_torch.backend import TorchBackend
    from trencadis_torch.config import TorchConfig
    from trencadis_torch.linear import native, native_decoder

    native.native(), native_decoder.native_decoder()
    torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64))  # PyTorch's own threads and buffers
    settings: dict[str, Any] = json.loads(options)
    backend = TorchBackend(TorchConfig(device="cpu", **settings), clock=SystemClock())
    before = _memory("VmRSS")
    facts = backend.load(ModelSource(path=path), sampler=ArgmaxSampler())
    peak = _memory("VmHWM")  # getrusage would count the process that started this one
    sys.stdout.write(
        json.dumps({"before": before, "peak": peak, "after": _memory("VmRSS"), "weights": facts.weights_bytes}) + "\n"
    )


def _memory(name: str) -> int:
    """Return the memory of this process, bytes: ``VmRSS`` now, ``VmHWM`` at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
