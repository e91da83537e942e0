"""Comparison of speculators on one list of prompts: drafts, acceptance, and cost.

    prompt ─▶ engine without speculation ─┐
           ─▶ engine with a drafter ──────┴▶ tokens compared, CPU seconds of the pair

Both engines live at once and alternate prompt by prompt, so that changes of the machine's speed affect both. A prompt that is
run again gets a new cache salt, so that a drafter that remembers answers has not seen it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from attrs.validators import ge

from trencadis.api import Config, Engine, Registry, Tokenizer, build_engine, encode_chat
from trencadis.console import track
from trencadis.errors import ConfigError, InvalidRequestError, StepFailedError
from trencadis.files import parse_json, read_text
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_tools.bench.counts import counted_since

__all__ = ["NO_DRAFTER", "SpeculationResult", "SpeculationWorkload", "measure_speculation", "read_prompts"]

NO_DRAFTER = "none"
"""Name that stands for no speculation; comparing two such engines measures the noise floor."""


@attrs.frozen(kw_only=True)
class SpeculationWorkload:
    """Prompts and sampling of a speculation measurement.

    Attributes:
        prompts: Token ids of each prompt. Repeated prompts get different cache salts, so that no drafter remembers their answers.
        max_tokens: Output tokens of each prompt; end-of-sequence tokens are ignored.
        temperature: Sampling temperature; 0: greedy.
        num_streams: Number of prompts served concurrently.
    """

    prompts: tuple[tuple[int, ...], ...] = attrs.field(repr=False)
    max_tokens: int = attrs.field(default=128, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0.0))
    num_streams: int = attrs.field(default=1, validator=ge(1))


@attrs.frozen(kw_only=True)
class SpeculationResult:
    """Result of one drafter. Positions count from the first draft of a step.

    Attributes:
        drafter: Name of the speculator.
        plan_hash: Hash of the engine's plugins, versions and options.
        num_prompts: Number of prompts, each run on both engines.
        num_output_tokens: Output tokens of one engine.
        num_same_texts: Prompts whose output tokens equal those of the engine without speculation.
        tokens_per_step: Mean number of tokens that a sequence gets in a decode step.
        drafts_per_step: Mean number of drafts of a sequence in a decode step.
        acceptance_ratio: Share of drafts that were accepted.
        acceptance_by_position: Share of accepted drafts at each position, among steps with a draft at this position.
        speed_up: CPU seconds without speculation divided by CPU seconds with it, over all prompts.
        speed_up_quartiles: Lower quartile, median and upper quartile of the speed-up by pair of runs.
        cpu_s_per_token: CPU seconds per output token of the engine with the drafter.
        drafted_ratio: Share of decode steps of a sequence in which it had drafts.
        draft_s: Mean time per engine step of drafting and of choosing the draft length, seconds.
    """

    drafter: str
    plan_hash: str
    num_prompts: int
    num_output_tokens: int
    num_same_texts: int
    tokens_per_step: float
    drafts_per_step: float
    acceptance_ratio: float
    acceptance_by_position: tuple[float, ...]
    speed_up: float
    speed_up_quartiles: tuple[float, float, float]
    cpu_s_per_token: float
    drafted_ratio: float
    draft_s: float


def read_prompts(path: Path, tokenizer: Tokenizer, *, limit: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the prompts in a JSON-lines file.

    Each line has ``messages``, ``turns`` (the first is the user's message) or ``prompt``; the first two are rendered with the model's
    chat template.

    Args:
        path: The file.
        tokenizer: Tokenizer of the model.
        limit: Maximum number of prompts; 0: all.

    Raises:
        ConfigError: The file cannot be read, or a line has none of these keys.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path}: {error}.", hint="Name a file with a JSON object a line.") from error
    found: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (not limit or len(found) < limit):
            found.append(_prompt(line, tokenizer, where=f"--prompts {path}, line {number}"))
    if not found:
        raise ConfigError(f"--prompts {path}: there is no prompt in it.")
    return tuple(found)


def _prompt(line: str, tokenizer: Tokenizer, *, where: str) -> tuple[int, ...]:
    hint = 'Write {"prompt": "..."}, {"turns": ["..."]} or {"messages": [{"role": "user", "content": "..."}]}.'
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}.", hint=hint) from error
    entry = entry if isinstance(entry, Mapping) else {}
    turns = entry.get("turns")
    messages = entry.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        messages = [{"role": "user", "content": turns[0]}]
    try:
        if messages:
            return encode_chat(tokenizer, messages)
        if isinstance(entry.get("prompt"), str):
            return tokenizer.encode(entry["prompt"])
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}", hint=hint) from error
    raise ConfigError(f"{where}: {line[:60]!r} has no prompt.", hint=hint)


def measure_speculation(
    config: Config, registry: Registry, workload: SpeculationWorkload, *, drafters: Iterable[str]
) -> list[SpeculationResult]:
    """Run the prompts without speculation and with each drafter in turn, and return the results.

    Each engine first runs a group of other prompts as warm-up.

    Args:
        config: The configuration; ``[speculation] name`` is replaced.
        registry: The plugins.
        workload: Prompts and sampling.
        drafters: Names of speculators; ``none`` measures the noise floor.

    Raises:
        InvalidRequestError: A request would not fit ``model.max_model_len``, or the model only embeds.
        StepFailedError: A request failed.
        TrencadisError: An engine cannot be built.
    """
    plain = _engine(config, registry, NO_DRAFTER)
    results = []
    try:
        for name in drafters:
            engine = _engine(config, registry, name)
            try:
                results.append(_compared(name, plain, engine, workload))
            finally:
                engine.close()
    finally:
        plain.close()
    return results


def _engine(config: Config, registry: Registry, drafter: str) -> Engine:
    chosen = attrs.evolve(config, speculation=attrs.evolve(config.speculation, name=drafter))
    with track(f"Loading {config.model.path} ({drafter})", unit="buckets") as advance:
        engine = build_engine(chosen, registry=registry, progress=advance)
    if not isinstance(engine, Engine):
        engine.close()
        raise InvalidRequestError(f"{config.model.path} is an encoder: it generates nothing that could be drafted.")
    return engine


@attrs.define
class _Run:
    """Sums over all runs on one engine."""

    cpu_s: list[float] = attrs.field(factory=list)
    tokens: list[tuple[int, ...]] = attrs.field(factory=list)
    num_decoded: int = 0
    num_decodes: int = 0


def _compared(name: str, plain: Engine, engine: Engine, workload: SpeculationWorkload) -> SpeculationResult:
    prompts, size = _salted(workload.prompts), workload.num_streams
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    for one in (plain, engine):
        # Reversed prompts: a drafter that remembers answers must not have seen a measured prompt.
        _serve(one, [(prompt[::-1], "bench/warm-up") for prompt, _ in groups[0]], workload, _Run())
    before = attrs.asdict(engine.totals)
    without, with_drafts = _Run(), _Run()
    with track(f"Comparing {name}", total=len(groups), unit="pairs") as advance:
        for number, group in enumerate(groups):
            order = [(plain, without), (engine, with_drafts)]
            for one, run in order if number % 2 == 0 else reversed(order):
                _serve(one, group, workload, run)
            advance(number + 1)
    counts = counted_since(before, attrs.asdict(engine.totals))
    ratios = np.array(without.cpu_s) / np.array(with_drafts.cpu_s)
    num_tokens = sum(map(len, with_drafts.tokens))
    return SpeculationResult(
        drafter=name,
        plan_hash=engine.plan_hash,
        num_prompts=len(prompts),
        num_output_tokens=num_tokens,
        num_same_texts=sum(a == b for a, b in zip(without.tokens, with_drafts.tokens, strict=True)),
        tokens_per_step=with_drafts.num_decoded / max(1, with_drafts.num_decodes),
        drafts_per_step=counts["num_draft_tokens"] / max(1, with_drafts.num_decodes),
        acceptance_ratio=counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]),
        acceptance_by_position=tuple(
            accepted / max(1, drafted)
            for drafted, accepted in zip(
                counts["num_drafted_by_position"], counts["num_accepted_by_position"], strict=True
            )
        ),
        speed_up=sum(without.cpu_s) / sum(with_drafts.cpu_s),
        speed_up_quartiles=tuple(np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()),
        cpu_s_per_token=sum(with_drafts.cpu_s) / num_tokens,
        drafted_ratio=counts["num_drafted_sequences"] / max(1, with_drafts.num_decodes),
        draft_s=counts["draft_s"] / counts["num_steps"],
    )


def _salted(prompts: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], str]]:
    """Return each prompt with a cache salt that no earlier copy of it has; different prompts may share a salt. Pure."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in prompts:
        seen[prompt] += 1
        found.append((prompt, f"bench/{seen[prompt]}"))
    return found


