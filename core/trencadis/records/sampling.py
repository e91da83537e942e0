"""What a client may ask of sampling; validated when it is made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from trencadis.errors import InvalidRequestError
from trencadis.faults import shown
from trencadis.keywords import suggesting
from trencadis.records.plain import check_plain, is_text
from trencadis.records.structured import StructuredOutput

__all__ = [
    "LEAST_FLOAT",
    "MAX_INT",
    "MAX_LISTED_IDS",
    "MAX_LOGPROBS",
    "PARAMETER_GROUPS",
    "Limits",
    "OneOf",
    "SamplingParams",
    "parameter_help",
    "parameters_in",
]

MAX_LOGPROBS = 50
"""The most alternatives a request may ask for at one position."""

MAX_LISTED_IDS = 2**18
"""The most token ids that a request lists in its parameters, each choice counted: as many as the largest vocabularies have."""

MAX_INT = 2**31 - 1
"""The largest count: engines keep them in 32 bits."""
LEAST_FLOAT, _MAX_FLOAT = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Engines compute in float32: a smaller number would be 0 there, a larger one infinite."""


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(
        f"sampling parameter {name} = {shown(value)} is impossible: it must be {allowed}.", field=name
    )


@attrs.frozen
class Limits:
    """The validator of a number: finite, and in a range.

    Attributes:
        low: The least value.
        high: The largest value.
        excludes_low: 0, which is ``low``, is not allowed, nor what is 0 in float32: the least value is ``LEAST_FLOAT``.
        excludes_high: ``high`` itself is not allowed.
        is_whole: Whole numbers only.
        is_optional: None is allowed.
    """

    low: float
    high: float
    excludes_low: bool = attrs.field(default=False, kw_only=True)
    excludes_high: bool = attrs.field(default=False, kw_only=True)
    is_whole: bool = attrs.field(default=False, kw_only=True)
    is_optional: bool = attrs.field(default=False, kw_only=True)

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Refuse a value that is outside.

        Raises:
            InvalidRequestError: It is; the message names the attribute.
        """
        if value is None and self.is_optional:
            return
        is_number = isinstance(value, int if self.is_whole else int | float) and not isinstance(value, bool)
        low = LEAST_FLOAT if self.excludes_low else self.low
        if not is_number or not low <= value <= self.high or (self.excludes_high and value == self.high):
            _refuse(attribute.name, value, self._described(value))

    def _described(self, value: Any) -> str:
        if self.is_whole:
            return f"a whole number from {self.low} to {self.high}"
        text = f"a number {'above' if self.excludes_low else 'from'} {self.low:g}"
        if self.excludes_low and isinstance(value, float) and value > self.low:
            text += f" (at least {LEAST_FLOAT:.4g})"
        return f"{text} to {'below ' if self.excludes_high else ''}{self.high:g}"


def _whole(low: int, high: int = MAX_INT, *, optional: bool = False) -> Limits:
    return Limits(low, high, is_whole=True, is_optional=optional)


@attrs.frozen
class OneOf:
    """The validator of a number that is one of a few.

    Attributes:
        allowed: All values there are.
    """

    allowed: tuple[int, ...]

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Refuse any other value.

        Raises:
            InvalidRequestError: It is another; the message names the attribute.
        """
        if type(value) is not int or value not in self.allowed:
            _refuse(attribute.name, value, " or ".join(map(str, self.allowed)))


