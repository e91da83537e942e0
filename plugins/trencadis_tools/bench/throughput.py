"""Offline throughput: all requests at once, random prompts, fixed lengths, until the last is done."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs.validators import ge

from trencadis.api import Config, Registry, build_engine
from trencadis.clock import Clock, SystemClock
from trencadis.console import track
from trencadis.errors import InvalidRequestError, StepFailedError
from trencadis.records import FinishReason, Int32Array, ModelFacts, Request, SamplingParams
from trencadis_tools.bench.counts import counted_since

if TYPE_CHECKING:
    from trencadis.api import AnyEngine

__all__ = ["ThroughputResult", "ThroughputWorkload", "measure_throughput"]


@attrs.frozen(kw_only=True)
class ThroughputWorkload:
    """Prompts of a throughput measurement. Equal workloads give equal prompts on every machine.

    Attributes:
        num_requests: Number of requests, all queued at the start.
        input_len: Prompt tokens of each request, drawn uniformly from the vocabulary without its end-of-sequence tokens.
        output_len: Output tokens of each request; end-of-sequence tokens are ignored.
        seed: Seed of the prompts.
    """

    num_requests: int = attrs.field(default=32, validator=ge(1))
    input_len: int = attrs.field(default=128, validator=ge(1))
    output_len: int = attrs.field(default=64, validator=ge(1))
    seed: int = attrs.field(default=0, validator=ge(0))


@attrs.frozen(kw_only=True)
class ThroughputResult:
    """Measurements from the first request to the last token; loading and warm-up are excluded.

    Attributes:
        model: Value of ``model.path``.
        architecture: Class name of the model.
        plan_hash: Hash of the resolved plugins, versions and options.
        num_requests: Number of requests.
        input_len: Prompt tokens of each request.
        output_len: Output tokens of each request.
        seed: Seed of the prompts.
        wall_s: Wall-clock time, seconds.
        cpu_s: CPU time of all threads of this process, seconds.
        output_tokens_per_s: Output tokens divided by ``wall_s``.
        total_tokens_per_s: Prompt and output tokens divided by ``wall_s``.
        num_output_tokens: Output tokens of all requests.
        num_steps: Number of engine steps.
        num_preempted: Number of preemptions.
        num_compilations: Programs compiled while requests waited.
        padding_ratio: Share of computed token positions that were padding.
        prefix_hit_ratio: Share of prompt tokens taken from the prefix cache.
        engine_overhead_ratio: Share of ``wall_s`` spent in planning, building and committing steps.
        tokens_digest: Digest of all output tokens in the order of requests; equal if two backends choose the same tokens.
    """

    model: str
    architecture: str
    plan_hash: str
    num_requests: int
    input_len: int
    output_len: int
    seed: int
    wall_s: float
    cpu_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_output_tokens: int
    num_steps: int
    num_preempted: int
    num_compilations: int
    padding_ratio: float
    prefix_hit_ratio: float
    engine_overhead_ratio: float
    tokens_digest: str


def measure_throughput(
    config: Config, registry: Registry, workload: ThroughputWorkload, *, clock: Clock | None = None
) -> ThroughputResult:
    """Build an engine, run the workload, and return the measurements.

    One request of the same lengths runs first as warm-up, so that memory and threads are allocated.

    Args:
        config: The configuration.
        registry: The plugins.
        workload: Number, lengths and seed of the requests.
        clock: Clock of the engine and the measurement; None: the system's.

    Raises:
        InvalidRequestError: A request would not fit ``model.max_model_len``, or the model only embeds.
        StepFailedError: A request failed.
        TrencadisError: The engine cannot be built.
    """
    clock = clock or SystemClock()
    with track(f"Loading {config.model.path}", unit="buckets") as advance:
        engine = build_engine(config, registry=registry, clock=clock, progress=advance)
    try:
        prompts = _prompts(workload, engine.model, engine.max_model_len)
        _run(engine, prompts[:1], workload.output_len, name="warm-up")
        before = attrs.asdict(engine.totals)
        start_s, start_cpu_s = clock.now_s(), time.process_time()
        outputs = _run(engine, prompts[1:], workload.output_len, name="bench")
        wall_s, cpu_s = clock.now_s() - start_s, time.process_time() - start_cpu_s
        counts = counted_since(before, attrs.asdict(engine.totals))
        model, plan_hash = engine.model, engine.plan_hash
    finally:
        engine.close()
    return ThroughputResult(
        model=config.model.path,
        architecture=model.architecture,
        plan_hash=plan_hash,
        **attrs.asdict(workload),
        wall_s=wall_s,
        cpu_s=cpu_s,
        output_tokens_per_s=_ratio(counts["num_emitted_tokens"], wall_s),
        total_tokens_per_s=_ratio(counts["num_emitted_tokens"] + workload.num_requests * workload.input_len, wall_s),
        num_output_tokens=counts["num_emitted_tokens"],
        num_steps=counts["num_steps"],
        num_preempted=counts["num_preempted"],
        num_compilations=counts["num_compilations"],
        padding_ratio=_ratio(counts["num_padded_tokens"] - counts["num_scheduled_tokens"], counts["num_padded_tokens"]),
        prefix_hit_ratio=_ratio(counts["num_prompt_tokens_cached"], counts["num_prompt_tokens_admitted"]),
        engine_overhead_ratio=_ratio(counts["plan_s"] + counts["commit_s"], wall_s),
        tokens_digest=_digest(outputs),
    )


def _prompts(workload: ThroughputWorkload, model: ModelFacts, max_model_len: int) -> list[tuple[int, ...]]:
    """Return one prompt for the warm-up and one for each request.

    Raises:
        InvalidRequestError: The prompts would not fit the model.
    """
    length = workload.input_len + workload.output_len
    if length > max_model_len:
        raise InvalidRequestError(
            f"input_len + output_len = {length}: the longest sequence has {max_model_len} tokens.",
            hint="Shorten them, or raise model.max_model_len if the model allows it.",
        )
    choices = np.setdiff1d(np.arange(model.vocab_size), np.array(model.eos_token_ids, np.int64))
    drawn = np.random.default_rng(workload.seed).choice(choices, (workload.num_requests + 1, workload.input_len))
    return [tuple(row) for row in drawn.tolist()]


def _run(engine: AnyEngine, prompts: list[tuple[int, ...]], output_len: int, *, name: str) -> list[Int32Array]:
    """Queue all prompts, step until they are done, and return the output tokens of each.

    Raises:
        StepFailedError: A request failed.
    """
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(Request(request_id=f"{name}/{index}", prompt_token_ids=prompt, params=params))
    outputs: dict[str, Int32Array] = {}
    with track(f"Running {name}", total=len(prompts), unit="requests") as advance:
        while engine.has_work:
            for finished in engine.step().finished:
                if finished.finish_reason is FinishReason.ERROR:
                    raise StepFailedError(f"request {finished.request_id!r} failed: {finished.error}")
                outputs[finished.request_id] = finished.token_ids
                advance(len(outputs))
    return [outputs[f"{name}/{index}"] for index in range(len(prompts))]


def _digest(outputs: list[Int32Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tokens in outputs:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
