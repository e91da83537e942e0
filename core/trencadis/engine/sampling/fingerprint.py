"""Sampling fingerprint of an engine: lets another engine choose a first token as this one would.

Draws follow from the request's seed and the position of the token, so that a seeded request has the same token wherever it is drawn; of one
without a seed the distribution is the same. Samplers are compared by a digest: two engines whose chains differ compute prompts
for each other, and each chooses its own first tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec

from trencadis.errors import TrencadisError
from trencadis.interfaces import SamplingFingerprint
from trencadis.records import Request, SamplingParams

__all__ = ["EngineFingerprint"]

logger = logging.getLogger("trencadis.engine")

_MAX_BYTES: Final = 1 << 20
_HERE: Final = frozenset(
    {
        "n",
        "best_of",
        "max_tokens",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "prompt_logprobs",
        "max_draft_tokens",
    }
)
"""Fields that say what becomes of the text: they do not change which token is first."""


class _Packed(msgspec.Struct, array_like=True):
    sampling: bytes
    params: dict[str, Any]


class EngineFingerprint(SamplingFingerprint):
    """Fingerprint of one engine: a digest of its sampler and the parameters of a request.

    Args:
        sampling: Digest of everything in this engine that affects which token is chosen, except the model.
        is_portable: Whether a sequence with these parameters may continue here after a first token that another engine chose.
    """

    def __init__(self, sampling: bytes, is_portable: Callable[[SamplingParams], bool]) -> None:
        self._sampling = sampling
        self._is_portable = is_portable

    def pack(self, request: Request) -> bytes:
        """Return the digest and those parameters that are not the defaults; empty if they cannot be serialised."""
        params = request.params
        if params.prompt_logprobs is not None or not self._is_portable(params):
            return b""
        told = {
            field.name: _plain(getattr(params, field.name))
            for field in attrs.fields(SamplingParams)
            if field.name not in _HERE and getattr(params, field.name) != getattr(_DEFAULTS, field.name)
        }
        try:
            packed = msgspec.msgpack.encode(_Packed(self._sampling, told))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            logger.debug("The parameters of request %r stay here: %s", request.request_id, error)
            return b""
        return packed if len(packed) <= _MAX_BYTES else b""

    def unpack(self, packed: bytes) -> SamplingParams | None:
        """Return parameters for one token, if they were packed by an engine that chooses as this one does."""
        try:
            found = msgspec.msgpack.decode(packed, type=_Packed)
            if found.sampling != self._sampling or _HERE & found.params.keys():
                return None
            # One token is all there is: with more wanted at least, it is masked as the first of them would be.
            least = min(1, found.params.pop("min_tokens", 0))
            return SamplingParams(**found.params, min_tokens=least, max_tokens=1)
        except (msgspec.DecodeError, TrencadisError, TypeError, ValueError, AttributeError) as error:
            logger.debug("This is no sampling fingerprint: %s", error)
            return None


_DEFAULTS: Final = SamplingParams()


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else value
