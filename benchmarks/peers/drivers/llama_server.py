"""llama.cpp's own server, in the package ``xllamacpp``: a slot for each sequence, prompts as token ids, all of them at once."""

from __future__ import annotations

import json
import math
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.drivers.protocol import Opened, Wanted, drive, versions_of

CERTAIN = 1000.0
"""Added to a logit, it makes the token the next one; the probability that the server tells is the one without it."""


def open_engine(wanted: Wanted) -> Opened:
    import xllamacpp

    options = dict(wanted.options)
    params = xllamacpp.CommonParams()
    params.model.path = wanted.model
    params.n_gpu_layers = 0
    params.n_parallel = wanted.max_num_seqs
    params.n_ctx = wanted.max_num_seqs * wanted.max_model_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.pop("threads", wanted.threads)
    params.n_batch = params.n_ubatch = options.pop("batch_size", 2048)
    params.cache_prompt = False  # nor is ours: each prompt is computed
    params.cache_ram_mib = 0
    params.fit_params = params.ui = False
    if wanted.precision == "fp32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    for name, value in options.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    threads = ThreadPoolExecutor(wanted.max_num_seqs)

    def ask(prompt: list[int], output_len: int, **more: Any) -> dict[str, Any]:
        asked = {
            "prompt": prompt,
            "n_predict": output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "return_tokens": True,
            "cache_prompt": False,
            **more,
        }
        address = f"{server.listening_address}/completion"
        request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        return list(threads.map(lambda prompt: ask(prompt, output_len)["tokens"], prompts))

    def logprob(text: list[int], place: int) -> float:
        more = {"logit_bias": [[text[place], CERTAIN]], "n_probs": 1, "cache_prompt": True, "id_slot": 0}
        answer = ask(text[:place], 1, **more)
        if "completion_probabilities" not in answer:
            return math.nan  # the token is part of a character
        (told,) = answer["completion_probabilities"]
        if told["id"] != text[place]:
            raise RuntimeError(f"token {told['id']} came where {text[place]} was asked for")
        return float(told["logprob"])

    def score(texts: list[list[int]]) -> list[list[float]]:
        return [[logprob(text, place) for place in range(1, len(text))] for text in texts]

    versions = {**versions_of("xllamacpp"), "instructions": xllamacpp.get_system_info()}
    return Opened(versions, generate, score)


if __name__ == "__main__":
    drive(open_engine)
