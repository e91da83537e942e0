"""On a CUDA device: decode of whole engines with a model of a usual shape and random weights, beside transformers' own generate.

    python benchmarks/serve/cuda_generate.py --shape 1b --batches 1 32 256 --output benchmarks/results/cuda_generate_1b.json

Engines are alive together, share one copy of the weights where they compute with the same, and decode in turns. Every figure is a
median over blocks of steps:

    itl_ms      between two steps, on the clock: what a client waits for a token
    submit_ms   of it, the host in ``submit``: launches, and whatever it waits for
    device_ms   from the first to the last kernel of a step, by events
    roofline    bytes that a step must read (weights once, keys and values once) over what a plain read of the same device
                achieves, as a share of the interval

``generate`` is transformers' with its dynamic cache and SDPA attention, timed with two lengths whose difference is decode alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins
from trencadis_torch import backend as torch_backend

COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**COMMON, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    "1b": {**COMMON, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "8b": {**COMMON, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
           "tie_word_embeddings": False},
}  # fmt: skip
"""Those of Llama 3.2 1B and Llama 3.1 8B."""

GRAPHS = {"backend.torch.layout": "padded", "backend.torch.graphs": "buckets", "bucketing.name": "from_file"}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager, gathered": {"backend.torch.attention": "sdpa", "backend.torch.pack": "off"},
    "eager, kernel": {"backend.torch.pack": "off"},
    "eager, kernel, fused": {},
    "graphs, gathered": {**GRAPHS, "backend.torch.attention": "sdpa", "backend.torch.pack": "off"},
    "graphs, kernel": {**GRAPHS, "backend.torch.pack": "off"},
    "graphs, kernel, fused": GRAPHS,
    "graphs, kernel, fused, again": GRAPHS,
}
BLOCK_SIZE = 16


class Models:
    """Copies of the same random weights, made on the device."""

    def __init__(self, shape: dict[str, Any], device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._shared: Any = None

    def load(self, *, fused: bool) -> Any:
        """Return the model; an engine that fuses modules gets a copy of its own."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if self._shared is not None and not fused:
            return self._shared
        options = dict(self._shape)
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self._device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        torch.set_default_dtype(before)
        model.eval().requires_grad_(False)
        if not fused:
            self._shared = model
        return model


