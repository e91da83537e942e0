"""What blending costs in exactness, and what it saves, by the share of tokens that is computed anew.

Each sample is a prompt of four documents and a question. The documents are computed once in another order; then, for every ratio,
they are put together for the prompt, the question and a reply follow, and what the model says is compared with what it says over KV
that was computed for the prompt: how far keys and values of the documents are off, the Kullback-Leibler divergence of the next
token's distribution along the reply, and how often the most likely token is the same. The reply is the exact model's greedy one, so
that every ratio is asked the same questions. CPU time is that of filling the documents' KV, against a prefill of them.

    python benchmarks/trained_model.py /tmp/smollm2-135m
    python benchmarks/serve/blend.py --models demo /tmp/smollm2-135m random_110m --pages BOOK --plot docs/_static/blend.png \
        > benchmarks/results/blend.json

``random_110m`` has random weights, drawn wide: no model that anybody uses. It shows that larger shapes work, what they take, and how
an error grows through twelve layers that nobody trained to agree; of agreement of a trained model it says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kv_ttft import RANDOM, make_random_model

from trencadis.interfaces import AllocationPlan, BlendChunk, BlendOrder
from trencadis.records import Bucket, ModelSource, Pass
from trencadis.text import load_tokenizer, resolve_model_path
from trencadis_torch.attention import adapter
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.blend.blender import make_blender
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.loader import find_model, load_decoder
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0)
BLOCK_SIZE = 16
NUM_DOCUMENTS, DOCUMENT, QUESTION, REPLY = 4, 192, 32, 24
NUM_FIRST = 4
WIDE = 3.0
"""By which random weights are multiplied: as they are drawn by default attention is nearly uniform, and nothing differs."""


class Model:
    """A model with one row, and blocks for two prompts.

    Args:
        name: ``demo`` or ``random_110m``.
        directory: For files.
    """

    def __init__(self, name: str, directory: str) -> None:
        path = resolve_model_path(name) if name != RANDOM else ""
        if name == RANDOM:
            path = f"{directory}/{RANDOM}"
            make_random_model(path)
        files = find_model(ModelSource(path=path, dtype="float32"))
        self.model = load_decoder(files, torch.device("cpu"))
        if name == RANDOM:
            with torch.no_grad():
                for weight in self.model.parameters():
                    if weight.dim() == 2:
                        weight.mul_(WIDE)
        adapter.register()
        layers = attention_layers(self.model)
        adapter.switch(self.model, adapter.PAGED)
        self.num_tokens = NUM_DOCUMENTS * DOCUMENT
        length = self.num_tokens + QUESTION + REPLY
        self.per_row = -(-length // BLOCK_SIZE)
        plan = AllocationPlan(
            num_blocks=self.per_row,
            block_size=BLOCK_SIZE,
            num_rows=1,
            max_model_len=length,
            max_num_batched_tokens=length,
        )
        self.rows = Rows(plan, torch.device("cpu"))
        self.rows.tables[0, : self.per_row] = torch.arange(self.per_row, dtype=torch.int32)
        self.cache = PagedKVCache(layers, num_blocks=self.per_row, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        self.runner = PassRunner(self.model, rows=self.rows, cache=self.cache, layout="ragged", workspace=Workspace())
        self.blender = make_blender(self.model, self.cache)

    @torch.inference_mode()
    def forward(self, tokens: np.ndarray, start: int, num_logits: int) -> torch.Tensor:
        """Compute tokens from ``start`` on; returns the log-probabilities after the last ones, ``[num_logits, V]``."""
        self.rows.tokens[0, : len(tokens)] = torch.from_numpy(tokens.astype(np.int32))
        zeros, count = np.zeros(1, np.int32), len(tokens) - start
        one = Pass(
            bucket=Bucket(1, count, -(-start // BLOCK_SIZE)),
            indices=zeros,
            rows=zeros,
            starts=np.array([start], np.int32),
            query_lens=np.array([count], np.int32),
            num_logits=zeros,
            num_prompt_logits=zeros,
        )
        logits = self.runner.forward(self.runner.inputs(one), np.arange(count - num_logits, count))
        return logits.float().log_softmax(-1)

    def reply(self, prompt: np.ndarray) -> np.ndarray:
        """Return a prompt with the greedy reply after it; its KV is computed."""
        text, start = prompt, 0
        for _ in range(REPLY):
            token = int(self.forward(text, start, 1)[0].argmax())
            start, text = len(text), np.append(text, token)
        return text

    def documents_kv(self) -> list[torch.Tensor]:
        """Return a copy of the KV of the documents, one tensor for each layer's keys and values."""
        return [part.flatten(0, 1)[: self.num_tokens].clone() for part in self.cache.parts]

    def packed(self, order: Sequence[int], documents: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """Compute the documents in an order, and return each without its position."""
        self.forward(np.concatenate([documents[i] for i in order]), 0, 1)
        found, per_document = {}, DOCUMENT // BLOCK_SIZE
        for place, which in enumerate(order):
            blocks = np.empty((per_document, self.cache.layout.block_bytes), np.uint8)
            self.cache.read_blocks(range(place * per_document, (place + 1) * per_document), blocks)
            found[which] = self.blender.pack(blocks, skip=0, num_tokens=DOCUMENT, position=place * DOCUMENT)
        return found

    def blend(self, prompt: np.ndarray, chunks: Sequence[np.ndarray], ratio: float) -> None:
        """Put the documents' KV together."""
        forced = np.zeros(self.num_tokens, np.bool_)
        for place in range(NUM_DOCUMENTS):
            forced[place * DOCUMENT : place * DOCUMENT + NUM_FIRST] = True
        order = BlendOrder(
            token_ids=prompt[: self.num_tokens],
            num_exact=0,
            blocks=np.arange(self.num_tokens // BLOCK_SIZE, dtype=np.int32),
            chunks=tuple(BlendChunk(position=place * DOCUMENT, tokens=tokens) for place, tokens in enumerate(chunks)),
            ratio=ratio,
            forced=forced,
        )
        for _ in self.blender.blend(order):
            pass


def sample(model: Model, documents: list[np.ndarray], question: np.ndarray, seed: int) -> list[dict[str, float]]:
    """Return what every ratio comes to for one prompt."""
    order = np.random.default_rng(seed).permutation(NUM_DOCUMENTS).tolist()
    while order == sorted(order):
        order = order[1:] + order[:1]
    packed = model.packed(order, documents)
    chunks = [packed[which] for which in range(NUM_DOCUMENTS)]
    prompt = np.concatenate([*documents, question])
    text = model.reply(prompt)
    started = time.process_time()
    model.forward(prompt[: model.num_tokens], 0, 1)
    prefill_s = time.process_time() - started
    exact = model.forward(text[:-1], 0, REPLY)
    expected = model.documents_kv()
    found = []
    for ratio in RATIOS:
        started = time.process_time()
        model.blend(prompt, chunks, ratio)
        blend_s = time.process_time() - started
        ups = [
            (one - other).square().mean() / other.square().mean()
            for one, other in zip(model.documents_kv(), expected, strict=True)
        ]
        said = model.forward(text[:-1], model.num_tokens, REPLY)
        found.append(
            {
                "ratio": ratio,
                "kv_error": float(torch.stack(ups).mean().sqrt()),
                "kl_nats": float((exact.exp() * (exact - said)).sum(-1).mean()),
                "agreement": float((exact.argmax(-1) == said.argmax(-1)).float().mean()),
                "time_share": blend_s / prefill_s,
            }
        )
    return found


def texts(name: str, pages: Sequence[Path], *, count: int) -> list[list[np.ndarray]]:
    """Return the documents and the question of each sample: runs of prose for the demo model, random tokens for the random one."""
    length = NUM_DOCUMENTS * DOCUMENT + QUESTION
    if name == RANDOM:
        runs = [np.random.default_rng(i).integers(3, 32000, length) for i in range(count)]
    else:
        prose = np.array(load_tokenizer(name).encode("\n".join(page.read_text() for page in pages)))
        starts = np.linspace(0, len(prose) - length, count).astype(int)
        runs = [prose[start : start + length] for start in starts]
    return [
        [run[first : first + DOCUMENT].astype(np.int32) for first in range(0, NUM_DOCUMENTS * DOCUMENT, DOCUMENT)]
        + [run[-QUESTION:].astype(np.int32)]
        for run in runs
    ]


def measure(name: str, pages: Sequence[Path], *, count: int) -> dict[str, Any]:
    """Return the means over samples, and the spread of the divergence."""
    with tempfile.TemporaryDirectory() as directory:
        model = Model(name, directory)
    samples = [
        sample(model, documents, question, seed)
        for seed, (*documents, question) in enumerate(texts(name, pages, count=count))
    ]
    points = []
    for at, ratio in enumerate(RATIOS):
        found = [one[at] for one in samples]
        means = {key: round(statistics.fmean(one[key] for one in found), 6) for key in found[0] if key != "ratio"}
        worst = round(max(one["kl_nats"] for one in found), 6)
        points.append({"ratio": ratio, **means, "kl_nats_worst": worst})
    return {
        "parameters": sum(weight.numel() for weight in model.model.parameters()),
        "layers": len(model.cache.layers),
        "samples": count,
        "points": points,
    }


def draw(file: Path, models: dict[str, Any]) -> None:
    """Draw error, divergence, agreement and time against the ratio."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    names = {
        "kv_error": "relative error of keys and values",
        "kl_nats": "KL divergence, nats a token",
        "agreement": "same most likely token, share",
        "time_share": "CPU time, share of a prefill",
    }
    for axes, (key, title) in zip(figure.subplots(1, len(names)), names.items(), strict=True):
        for name, result in models.items():
            points = result["points"]
            axes.plot([one["ratio"] for one in points], [one[key] for one in points], marker="o", ms=3, label=name)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("share computed anew", fontsize=8)
        if key == "kl_nats":
            axes.set_yscale("symlog", linthresh=1e-6)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo", RANDOM], help=f"names, {RANDOM}, or directories")
    parser.add_argument("--samples", type=int, default=12, help="of the demo model; larger ones get a quarter")
    parser.add_argument("--pages", type=Path, nargs="*", default=sorted(Path("docs/do").glob("*.md")), help="prose")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = {name: args.samples if name == "demo" else max(1, args.samples // 4) for name in args.models}
    models = {Path(name).name: measure(name, args.pages, count=count) for name, count in counts.items()}
    if args.plot is not None:
        draw(args.plot, models)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": args.threads,
        "text": [page.name for page in args.pages],
        "prompt": {"documents": NUM_DOCUMENTS, "tokens_each": DOCUMENT, "question": QUESTION, "reply": REPLY},
    }
    print(json.dumps({**about, "models": models}, indent=2))


if __name__ == "__main__":
    main()
