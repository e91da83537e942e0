"""A request of a client, checked, and the reason for which a sequence ended."""

from __future__ import annotations

import copy
import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import attrs

from trencadis.errors import InvalidRequestError
from trencadis.faults import shown
from trencadis.keywords import suggesting
from trencadis.records.plain import check_plain, is_text
from trencadis.records.sampling import SamplingParams

__all__ = [
    "DEFAULT_TERMS",
    "MAX_TRANSFER_BYTES",
    "FinishReason",
    "ListedTerms",
    "Request",
    "RequestTerms",
    "TermKeywords",
    "evolve_unchecked",
    "transfer_table",
]

MAX_TRANSFER_BYTES = 65536
"""The longest transfer parameters, as JSON."""


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are OpenAI's where OpenAI has one.

    ``MOVED``: the client has taken it from this engine, and another one goes on with it; to users it has not ended.
    ``ERROR``: the engine failed on it. ``INVALID``: while it ran it turned out to ask for what cannot be done, such as parameters that
    leave no token to choose; what it has until then stands. ``IGNORED``: one prompt of a list was refused, such as one that is too long, and never ran; the others did.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    MOVED = "moved"
    ERROR = "error"
    INVALID = "invalid"
    IGNORED = "ignored"


_TEXT = "text, without half a surrogate pair"
_T = TypeVar("_T")


def _token_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(f"{name} = {shown(value)} is impossible: it must be {allowed}.", field=name)