class Watched:
    """Notes the durations of ``submit`` of every backend, and what the device took."""

    def __init__(self) -> None:
        self.submit_s: list[float] = []
        self.device_s: list[float] = []
        submit, wait = torch_backend.TorchBackend.submit, torch_backend.TorchStep.wait

        def timed(backend: Any, batch: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return submit(backend, batch)
            finally:
                self.submit_s.append(time.perf_counter() - start_s)

        def noted(step: Any) -> Any:
            output = wait(step)
            self.device_s.append(output.device_s)
            return output

        torch_backend.TorchBackend.submit = timed  # type: ignore[method-assign]
        torch_backend.TorchStep.wait = noted  # type: ignore[method-assign]

    def take(self) -> tuple[list[float], list[float]]:
        """Return what was noted since the last call."""
        found = self.submit_s[:], self.device_s[:]
        self.submit_s.clear()
        self.device_s.clear()
        return found


def write_folder(shape: dict[str, Any], folder: Path) -> Path:
    """Write configuration and tokenizer of a model whose weights are never read."""
    import importlib.resources

    from safetensors.torch import save_file

    shutil.copytree(str(importlib.resources.files("trencadis") / "demo" / "target"), folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def make_engine(folder: Path, models: Models, options: dict[str, Any], *, size: int, length: int, most: int) -> Any:
    """Return an engine for some sequences of as many tokens."""
    fused = options.get("backend.torch.pack") != "off"
    torch_backend.load_decoder = lambda *_: models.load(fused=fused)  # type: ignore[attr-defined]
    blocks = -(-(length + most) // BLOCK_SIZE) + 1
    buckets = folder / f"buckets_{size}.txt"
    buckets.write_text(f"([1, {min(size, 16)}], {length}, 0)\n({size}, 1, {size * blocks})\n")
    resolved, registry = load_with_plugins(
        environ={},
        overrides={
            "model.path": str(folder),
            "model.dtype": "bfloat16",
            "model.max_model_len": (blocks + 1) * BLOCK_SIZE,
            "cache.num_blocks": size * blocks + 2,
            "cache.block_size": BLOCK_SIZE,
            "cache.prefix_caching": False,
            "engine.max_num_seqs": size,
            "engine.max_num_batched_tokens": max(256, 16 * length),
            "backend.torch.device": "cuda",
            "backend.torch.max_prefill_batch_size": min(size, 16),
            "bucketing.from_file.path": str(buckets),
            "observer.names": [],
            **options,
        },
    )
    return build_engine(resolved.config, registry=registry)


class Decoding:
    """An engine in mid-decode."""

    def __init__(self, engine: Any, *, size: int, length: int, most: int, vocab_size: int) -> None:
        self._engine = engine
        generator = np.random.default_rng(7)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        for number in range(size):
            prompt = generator.integers(3, min(8000, vocab_size), length).tolist()
            engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
        begun: set[int] = set()
        start_s = time.perf_counter()
        while len(begun) < size:
            begun.update(engine.step().slots.tolist())
        torch.cuda.synchronize()
        self.prefill_s = time.perf_counter() - start_s

    def block(self, num_steps: int) -> list[float]:
        """Return the intervals between some steps, s; the first ones, which fill the pipeline, are left out."""
        times = []
        for _ in range(num_steps + 3):
            self._engine.step()
            times.append(time.perf_counter())
        return np.diff(times)[2:].tolist()

    def close(self) -> None:
        """End it."""
        self._engine.close()


def read_rate(device: torch.device) -> float:
    """Return the bytes per second of a plain read: the largest of some sums over 4 GiB."""
    source = torch.ones(2**30, device=device)
    make: Any = torch.cuda.Event
    best = 0.0
    for _ in range(8):
        first, last = make(enable_timing=True), make(enable_timing=True)
        first.record()
        source.sum()
        last.record()
        last.synchronize()
        best = max(best, source.numel() * 4 / first.elapsed_time(last) * 1e3)
    return best


@torch.inference_mode()
def generate_ms(model: Any, *, size: int, length: int, most: int, vocab_size: int) -> float:
    """Return what a token of ``generate`` takes, ms: the median over three rounds."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, min(8000, vocab_size), (size, length), device=model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "use_cache": True}
    took: dict[int, list[float]] = {2: [], most: []}
    for _ in range(4):
        for count, times in took.items():
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
    short, long = (statistics.median(times[1:]) for times in took.values())
    model.set_attn_implementation("trencadis_paged")
    return 1e3 * (long - short) / (most - 2)


def profile(decoding: Decoding, num_steps: int) -> list[dict[str, Any]]:
    """Return the kernels of some steps by their time, µs for each step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(num_steps):
            decoding._engine.step()
        torch.cuda.synchronize()
    events = [one for one in watched.key_averages() if one.device_time_total > 0]
    events.sort(key=lambda one: -one.device_time_total)
    total = sum(one.device_time_total for one in events)
    rows = [{"kernel": "all", "us": round(total / num_steps, 1), "calls": sum(one.count for one in events) / num_steps}]
    rows += [
        {"kernel": one.key[:90], "us": round(one.device_time_total / num_steps, 1), "calls": one.count / num_steps}
        for one in events[:16]
    ]
    return rows


def measure(
    folder: Path, models: Models, shape: dict[str, Any], options: argparse.Namespace, size: int
) -> dict[str, Any]:
    """Measure all variants with one batch size."""
    length, rounds, steps = options.length, options.rounds, options.steps
    most = rounds * (steps + 3) + 60
    watched: Watched = options.watched
    # All are loaded before any of them runs: loading switches the attention of a model that they share.
    engines = {
        name: make_engine(folder, models, VARIANTS[name], size=size, length=length, most=most)
        for name in options.variants
    }
    alive = {
        name: Decoding(engine, size=size, length=length, most=most, vocab_size=shape["vocab_size"])
        for name, engine in engines.items()
    }
    times: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in alive}
    for _ in range(rounds):
        for name, decoding in alive.items():
            watched.take()
            times[name][0].extend(decoding.block(steps))
            submits, devices = watched.take()
            times[name][1].extend(submits[2:])
            times[name][2].extend(devices[2:])
    heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    context = length + most // 2
    kv_bytes = size * context * 2 * layers * heads * shape["head_dim"] * 2
    num_bytes = options.weight_bytes + kv_bytes
    found: dict[str, Any] = {"batch_size": size, "prompt": length, "bytes_of_a_step": num_bytes}
    for name, (itl, submit, device) in times.items():
        itl_ms = 1e3 * statistics.median(itl)
        found[name] = {
            "itl_ms": round(itl_ms, 3),
            "tokens_per_s": round(1e3 * size / itl_ms, 1),
            "submit_ms": round(1e3 * statistics.median(submit), 3),
            "device_ms": round(1e3 * statistics.median(device), 3),
            "roofline": round(num_bytes / options.read_rate / (itl_ms / 1e3), 3),
            "prefill_s": round(alive[name].prefill_s, 3),
        }
    if size in options.profile:
        found["kernels"] = {name: profile(decoding, 10) for name, decoding in alive.items() if "again" not in name}
    for decoding in alive.values():
        decoding.close()
    alive.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--length", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batch sizes whose kernels are listed")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers' generate out")
    parser.add_argument("--output", type=Path, help="file for the results; else they are printed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: nothing is measured.")
        return
    device, shape = torch.device("cuda", 0), SHAPES[options.shape]
    models = Models(shape, device)
    model = models.load(fused=False)
    options.watched = Watched()
    options.read_rate = read_rate(device)
    # Of tied embeddings every element is read by the output projection; of others some rows.
    unread = 0 if shape["tie_word_embeddings"] else model.get_input_embeddings().weight.numel()
    options.weight_bytes = 2 * (sum(one.numel() for one in model.parameters()) - unread)
    results: list[dict[str, Any]] = []
    found = {
        "machine": {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "read_gb_per_s": round(options.read_rate / 1e9),
        },
        "shape": options.shape,
        "weights_gb": round(options.weight_bytes / 1e9, 3),
        "results": results,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(shape, Path(scratch) / "model")
        for size in options.batches:
            one = measure(folder, models, shape, options, size)
            if not options.no_generate:
                took = generate_ms(model, size=size, length=options.length, most=34, vocab_size=shape["vocab_size"])
                one["generate"] = {"itl_ms": round(took, 3), "tokens_per_s": round(1e3 * size / took, 1)}
            results.append(one)
            print(json.dumps({key: value for key, value in one.items() if key != "kernels"}), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.output is None:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
