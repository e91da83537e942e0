"""What int8 costs in quality: perplexity on held-out text, float32 against int8 and against transformers' own arithmetic.

    python benchmarks/trained_model.py /tmp/smollm2-135m
    python benchmarks/serve/perplexity.py --models demo /tmp/smollm2-135m --text book.txt questions.jsonl \
        > benchmarks/results/perplexity.json

What the demo model learnt from is in its README; of other models, ask their authors. A model is a directory or a .gguf file.
Windows of tokens do not overlap; the first token of each is given and not scored. The same windows for every variant.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "micro"))

import machine

from trencadis.clock import SystemClock
from trencadis.records import ModelSource
from trencadis.text import resolve_model_path
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig

VARIANTS: dict[str, dict[str, Any]] = {"off": {"pack": "off"}, "packed": {}, "int8": {"quantization": "int8"}}


def token_ids(path: str, text: str, limit: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the first tokens of a text, special ones left out."""
    from transformers import AutoTokenizer

    folder, options = (str(Path(path).parent), {"gguf_file": Path(path).name}) if path.endswith(".gguf") else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    # Eight characters a token at most: no more of the text is needed.
    return np.array(tokenizer(text[: 8 * limit], add_special_tokens=False)["input_ids"][:limit], np.int64)


@torch.inference_mode()
def losses(path: str, ids: np.ndarray[Any, np.dtype[np.int64]], window: int, options: dict[str, Any]) -> torch.Tensor:
    """Return the negative log-likelihood of every scored token, float64."""
    backend = TorchBackend(TorchConfig(device="cpu", **options), clock=SystemClock())
    backend.load(ModelSource(path=path), sampler=ArgmaxSampler())
    found = []
    for first in range(0, len(ids) - 1, window):
        part = torch.from_numpy(ids[first : first + window])
        attention = WholeTexts(backend._layers, [len(part)])
        logits = backend._model(
            input_ids=part[None],
            position_ids=torch.arange(len(part))[None],
            use_cache=False,
            **{PASS_ARGUMENT: attention},
        ).logits[0]
        found.append(torch.nn.functional.cross_entropy(logits[:-1].double(), part[1:], reduction="none"))
    return torch.cat(found)


def measure(name: str, path: str, text: str, *, num_tokens: int, window: int) -> dict[str, Any]:
    """Return perplexities of one model, and what rounding adds to the loss with its standard error."""
    ids = token_ids(path, text, num_tokens)
    scored = {variant: losses(path, ids, window, options) for variant, options in VARIANTS.items()}
    added = scored["int8"] - scored["packed"]
    return {
        "model": name,
        "num_scored": len(added),
        "window": window,
        "perplexity": {variant: round(math.exp(float(values.mean())), 4) for variant, values in scored.items()},
        "int8_adds_nats": round(float(added.mean()), 5),
        "standard_error_nats": round(float(added.std() / len(added) ** 0.5), 5),
        "largest_difference_packed_nats": float((scored["packed"] - scored["off"]).abs().max()),
    }


def read_text(path: Path) -> str:
    """Return a text, or all strings of a .jsonl file, one after the other."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        return text
    records = (json.loads(line) for line in text.splitlines() if line.strip())
    return "\n\n".join(value for record in records for value in record.values() if isinstance(value, str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo"])
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    sizes = {"num_tokens": options.tokens, "window": options.window}
    results = [
        {"text": Path(text).name, **measure(Path(name).name, resolve_model_path(name), read_text(Path(text)), **sizes)}
        for name in options.models
        for text in options.text
    ]
    print(json.dumps({"machine": machine.describe(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