def _strings(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else _listed(value)


def _ids(value: Any) -> Any:
    return () if value is None else _listed(value)


def _optional_ids(value: Any) -> Any:
    return None if value is None else _listed(value)


def _listed(value: Any) -> Any:
    """Return a tuple of what can be iterated; anything else as it is: the validator refuses it, by its name."""
    return tuple(value) if isinstance(value, Iterable) else value


def _bias(value: Mapping[Any, Any] | None) -> dict[int, float]:
    try:
        biases = {int(token): float(bias) for token, bias in (value or {}).items()}
    except (TypeError, ValueError, AttributeError, OverflowError):
        _refuse("logit_bias", value, "a mapping of token ids to numbers")
        raise
    if not all(token >= 0 and abs(bias) <= _MAX_FLOAT for token, bias in biases.items()):
        _refuse("logit_bias", value, "a mapping of token ids from 0 to finite numbers")
    return biases


def _words(value: Any) -> Any:
    return () if value is None else tuple(map(_listed, value)) if isinstance(value, Iterable) else value


def _arguments(value: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    try:
        return {name: dict(given or {}) for name, given in (value or {}).items()}
    except (TypeError, ValueError, AttributeError):
        _refuse("logits_processors", value, "a mapping of names to mappings of arguments")
        raise


def _structured(value: Any) -> Any:
    return StructuredOutput(**value) if isinstance(value, Mapping) else value


def _check_structured(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, StructuredOutput):
        _refuse(attribute.name, value, "a StructuredOutput")


def _check_words(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    for word in value if isinstance(value, tuple) else (value,):
        if (
            not isinstance(word, tuple)
            or not word
            or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in word)
        ):
            _refuse(attribute.name, word, "a list of lists of token ids from 0, none of them empty")


def _check_names(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not all(isinstance(name, str) and name for name in value):
        _refuse(attribute.name, value, "a mapping of names to mappings of arguments")
    if value:
        check_plain(value, attribute.name)


def _check_ids(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not (
        isinstance(value, tuple) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        _refuse(attribute.name, value, "a list of token ids from 0")


def _check_strings(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(is_text(text) and text for text in value):
        _refuse(attribute.name, value, "a list of strings, none of them empty and none with half a surrogate pair")


def _group(name: str) -> dict[str, str]:
    """Return the metadata of a field that switches something on which a sampler must know of to honour it. Pure."""
    return {"group": name}


def _flag(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(attribute.name, value, "True or False")


@suggesting
@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Frozen; validated at construction.

    Attributes:
        n: Completions for one prompt, 1 to 128.
        best_of: Completions to generate, of which the n with the largest mean log-probability are returned, best first; n to 128;
            None means n. Whatever is dropped is generated to its end first, so nothing is streamed.
        temperature: Divides the logits; below 1e-5 means greedy. 0 to 100.
        top_k: Keep the k most likely tokens (ties are kept); 0 or -1 is off.
        top_p: Keep the smallest set of most likely tokens whose mass reaches this; above 0 to 1 (off).
        min_p: Drop tokens less likely than this share of the most likely one; 0 (off) to 1.
        typical_p: Keep the tokens whose surprise is nearest the mean, up to this mass; above 0 to 1 (off).
        epsilon_cutoff: Drop tokens less likely than this; 0 (off) to below 1.
        eta_cutoff: The same, with a cutoff that falls with the entropy; 0 (off) to below 1.
        top_n_sigma: Drop tokens further below the largest logit than so many standard deviations; 0 (off) to 100.
        xtc_probability: How often all tokens above the threshold but the least likely are dropped; 0 (off) to 1.
        xtc_threshold: From which probability on; above 0 to 1; beyond 0.5 nothing is dropped.
        mirostat_mode: 2 steers the surprise of the text (Mirostat 2.0); 0 is off.
        mirostat_tau: The surprise to steer to, bits; above 0 to 100.
        mirostat_eta: How fast; above 0 to 1.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output;
            0.01 to 10; 1 is off.
        frequency_penalty: Subtracted once per occurrence in the output; -2 to 2.
        presence_penalty: Subtracted once if the token occurs in the output; -2 to 2.
        dry_multiplier: Subtracts this times ``dry_base ** (n - dry_allowed_length)`` from a token that would make a repeated
            run of n tokens longer; 0 (off) to 100.
        dry_base: See there; 1 to 100.
        dry_allowed_length: Shorter runs may be repeated; from 1.
        dry_range: How many of the last tokens are looked at; 0 is all.
        dry_breaker_token_ids: Tokens that end a run, such as line breaks.
        no_repeat_ngram_size: No run of so many tokens occurs twice, the prompt included; 0 is off.
        logit_bias: Added to the logits, by token id.
        allowed_token_ids: Only these tokens may be chosen; None allows all.
        bad_token_ids: These tokens are never chosen.
        bad_words_ids: These runs of tokens are never completed.
        logits_processors: Further processors that the operator enabled, by name, with their arguments: values as JSON has them,
            whole numbers of 64 bits, at most 32 levels.
        structured: Constraint on the text: JSON, a match of a regex, one of some texts, or a text of a grammar; None: anything.
        min_tokens: End-of-sequence and stop tokens are masked until this many tokens were generated.
        max_tokens: The most tokens to generate; None means up to the model's length limit.
        stop: Strings that end the text; the text before them is returned.
        stop_token_ids: Tokens that end the text, besides the model's own end-of-sequence tokens.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        include_stop_str_in_output: Keep the stop string in the returned text.
        skip_special_tokens: Leave special tokens out of the returned text.
        logprobs: Alternatives to report at each output token, 0 to 50; None reports nothing.
        prompt_logprobs: The same for each prompt token.
        max_draft_tokens: The most tokens drafted for it in a step; 0 switches speculation off for it; None leaves it to the engine.
        seed: Makes the request's draws independent of the engine's seed and of its batch; 0 to 2**63 - 1. Completion i draws with
            ``seed + i`` (modulo 2**63), counted before ``best_of`` puts them in order.

    Raises:
        InvalidRequestError: A value is out of range; the message names it.
    """

    n: int = attrs.field(default=1, validator=_whole(1, 128))
    best_of: int | None = attrs.field(default=None, validator=_whole(1, 128, optional=True))
    temperature: float = attrs.field(default=1.0, validator=Limits(0, 100), metadata=_group("temperature"))
    top_k: int = attrs.field(default=0, validator=_whole(-1), metadata=_group("truncation"))
    top_p: float = attrs.field(default=1.0, validator=Limits(0, 1, excludes_low=True), metadata=_group("truncation"))
    min_p: float = attrs.field(default=0.0, validator=Limits(0, 1), metadata=_group("truncation"))
    typical_p: float = attrs.field(default=1.0, validator=Limits(0, 1, excludes_low=True), metadata=_group("cutoffs"))
    epsilon_cutoff: float = attrs.field(
        default=0.0, validator=Limits(0, 1, excludes_high=True), metadata=_group("cutoffs")
    )
    eta_cutoff: float = attrs.field(default=0.0, validator=Limits(0, 1, excludes_high=True), metadata=_group("cutoffs"))
    top_n_sigma: float = attrs.field(default=0.0, validator=Limits(0, 100), metadata=_group("cutoffs"))
    xtc_probability: float = attrs.field(default=0.0, validator=Limits(0, 1), metadata=_group("cutoffs"))
    xtc_threshold: float = attrs.field(default=0.1, validator=Limits(0, 1, excludes_low=True))
    mirostat_mode: int = attrs.field(default=0, validator=OneOf((0, 2)), metadata=_group("mirostat"))
    mirostat_tau: float = attrs.field(default=5.0, validator=Limits(0, 100, excludes_low=True))
    mirostat_eta: float = attrs.field(default=0.1, validator=Limits(0, 1, excludes_low=True))
    repetition_penalty: float = attrs.field(default=1.0, validator=Limits(0.01, 10), metadata=_group("penalties"))
    frequency_penalty: float = attrs.field(default=0.0, validator=Limits(-2, 2), metadata=_group("penalties"))
    presence_penalty: float = attrs.field(default=0.0, validator=Limits(-2, 2), metadata=_group("penalties"))
    dry_multiplier: float = attrs.field(default=0.0, validator=Limits(0, 100), metadata=_group("dry"))
    dry_base: float = attrs.field(default=1.75, validator=Limits(1, 100))
    dry_allowed_length: int = attrs.field(default=2, validator=_whole(1))
    dry_range: int = attrs.field(default=0, validator=_whole(0))
    dry_breaker_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids, validator=_check_ids)
    no_repeat_ngram_size: int = attrs.field(default=0, validator=_whole(0), metadata=_group("runs"))
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_bias, metadata=_group("logit_bias"))
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=_optional_ids, validator=_check_ids, metadata=_group("masks")
    )
    bad_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=_ids, validator=_check_ids, metadata=_group("masks")
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = attrs.field(
        default=(), converter=_words, validator=_check_words, metadata=_group("runs")
    )
    logits_processors: Mapping[str, Mapping[str, Any]] = attrs.field(
        factory=dict, converter=_arguments, validator=_check_names
    )
    structured: StructuredOutput | None = attrs.field(default=None, converter=_structured, validator=_check_structured)
    min_tokens: int = attrs.field(default=0, validator=_whole(0), metadata=_group("min_tokens"))
    max_tokens: int | None = attrs.field(default=16, validator=_whole(1, optional=True))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_check_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids, validator=_check_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    include_stop_str_in_output: bool = attrs.field(default=False, validator=_flag)
    skip_special_tokens: bool = attrs.field(default=True, validator=_flag)
    logprobs: int | None = attrs.field(
        default=None, validator=_whole(0, MAX_LOGPROBS, optional=True), metadata=_group("logprobs")
    )
    prompt_logprobs: int | None = attrs.field(default=None, validator=_whole(0, MAX_LOGPROBS, optional=True))
    max_draft_tokens: int | None = attrs.field(default=None, validator=_whole(0, optional=True))
    seed: int | None = attrs.field(default=None, validator=_whole(0, 2**63 - 1, optional=True))

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            _refuse("best_of", self.best_of, f"at least n = {self.n}")
        num_listed = sum(map(len, self._listed_ids().values()))
        if num_listed * self.num_generated > MAX_LISTED_IDS:
            allowed = f"so few that {num_listed} token ids listed for each are at most {MAX_LISTED_IDS} together"
            _refuse("n" if self.best_of is None else "best_of", self.num_generated, allowed)
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.bad_token_ids):
            _refuse("allowed_token_ids", self.allowed_token_ids, "a list that leaves at least one token to choose")

    @property
    def num_generated(self) -> int:
        """Completions to generate: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_chosen(self) -> bool:
        """True if completions are generated that are not returned."""
        return self.num_generated > self.n

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen (temperature below 1e-5)."""
        return self.temperature < 1e-5

    @property
    def asked(self) -> tuple[str, ...]:
        """Parameters of ``PARAMETER_GROUPS`` that change something, in the order of the groups; () for a request of defaults. O(1).

        A greedy request asks for nothing that changes draws alone.
        """
        is_greedy = self.is_greedy
        found = ["greedy"] if is_greedy else []
        for name, neutral in _NEUTRAL:
            value = getattr(self, name)
            if value == neutral or (name == "top_k" and value == -1):
                continue
            if not is_greedy or (name not in _OF_DRAWS and name != "temperature"):
                found.append(name)
        return tuple(found)

    def token_id_outside(self, vocab_size: int) -> tuple[str, int] | None:
        """Return a field that names a token id of ``vocab_size`` or more, and that id; None: there is none. Pure."""
        for name, ids in self._listed_ids().items():
            largest = max(ids, default=-1)
            if largest >= vocab_size:
                return name, largest
        return None

    def _listed_ids(self) -> dict[str, Collection[int]]:
        """Return the token ids in every field that lists some, by its name. Pure."""
        return {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_token_ids": self.bad_token_ids,
            "bad_words_ids": [token for word in self.bad_words_ids for token in word],
            "stop_token_ids": self.stop_token_ids,
            "dry_breaker_token_ids": self.dry_breaker_token_ids,
        }


def _groups() -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {"temperature": ("greedy",)}
    for field in attrs.fields(SamplingParams):
        if "group" in field.metadata:
            group = field.metadata["group"]
            groups[group] = (*groups.get(group, ()), field.name)
    return groups


PARAMETER_GROUPS: Mapping[str, tuple[str, ...]] = _groups()
"""Parameters that a sampler must know of to honour them, by group.

Each is a field of :class:`SamplingParams` that switches something on; further fields of that thing, such as ``dry_base``, are not
listed. ``greedy`` stands for a temperature below 1e-5. What is not here (``stop``, ``max_tokens``, ``seed`` ...) is the engine's, or part of every sampler's contract;
``structured`` and ``logits_processors`` are for ``Sampler.check``.
"""

_OF_DRAWS = frozenset({*PARAMETER_GROUPS["truncation"], *PARAMETER_GROUPS["cutoffs"], *PARAMETER_GROUPS["mirostat"]})
"""Parameters that change only draws: a greedy request that has them asks for nothing."""

_NEUTRAL = tuple(
    (name, getattr(SamplingParams(), name)) for group in PARAMETER_GROUPS.values() for name in group if name != "greedy"
)


def parameters_in(names: Iterable[str]) -> frozenset[str]:
    """Return the parameters that names of parameters and of groups stand for. Pure.

    Args:
        names: Each a key of ``PARAMETER_GROUPS``, which stands for its whole group, or one parameter in a group.

    Raises:
        ValueError: A name that is neither.
    """
    known = frozenset(name for group in PARAMETER_GROUPS.values() for name in group)
    found: set[str] = set()
    for name in names:
        if name not in PARAMETER_GROUPS and name not in known:
            raise ValueError(f"{name!r} is no parameter that a sampler honours; groups: {', '.join(PARAMETER_GROUPS)}")
        found.update(PARAMETER_GROUPS.get(name, (name,)))
    return frozenset(found)


def parameter_help() -> dict[str, str]:
    """Return the description of each sampling parameter, from the docstring; empty where Python dropped it (``-OO``). Pure."""
    text = inspect.cleandoc(SamplingParams.__doc__ or "")
    section = re.search(r"^Attributes:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}