def _serve(
    engine: Engine, prompts: Sequence[tuple[tuple[int, ...], str]], workload: SpeculationWorkload, run: _Run
) -> None:
    """Serve prompts with their cache salts concurrently, and add their results to a run.

    Raises:
        StepFailedError: A request failed.
    """
    params = SamplingParams(max_tokens=workload.max_tokens, temperature=workload.temperature, ignore_eos=True, seed=0)
    start_s = time.process_time()
    slots = []
    for index, (prompt, salt) in enumerate(prompts):
        request = Request(request_id=f"bench/{index}", prompt_token_ids=prompt, params=params, cache_salt=salt)
        slots.append(engine.add(request))
    begun: set[int] = set()
    ended: dict[int, tuple[int, ...]] = {}
    while len(ended) < len(prompts):
        deltas = engine.step()
        for slot, count in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            if slot in begun:
                run.num_decodes += 1
                run.num_decoded += count
            begun.add(slot)
        for finished in deltas.finished:
            if finished.finish_reason is FinishReason.ERROR:
                raise StepFailedError(f"request {finished.request_id!r} failed: {finished.error}")
            ended[finished.slot] = tuple(finished.token_ids.tolist())
    run.cpu_s.append(time.process_time() - start_s)
    run.tokens.extend(ended[slot] for slot in slots)
