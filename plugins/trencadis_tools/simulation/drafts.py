"""Speculation without a model: how many drafts are right is drawn, how long drafting takes is computed, all else is the engine's.

    draft length ─ how many ─▶ SimulatedSpeculator: waits as long as drafting takes ─▶ one pass ─▶ executor: those that are right stand

Whether a draft is right depends on its request and its place in the answer, and not on earlier drafts or on the policy. So policies are
compared on the same text, and two draft lengths differ only in how many drafts they ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt
from attrs.validators import and_, deep_iterable, ge, le

from trencadis.api import Config, NounConfig
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, ConfigValueError
from trencadis.files import is_file, read_toml
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Int64Array, StepShape
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times.buckets import BucketStepTimes
from trencadis_tools.workloads.draws import Stream, uniforms

__all__ = [
    "DraftFacts",
    "Drafter",
    "DrawnDrafter",
    "SimulatedSpeculator",
    "drafter_of",
    "facts_of",
    "load_drafts",
    "one_seed",
    "simulated_speculation",
    "speculates",
]

ANY = ""
"""Name for facts that hold for every speculator."""

_SPECULATOR = f"{__name__}:SimulatedSpeculator"
_NOTHING = ("", "none")
_SHARE = and_(ge(0.0), le(1.0))


@attrs.frozen(kw_only=True)
class DraftFacts:
    """How often the drafts of one speculator are right, and how long it takes to make them.

    Attributes:
        acceptance: Chance that a draft stands if those before it do, 0 .. 1; None: as ``acceptance_by_position`` says.
        acceptance_by_position: Share of the steps in which the draft at each position stood, from the first one on, as ``trencadis bench
            speculation`` prints it; falls or stays. After the last one the ratio of the last two goes on.
        spread: Requests differ: the chances of each are larger or smaller by the same number, drawn evenly from minus to plus this one, and cut
            at 0 and 1.
        found: Share of the steps of a sequence in which there are drafts at all, 0 .. 1: an n-gram may have no match.
        step_s: Time that drafting takes in each step with drafts asked for, seconds.
        token_s: The same of each draft.
        step_ratio: The same of each draft one after another, as a share of the model's own step with one token of each sequence that is
            drafted for: 0.05 of a draft model a twentieth as large. It reads a prompt in no time.

    Raises:
        ValueError: Both or none of the first two are given, or a share rises.
    """

    acceptance: float | None = attrs.field(default=None, validator=attrs.validators.optional(_SHARE))
    acceptance_by_position: tuple[float, ...] = attrs.field(
        default=(), converter=tuple, validator=deep_iterable(_SHARE)
    )
    spread: float = attrs.field(default=0.0, validator=_SHARE)
    found: float = attrs.field(default=1.0, validator=_SHARE)
    step_s: float = attrs.field(default=0.0, validator=ge(0.0))
    token_s: float = attrs.field(default=0.0, validator=ge(0.0))
    step_ratio: float = attrs.field(default=0.0, validator=ge(0.0))

    def __attrs_post_init__(self) -> None:
        """Check that shares are given once, and that they are shares of each other."""
        if (self.acceptance is None) == (not self.acceptance_by_position):
            raise ValueError("one of acceptance and acceptance_by_position must be given")
        if any(after > before for before, after in itertools.pairwise(self.acceptance_by_position)):
            raise ValueError("acceptance_by_position must not rise: a draft stands only if those before it do")

    def chances(self, number: int) -> npt.NDArray[np.float64]:
        """Return the chance of each of some drafts to stand if those before it do, ``[number]``. Pure."""
        if self.acceptance is not None:
            return np.full(number, self.acceptance)
        shares = (1.0, *self.acceptance_by_position)
        found = [after / before if before else 0.0 for before, after in itertools.pairwise(shares)]
        return np.array((found + found[-1:] * number)[:number])


def one_seed(drawn_from: str, *, requests: bool, drafts: bool, more: str) -> str:
    """Return in words that numbers come from one seed, and how to get more; empty if nothing is drawn. Pure.

    Args:
        drawn_from: The seed in words, such as ``seed 0``.
        requests: Whether it draws requests.
        drafts: Whether it draws which drafts are right.
        more: A sentence that says how to run others.
    """
    drawn = " and ".join(
        word for word, is_drawn in (("requests", requests), ("which drafts are right", drafts)) if is_drawn
    )
    return f"One seed: {drawn} were drawn from {drawn_from} alone; others give other numbers. {more}" if drawn else ""


def load_drafts(text: str) -> dict[str, DraftFacts]:
    """Return facts by name of the speculator, :data:`ANY` for all of them; none of an empty text.

    Args:
        text: A number, which is the acceptance of every speculator, whose drafts then cost nothing; or a TOML file with a table for each.

    Raises:
        ConfigError: It is neither, or says what no drafts are.
    """
    if not text:
        return {}
    try:
        return {ANY: DraftFacts(acceptance=float(text))}
    except ValueError as error:
        if not is_file(text):
            raise ConfigError(
                f'flag --drafts: "{text}" is neither a share from 0 to 1 nor a file.',
                hint="Write how often a draft is right, such as 0.7, or name a TOML file.",
            ) from error
    try:
        tables = read_toml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{text}: cannot be read: {error}.", hint="Write TOML.") from error
    if not tables:
        raise ConfigError(f"{text}: names no speculator.", hint="Write a table for each, such as [ngram].")
    return {name: _facts(table, f"[{name}] (from {text})") for name, table in tables.items()}


def _facts(table: Any, where: str) -> DraftFacts:
    try:
        return DraftFacts(**table)
    except (TypeError, ValueError) as error:
        known = ", ".join(field.name for field in attrs.fields(DraftFacts))
        raise ConfigValueError(
            f"{where}: {error.args[0] if error.args else error}.",
            hint=f"A table is named as the speculator, and has {known}.",
        ) from error


class Drafter(Protocol):
    """What becomes of drafts. Arrays are parallel; requests go by their index in the workload, positions count tokens of the answer."""

    def num_proposed(self, indices: Int64Array, positions: Int64Array, most: Int32Array) -> Int32Array:
        """Return how many drafts there are for each position and those after it, at most ``most``."""
        ...

    def num_right(self, indices: Int64Array, positions: Int64Array, counts: Int32Array) -> Int32Array:
        """Return how many of the ``counts`` drafts from each position on stand, those up to the first wrong one."""
        ...

    def time_s(self, asked: Int32Array, num_tokens: Int64Array) -> float:
        """Return how long it takes to make as many drafts as were asked for, after so many tokens each, seconds."""
        ...


class DrawnDrafter:
    """Draws by seed, request and position.

    Args:
        facts: How often drafts are right.
        seed: Seed of the workload.
        step_times: Step times of the model.

    Raises:
        ConfigValueError: Drafting takes a share of a step whose time depends on its bucket.
    """

    def __init__(self, facts: DraftFacts, *, seed: int, step_times: StepTimes) -> None:
        if facts.step_ratio and isinstance(step_times, BucketStepTimes):
            raise ConfigValueError(
                f"step_ratio = {facts.step_ratio:g}: steps of buckets have no time for the sequences drafted for alone.",
                hint="Say step_s and token_s instead.",
            )
        self._facts, self._seed, self._times = facts, seed, step_times
        self._chances = facts.chances(0)

    def num_proposed(self, indices: Int64Array, positions: Int64Array, most: Int32Array) -> Int32Array:
        """Return all that may be, or none."""
        if self._facts.found == 1:
            return most
        found = uniforms(self._seed, Stream.FOUND_DRAFTS, indices, positions) < self._facts.found
        return np.where(found, most, 0).astype(np.int32)

    def num_right(self, indices: Int64Array, positions: Int64Array, counts: Int32Array) -> Int32Array:
        """Return the number before the first draft whose draw is not below its chance."""
        longest = int(counts.max())
        if longest > len(self._chances):
            self._chances = self._facts.chances(longest)
        places = np.arange(longest)
        draws = uniforms(self._seed, Stream.DRAFTS, indices[:, None], positions[:, None] + places)
        chances = self._chances[:longest]
        if self._facts.spread:
            ease = uniforms(self._seed, Stream.EASE, indices)
            chances = chances + self._facts.spread * (2 * ease - 1)[:, None]  # cut by what draws can be
        right = (draws < chances) & (places < counts[:, None])
        number: Int32Array = np.logical_and.accumulate(right, axis=1).sum(1).astype(np.int32)
        return number

    def time_s(self, asked: Int32Array, num_tokens: Int64Array) -> float:
        """Return the sum of what a step, each draft and each place of drafts take."""
        facts = self._facts
        time_s = facts.step_s + facts.token_s * int(asked.sum())
        if not facts.step_ratio:
            return time_s
        for place in range(int(asked.max())):
            drafted = asked > place
            number = int(drafted.sum())
            context = int(num_tokens[drafted].sum()) + number * place
            shape = StepShape(num_decodes=number, num_decode_tokens=number, num_decode_context=context)
            time_s += facts.step_ratio * self._times.device_s(shape)
        return time_s


class SimulatedSpeculator(Speculator):
    """Proposes as many drafts as the drafter has; their tokens say nothing.

    Args:
        max_draft_tokens: Limit of the speculator that it stands for.
        drafter: Draws which drafts are accepted.
        context: Has the engine's clock, which stands still until drafting has taken its time.
    """

    def __init__(self, max_draft_tokens: int, drafter: Drafter, context: ComponentContext) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._drafter = drafter
        assert isinstance(context.clock, SimulatedClock), "drafting takes simulated time"
        self._clock = context.clock

    def propose(self, view: DraftView) -> Drafts:
        """Return drafts for each sequence: all that were asked for, or none."""
        num_tokens: Int64Array = np.array([len(tokens) for tokens in view.token_ids], np.int64)
        num_prompt_tokens = np.array([len(request.prompt_token_ids) for request in view.requests], np.int64)
        indices: Int64Array = np.array([request.params.seed for request in view.requests], np.int64)
        counts = self._drafter.num_proposed(indices, num_tokens - num_prompt_tokens, view.max_draft_tokens)
        self._clock.advance(self._drafter.time_s(view.max_draft_tokens, num_tokens))
        return Drafts(num_drafts=counts, token_ids=np.zeros(int(counts.sum()), np.int32))


def speculates(config: Config) -> bool:
    """Return whether a configuration has a speculator. Pure."""
    return config.speculation.name not in _NOTHING


def facts_of(config: Config, facts: Mapping[str, DraftFacts]) -> DraftFacts | None:
    """Return the facts that hold for a configuration; None if it has no speculator. Pure.

    Args:
        config: Any.
        facts: By name of the speculator.

    Raises:
        ConfigError: Nothing says how often its drafts are right.
    """
    name = config.speculation.name
    if not speculates(config):
        return None
    found = facts.get(name) or facts.get(ANY)
    if found is None:
        others = f"; what is known is for {', '.join(facts)}" if facts else ""
        raise ConfigError(
            f'[speculation] name = "{name}": without a model nothing says how often its drafts are right{others}.',
            hint="Give --drafts 0.7, --drafts FILE with a table of that name, or --speculation.name none.",
        )
    return found


def drafter_of(
    config: Config, facts: Mapping[str, DraftFacts], *, seed: int, step_times: StepTimes
) -> DrawnDrafter | None:
    """Return what becomes of the drafts of a configuration; None if it has no speculator. Pure.

    Args:
        config: Any.
        facts: By name of the speculator.
        seed: Seed of the workload.
        step_times: Step times of the model.

    Raises:
        ConfigError: See :func:`facts_of` and :class:`DrawnDrafter`.
    """
    found = facts_of(config, facts)
    return None if found is None else DrawnDrafter(found, seed=seed, step_times=step_times)


def simulated_speculation(config: Config, drafter: Drafter | None) -> NounConfig:
    """Return the table ``[speculation]`` of a simulated engine. Pure.

    Args:
        config: Configuration of the engine.
        drafter: Draws which drafts are accepted; None: there are none.

    Raises:
        ConfigError: Drafts branch, or nothing says how many there may be.
    """
    if drafter is None:
        return attrs.evolve(config.speculation, name="none")
    options = {"max_draft_tokens": _most_drafts(config, config.speculation.name), "drafter": drafter}
    return attrs.evolve(config.speculation, name=_SPECULATOR, fallback="", components={_SPECULATOR: options})


def _most_drafts(config: Config, name: str) -> int:
    """Return the most drafts of a sequence in a step, as the options of a speculator say."""
    options: Any = config.speculation.components.get(name)
    members = getattr(options, "members", ())
    if members:
        return max(_most_drafts(config, member) for member in members)
    if getattr(options, "tree", None) not in (None, False, "none"):
        raise ConfigError(
            f"[speculation.{name}] tree = {options.tree!r}: drafts are simulated one after another, without branches.",
            hint=f"Set speculation.{name}.tree to false or none, or leave speculation out.",
        )
    most = (
        options.get("max_draft_tokens") if isinstance(options, Mapping) else getattr(options, "max_draft_tokens", None)
    )
    if not isinstance(most, int):
        raise ConfigError(
            f'[speculation] name = "{name}": its options do not say how many drafts of a sequence there may be.',
            hint="Give it an option max_draft_tokens, or leave speculation out.",
        )
    return most
