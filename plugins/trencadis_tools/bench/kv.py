"""Comparison of KV connectors: time to first token with loaded KV against computed KV.

    writer: prompt ─▶ save ─▶ store ─▶ load ─▶ first token: reader, a second engine with an empty cache
    plain engine:   prompt ─▶ compute ──────▶ first token

Reader and plain engine alternate for every prompt, so that changes of the machine's speed affect both. A connector whose
store is the engine's own, such as host memory, is read by its writer; the prefix cache of all engines is off.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge

from trencadis.api import Config, Engine, Registry, build_engine
from trencadis.console import track
from trencadis.errors import ConfigError, InvalidRequestError, StepFailedError
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams

__all__ = ["NO_CONNECTOR", "KVResult", "KVWorkload", "measure_kv"]

NO_CONNECTOR = "none"
"""Name that stands for no connector; comparing two such engines measures the noise floor."""

_EAGER = "always"
_MOST_TOKENS = 4096
_OUTPUT_TOKENS = 8
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""Transfer parameters of a request whose KV another engine continues with; ignored by connectors over a store."""
_POLL_S = 0.001
"""Polling interval while a load is pending, seconds; that of a server's engine."""
_QUIET_S = 0.1
_LONGEST_SAVE_S = 30.0


@attrs.frozen(kw_only=True)
class KVWorkload:
    """Prompts of a KV connector measurement.

    Attributes:
        num_tokens: Tokens of each prompt; 0: 4096, or as many as the model takes.
        num_pairs: Number of measured prompts, each computed once and loaded once; one further prompt is not measured.
        seed: Seed of the prompts, which are random tokens.
    """

    num_tokens: int = attrs.field(default=0, validator=ge(0))
    num_pairs: int = attrs.field(default=4, validator=ge(1))
    seed: int = 0


@attrs.frozen(kw_only=True)
class KVResult:
    """Result of one connector. Times to the first token are medians, in seconds.

    Attributes:
        connector: Name of the connector.
        plan_hash: Hash of the engine's plugins, versions and options.
        num_pairs: Number of measured prompts.
        num_tokens: Tokens of each prompt.
        num_loaded_tokens: Mean number of tokens of a prompt that the reader loaded.
        reader: ``second engine``, or ``same engine`` if the store belongs to the engine that saved.
        computed_s: Time to first token of the engine without a connector.
        loaded_s: Time to first token of the reader.
        ratio: ``loaded_s / computed_s``, over all pairs.
        ratio_quartiles: Lower quartile, median and upper quartile of the ratio by pair.
        computed_cpu_s: CPU time of this process until the first computed token; that of a server is not included.
        loaded_cpu_s: CPU time of this process until the first token after a load.
        load_bytes_per_s: Loaded KV bytes divided by ``loaded_s``, which includes the computation of the first token.
        num_same_texts: Prompts whose output tokens equal those of the engine without a connector.
    """

    connector: str
    plan_hash: str
    num_pairs: int
    num_tokens: int
    num_loaded_tokens: float
    reader: str
    computed_s: float
    loaded_s: float
    ratio: float
    ratio_quartiles: tuple[float, float, float]
    computed_cpu_s: float
    loaded_cpu_s: float
    load_bytes_per_s: float
    num_same_texts: int


def measure_kv(
    config: Config,
    registry: Registry,
    workload: KVWorkload,
    *,
    connectors: Iterable[str],
    on_unusable: Callable[[str, ConfigError], None] | None = None,
) -> list[KVResult]:
    """Measure one connector after the other, and return their results.

    Args:
        config: The configuration, without prefix caching; ``[kv_connector] name`` is replaced, the connector's ``required`` is set, and
            every block that can be loaded is loaded (KV policy ``eager``), if that policy is installed.
        registry: The plugins.
        workload: Number and length of the prompts.
        connectors: Names of components; ``none`` measures the noise floor.
        on_unusable: Called with the name of an unusable connector and its error; the others are measured. None: the error is
            raised.

    Raises:
        InvalidRequestError: The prompts do not fit ``model.max_model_len``, or the model only embeds.
        StepFailedError: A request failed.
        TrencadisError: An engine cannot be built, or a store cannot be used.
    """
    plain = _engine(config, registry, NO_CONNECTOR, workload)
    results = []
    try:
        prompts = _prompts(plain, workload)
        for name in connectors:
            try:
                results.append(_measured(config, registry, name, plain, prompts, workload))
            except ConfigError as error:
                if on_unusable is None:
                    raise
                on_unusable(name, error)
        return results
    finally:
        plain.close()


def _measured(
    config: Config,
    registry: Registry,
    name: str,
    plain: Engine,
    prompts: list[tuple[int, ...]],
    workload: KVWorkload,
) -> KVResult:
    writer = _engine(config, registry, name, workload)
    try:
        reader = _engine(config, registry, name, workload)
        try:
            return _compared(name, plain, writer, reader, prompts)
        finally:
            reader.close()
    finally:
        writer.close()


def _engine(config: Config, registry: Registry, name: str, workload: KVWorkload) -> Engine:
    eager = _EAGER in registry.components("kv_policy")
    chosen = attrs.evolve(
        config,
        cache=attrs.evolve(config.cache, prefix_caching=False, num_blocks=_num_blocks(config, workload)),
        kv_connector=attrs.evolve(config.kv_connector, name=name, components=_required(config, registry, name)),
        tables={**config.tables, "kv_policy": attrs.evolve(config.noun("kv_policy"), name=_EAGER)}
        if eager
        else config.tables,
    )
    with track(f"Loading {config.model.path} ({name})", unit="buckets") as advance:
        engine = build_engine(chosen, registry=registry, progress=advance)
    if not isinstance(engine, Engine):
        engine.close()
        raise InvalidRequestError(f"{config.model.path} is an encoder: it has no KV that could be moved.")
    return engine


