"""llama.cpp's own server, in the package ``xllamacpp``: a slot for each sequence, prompts as token ids, all of them at once."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.drivers.protocol import serve, timed, versions_of

_loaded: dict[str, Any] = {}


def load(
    model: str,
    precision: str,
    threads: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_gpu_layers = 0
    params.n_parallel = max_num_seqs
    params.n_ctx = max_num_seqs * max_model_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.pop("threads", threads)
    params.n_batch = params.n_ubatch = options.pop("batch_size", 2048)
    params.cache_prompt = False  # nor is ours: each prompt is computed
    params.cache_ram_mib = 0
    params.fit_params = params.ui = False
    if precision == "fp32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    for name, value in options.items():
        setattr(params, name, value)
    _loaded["server"] = xllamacpp.Server(params)
    _loaded["threads"] = ThreadPoolExecutor(max_num_seqs)
    found = versions_of("xllamacpp")
    return {"versions": {**found, "instructions": xllamacpp.get_system_info()}}


def _continued(prompt: list[int], output_len: int) -> list[int]:
    asked = {
        "prompt": prompt,
        "n_predict": output_len,
        "ignore_eos": True,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "return_tokens": True,
        "cache_prompt": False,
    }
    address = f"{_loaded['server'].listening_address}/completion"
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
    return list(_loaded["threads"].map(lambda prompt: _continued(prompt, output_len), prompts))


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
