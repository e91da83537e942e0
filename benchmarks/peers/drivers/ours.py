"""This engine, offline, as ``trencadis.LLM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.drivers.protocol import Opened, Wanted, drive, versions_of

ROUNDED = ("int8", "int4")
DTYPES = {"fp32": "float32", "int8": "float32", "int4": "float32", "bf16": "bfloat16"}
"""Of the arithmetic, as the others' is by default; a published file as it is held."""


def open_engine(wanted: Wanted) -> Opened:
    from trencadis import LLM, SamplingParams

    torch_table: dict[str, Any] = {"num_threads": wanted.threads}
    if wanted.precision in ROUNDED:
        torch_table["quantization"] = wanted.precision
    tables: dict[str, Any] = {
        "backend": {"name": "torch", "torch": torch_table},
        "cache": {"prefix_caching": False},
        "engine": {"max_num_seqs": wanted.max_num_seqs},
        "observer": {"names": []},
    }
    for path, value in wanted.options.items():
        _put(tables, path.split("."), value)
    dtype = DTYPES.get(wanted.precision, "auto")
    llm = LLM({"path": wanted.model, "dtype": dtype, "max_model_len": wanted.max_model_len}, **tables)

    def outputs_of(prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        outputs = llm.generate(prompts, params, use_progress=False)
        if failed := [one.error for one in outputs if one.error]:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
        return outputs

    def generate(prompts: list[list[int]], output_len: int) -> list[Sequence[int]]:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        return [one.outputs[0].token_ids for one in outputs_of(prompts, params)]

    def score(texts: list[list[int]]) -> list[list[float]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        return [[entry.logprob for entry in one.prompt_logprobs] for one in outputs_of(texts, params)]

    return Opened(versions_of("trencadis", "torch", "transformers"), generate, score)


def _put(tables: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    tables[path[-1]] = value


if __name__ == "__main__":
    drive(open_engine)