def _num_blocks(config: Config, workload: KVWorkload) -> int:
    """Return the KV blocks of one prompt and its output, plus a quarter: few, since three engines live at once and memory is slow at its first use."""
    most = workload.num_tokens or _MOST_TOKENS
    return config.cache.num_blocks or -(-5 * (most + _OUTPUT_TOKENS) // (4 * (config.cache.block_size or 16)))


def _required(config: Config, registry: Registry, name: str) -> dict[str, Any]:
    """Return the options of all connectors, with ``required`` set for the measured one so that an unusable store is an error."""
    options = dict(config.kv_connector.components)
    component = registry.components("kv_connector").get(name)
    if component is not None:
        own = options.get(name)
        own = component.component.config() if own is None else own
        if attrs.has(type(own)) and hasattr(own, "required"):
            options[name] = attrs.evolve(own, required=True)
    return options


def _prompts(engine: Engine, workload: KVWorkload) -> list[tuple[int, ...]]:
    """Return the warm-up prompt, followed by the measured prompts.

    Raises:
        InvalidRequestError: There is no room for them.
    """
    most = engine.max_model_len - _OUTPUT_TOKENS
    num_tokens = workload.num_tokens or min(_MOST_TOKENS, most)
    if num_tokens > most:
        raise InvalidRequestError(
            f"prompts of {num_tokens} tokens and {_OUTPUT_TOKENS} of output: the model takes {engine.max_model_len} tokens.",
            hint=f"Ask for at most {most}, or name a model that takes more.",
        )
    rng = random.Random(workload.seed)
    size = engine.model.vocab_size
    return [tuple(rng.choices(range(size // 2, size), k=num_tokens)) for _ in range(workload.num_pairs + 1)]


@attrs.frozen
class _Run:
    """Times and output of one served prompt."""

    first_s: float
    first_cpu_s: float
    end: FinishedSequence


def _compared(name: str, plain: Engine, writer: Engine, second: Engine, prompts: list[tuple[int, ...]]) -> KVResult:
    reader = second
    runs: list[tuple[_Run, _Run]] = []
    with track(f"Comparing {name}", total=len(prompts), unit="pairs") as advance:
        for number, prompt in enumerate(prompts):
            params = _serve(writer, prompt, transfer_params=_PREFILL).end.transfer_params
            _wait_for_saves(writer)
            computed = _serve(plain, prompt) if number % 2 else None
            loaded = _serve(reader, prompt, transfer_params=params, beside=writer)
            computed = computed or _serve(plain, prompt)
            if number:
                runs.append((computed, loaded))
            elif not loaded.end.num_cached_tokens and _serve(writer, prompt).end.num_cached_tokens:
                reader = writer  # its store cannot be read by another engine
            advance(number + 1)
    return _result(name, reader, runs, is_second=reader is second)


def _result(name: str, reader: Engine, runs: list[tuple[_Run, _Run]], *, is_second: bool) -> KVResult:
    computed = np.array([one.first_s for one, _ in runs])
    loaded = np.array([one.first_s for _, one in runs])
    num_loaded = float(np.mean([one.end.num_cached_tokens for _, one in runs]))
    loaded_s = float(np.median(loaded))
    return KVResult(
        connector=name,
        plan_hash=reader.plan_hash,
        num_pairs=len(runs),
        num_tokens=runs[0][0].end.num_prompt_tokens,
        num_loaded_tokens=num_loaded,
        reader="second engine" if is_second else "same engine",
        computed_s=float(np.median(computed)),
        loaded_s=loaded_s,
        ratio=float(loaded.sum() / computed.sum()),
        ratio_quartiles=tuple(np.quantile(loaded / computed, (0.25, 0.5, 0.75)).tolist()),
        computed_cpu_s=float(np.median([one.first_cpu_s for one, _ in runs])),
        loaded_cpu_s=float(np.median([one.first_cpu_s for _, one in runs])),
        load_bytes_per_s=num_loaded * reader.model.kv_bytes_per_token / loaded_s,
        num_same_texts=sum(bool(np.array_equal(a.end.token_ids, b.end.token_ids)) for a, b in runs),
    )


def _serve(
    engine: Engine,
    prompt: tuple[int, ...],
    *,
    transfer_params: Mapping[str, Any] | None = None,
    beside: Engine | None = None,
) -> _Run:
    """Serve one prompt.

    Args:
        engine: Engine that serves the prompt.
        prompt: Token ids.
        transfer_params: KV transfer parameters of the request.
        beside: Second engine to step meanwhile, if it holds blocks for this prompt.

    Raises:
        StepFailedError: The request failed.
    """
    params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    engine.add(Request(request_id="bench", prompt_token_ids=prompt, params=params, transfer_params=transfer_params))
    first_s = first_cpu_s = 0.0
    while True:
        if engine.is_stalled:
            time.sleep(_POLL_S)
            if beside is not None and beside is not engine and beside.has_work:
                beside.step()
        deltas = engine.step()
        if not first_s and len(deltas.token_ids):
            first_s, first_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        for end in deltas.finished:
            if end.finish_reason is FinishReason.ERROR:
                raise StepFailedError(f"request {end.request_id!r} failed: {end.error}")
            return _Run(first_s=first_s, first_cpu_s=first_cpu_s, end=end)


def _wait_for_saves(engine: Engine) -> None:
    """Wait until the engine's metrics stop changing, since connectors save on threads of their own."""
    until_s = time.perf_counter() + _LONGEST_SAVE_S
    before = None
    while (now := engine.metrics()) != before and time.perf_counter() < until_s:
        before = now
        time.sleep(_QUIET_S)