def _whole(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    # 53 bits: a priority must be the same number in a float64 column, in msgpack and in JSON.
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**53:
        _refuse(attribute.name, value, "a whole number between -2**53 and 2**53")


def _text(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != "" and not is_text(value):
        _refuse(attribute.name, value, _TEXT)


_optional_text: Any = attrs.validators.optional(_text)


def _weight(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not (_is_number(value) and 0 < value < math.inf):
        _refuse(attribute.name, value, "a finite number above 0, or None for the tenant's")


def _target(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not (_is_number(value) and value > 0):
        _refuse(attribute.name, value, "a number of seconds above 0; infinity is no target")


def transfer_table(given: Any) -> dict[str, Any] | None:
    """Return a copy of transfer parameters, as JSON has them. Pure.

    Raises:
        InvalidRequestError: They are no table, hold what JSON has not, or are too long.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        _refuse("transfer_params", given, "a table of JSON values, or None")
    table = dict(given)
    check_plain(table, "transfer_params")
    try:
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"transfer_params cannot be written as JSON: {error}.", field="transfer_params"
        ) from None
    if len(text) >= MAX_TRANSFER_BYTES:
        raise InvalidRequestError(
            f"transfer_params are {len(text)} bytes of JSON; they must be shorter than {MAX_TRANSFER_BYTES}.",
            field="transfer_params",
        )
    copy: dict[str, Any] = json.loads(text)
    return copy


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(name: str) -> dict[str, str]:
    """Return the metadata of a field: its name in :class:`ListedTerms`. Pure."""
    return {"listed": name}


@suggesting
@attrs.frozen(kw_only=True)
class RequestTerms:
    """Under which terms a request runs: who asks, how soon, and with what; checked when it is made.

    Attributes:
        priority: Smaller is served first by policies that look at it; the tenant's priority is added.
        tenant: Who asks; ``key/user`` counts for the tenant ``key`` in its weight and caps.
        cache_salt: Prefix-cache blocks are shared only between requests of equal salt; None: the tenant.
        weight: Share against other tenants, above 0, finite; None: the tenant's, as ``[scheduling.tenants]`` says.
        ttft_target_s: Seconds within which the first token is wanted, above 0; infinity for no target.
        tpot_target_s: Seconds from token to token that are wanted at most, above 0; infinity for no target.
        transfer_params: Facts about this request for the KV connector, such as where another engine has its prefix: a table of
            JSON values, shorter than 64 KiB; None for nothing. Without a connector that reads them they have no effect.

    Raises:
        InvalidRequestError: A value of another type, or out of range.
    """

    priority: int = attrs.field(default=0, validator=_whole, metadata=_listed("priorities"))
    tenant: str = attrs.field(default="", validator=_text, metadata=_listed("tenants"))
    cache_salt: str | None = attrs.field(default=None, validator=_optional_text, metadata=_listed("cache_salts"))
    weight: float | None = attrs.field(default=None, validator=_weight, metadata=_listed("weights"))
    ttft_target_s: float = attrs.field(default=math.inf, validator=_target, metadata=_listed("ttft_targets_s"))
    tpot_target_s: float = attrs.field(default=math.inf, validator=_target, metadata=_listed("tpot_targets_s"))
    transfer_params: Mapping[str, Any] | None = attrs.field(
        default=None,
        converter=transfer_table,
        hash=False,
        repr=False,
        kw_only=True,
        metadata=_listed("transfer_params"),
    )


class TermKeywords(TypedDict, total=False):
    """Fields of :class:`RequestTerms` as keyword arguments."""

    priority: int
    tenant: str
    cache_salt: str | None
    weight: float | None
    ttft_target_s: float
    tpot_target_s: float
    transfer_params: Mapping[str, Any] | None


class ListedTerms(TypedDict, total=False):
    """The same for several prompts: one value for all, or one for each; None is the default."""

    priorities: int | Sequence[int] | None
    tenants: str | Sequence[str] | None
    cache_salts: str | Sequence[str] | None
    weights: float | Sequence[float] | None
    ttft_targets_s: float | Sequence[float] | None
    tpot_targets_s: float | Sequence[float] | None
    transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


DEFAULT_TERMS = RequestTerms()
"""What holds for a request whose client says nothing about it."""


@attrs.frozen(kw_only=True)
class Request(RequestTerms):
    """One prompt and how to continue it, under terms. Frozen; the engine makes one sequence of it.

    A request with ``params.n > 1`` is expanded into n requests before it reaches the engine. Where ``weight`` is None the
    engine fills in the tenant's, so policies never see None.

    Attributes:
        request_id: Unique among live requests.
        prompt_token_ids: At least one token id.
        params: How tokens are chosen and when the sequence ends.
        cache_salt: See :class:`RequestTerms`; the tenant if none is given.
        output_token_ids: Output so far of a request that an engine accepted and did not end, after which the sequence goes on,
            and which counts as output; maybe empty. None: it is new.
        end_token_ids: Tokens that end a text beside the model's own ends, such as the tokenizer's end of sequence.
    """

    request_id: str = attrs.field(validator=_text)
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_token_ids, repr=False)
    params: SamplingParams = attrs.field(factory=SamplingParams)
    cache_salt: str = attrs.field(default=cast("str", None), validator=_optional_text)
    output_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_token_ids), repr=False
    )
    end_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_token_ids)

    def __attrs_post_init__(self) -> None:
        if self.cache_salt is None:
            object.__setattr__(self, "cache_salt", self.tenant)

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return self.prompt_token_ids + self.output_token_ids if self.output_token_ids else self.prompt_token_ids

    @staticmethod
    def on_terms(
        terms: RequestTerms,
        *,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        end_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Return a request for one prompt under the given terms, which were checked when they were made. Pure."""
        if not is_text(request_id):
            _refuse("request_id", request_id, _TEXT)
        given = {name: getattr(terms, name) for name in _TERMS}
        if terms.cache_salt is None:
            given["cache_salt"] = terms.tenant
        token_ids = tuple(prompt_token_ids)
        own = {
            "request_id": request_id,
            "prompt_token_ids": token_ids,
            "params": params,
            "end_token_ids": end_token_ids,
        }
        return evolve_unchecked(_BLANK, **own, **given)


_TERMS = tuple(attrs.fields_dict(RequestTerms))
_BLANK = Request(request_id="", prompt_token_ids=())


def evolve_unchecked(record: _T, **changes: Any) -> _T:
    """Return a copy of a frozen record with other, valid values. Nothing is checked, so long lists are not looked at again."""
    copied = copy.copy(record)
    for name, value in changes.items():
        object.__setattr__(copied, name, value)
    return copied
