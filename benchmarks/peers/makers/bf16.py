"""Writes a model of transformers once more, its weights in bfloat16."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def make(source: str, target: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in Path(target).glob("*.safetensors"):
        weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((Path(target) / "config.json").read_text())
    (Path(target) / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


if __name__ == "__main__":
    make(*sys.argv[1:3])
