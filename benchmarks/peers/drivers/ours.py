"""This engine, offline, as ``trencadis.LLM``."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    from trencadis import LLM

    torch_table: dict[str, Any] = {"num_threads": threads}
    if precision in ("int8", "int4"):
        torch_table["quantization"] = precision
    tables: dict[str, Any] = {
        "backend": {"name": "torch", "torch": torch_table},
        "cache": {"prefix_caching": False},
        "engine": {"max_num_seqs": max_num_seqs},
        "observer": {"names": []},
    }
    for path, value in options.items():
        _put(tables, path.split("."), value)
    _loaded["llm"] = LLM(
        {"path": model, "dtype": "auto" if precision == "bf16" else "float32", "max_model_len": max_model_len}, **tables
    )
    return {"versions": versions_of("trencadis", "torch", "transformers"), "pid": os.getpid()}


def _put(tables: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    tables[path[-1]] = value


def generate(prompts: list[list[int]], output_len: int) -> list[Sequence[int]]:
    from trencadis import SamplingParams

    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    outputs = _loaded["llm"].generate(prompts, params, use_progress=False)
    if failed := [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason.name == "ERROR"]:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
