"""Contract of the noun ``kv_policy``: which KV blocks are worth moving.

A policy decides and moves nothing: whatever it answers, texts are the same, and a wrong answer costs time. Each method has a
default, so that a policy is what it does otherwise. Seconds and bytes are predictions from what this engine measured.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, law, one_of_words
from trencadis.records import Request

__all__ = [
    "INTERFACE_VERSION",
    "STABILITY",
    "FailureView",
    "KVPolicy",
    "LoadView",
    "PrefillEngineView",
    "PrefillView",
    "SaveView",
    "SourceView",
]

INTERFACE_VERSION = 1
STABILITY = "provisional"


@attrs.frozen(kw_only=True)
class SaveView:
    """Blocks that may be saved. Read-only.

    Attributes:
        num_blocks: Full blocks of committed tokens, in the order of one sequence, that are not known to be stored; at least 1.
        num_bytes: Size of all of them, in bytes.
        staged_fraction: Share of the staging memory that waits to be written, 0 .. 1.
    """

    num_blocks: int
    num_bytes: int
    staged_fraction: float


@attrs.frozen(kw_only=True)
class LoadView:
    """A prefix that a store has. Read-only.

    Attributes:
        request: Whose prompt.
        num_tokens: That can be loaded beyond the local prefix hit; at least 1.
        num_local_tokens: Number of tokens of the local prefix hit.
        num_bytes: To be loaded.
        load_s: Predicted time of the load, seconds; nan: nothing was measured yet.
        compute_s: Predicted time of computing the same tokens here, seconds; nan: nothing was measured yet.
        timeout_s: The longest that a load may take, seconds; what the config says.
    """

    request: Request
    num_tokens: int
    num_local_tokens: int
    num_bytes: int
    load_s: float
    compute_s: float
    timeout_s: float


@attrs.frozen(kw_only=True)
class SourceView:
    """A place that has a prefix. Read-only.

    Attributes:
        name: Name of the store, the connector or the engine.
        num_tokens: That can be loaded from there beyond the local prefix hit; at least 1.
        load_s: Predicted time of that load, seconds; nan: nothing was measured yet.
        compute_s: Predicted time of computing the same tokens here, seconds; nan: nothing was measured yet.
    """

    name: str
    num_tokens: int
    load_s: float = math.nan
    compute_s: float = math.nan


@attrs.frozen(kw_only=True)
class FailureView:
    """A load that failed. Read-only.

    Attributes:
        cause: A word of ``TransferCause``.
        num_valid_tokens: Leading tokens that arrived all the same.
        num_lost_tokens: That did not.
        num_attempts: Loads of this prefix so far, for this request; at least 1.
    """

    cause: str
    num_valid_tokens: int
    num_lost_tokens: int
    num_attempts: int


@attrs.frozen(kw_only=True)
class PrefillEngineView:
    """Another engine that would compute a prompt for this one. Read-only.

    Attributes:
        name: Host and port.
        num_waiting_tokens: Number of tokens of prompts that it has taken for others and has not computed yet.
        remote_s: Predicted time until the KV of the prompt is here, seconds; nan: too little is known yet.
        affinity: 0 .. 1; the larger, the likelier it has computed a prompt that begins like this one.
    """

    name: str
    num_waiting_tokens: int
    remote_s: float = math.nan
    affinity: float = 0.0


@attrs.frozen(kw_only=True)
class PrefillView:
    """A prompt that this engine or another may compute. Read-only.

    Attributes:
        request: Whose prompt.
        num_tokens: Beyond the local prefix hit; at least 1.
        min_tokens: With fewer it is not worth the way, the config says.
        max_slowdown: The config's limit of the remote time by the local one: a remote prefill may take longer, for running sequences need not wait.
        compute_s: Predicted time of computing the tokens here, seconds; nan: nothing was measured yet.
        engines: Those that answer and take prompts; maybe none.
    """

    request: Request
    num_tokens: int
    min_tokens: int
    max_slowdown: float
    compute_s: float
    engines: Sequence[PrefillEngineView]


def _whole(method: str, answer: Any, most: int) -> int:
    if type(answer) is int and 0 <= answer <= most:
        return answer
    raise ContractError(f"{method}() returned {shown(answer)}, allowed are 0 to {most}")


def _wait(method: str, answer: Any, most_s: float) -> float:
    if 0.0 <= answer <= most_s:
        return float(answer)
    raise ContractError(f"{method}() returned {shown(answer)}, allowed are 0 to {most_s} s")


def _index(method: str, answer: Any, items: Sequence[Any]) -> int:
    return _whole(method, answer, len(items) - 1)


def _index_or_none(method: str, answer: Any, items: Sequence[Any]) -> int | None:
    return None if answer is None else _index(method, answer, items)


class KVPolicy(ABC):  # noqa: B024 - every method has a default
    """Decides about loads and saves. Pure: an answer follows from the view alone. Engine thread, at most 20 µs a call.

    One that takes longer than ``[budget] kv_policy_ms`` three times within a minute, or once ten times as long, is asked no more: the
    defaults of this class stand in.
    """

    @law(Law("from 0 to ``view.num_blocks``", _whole, ("view.num_blocks",)))
    def admits_save(self, view: SaveView) -> int:
        """Return how many leading blocks are saved, 0 .. ``num_blocks``; by default all. Once per sequence and step."""
        return view.num_blocks

    @law(Law("from 0 to ``view.timeout_s``", _wait, ("view.timeout_s",)))
    def admits_load(self, view: LoadView) -> float:
        """Return how long the load may take, seconds, at most ``timeout_s``; 0 declines it, and the tokens are computed.

        By default ``timeout_s``. Once per look-up that found something.
        """
        return view.timeout_s

    @law(Law("an index of ``sources``", _index, ("sources",)))
    def choose_source(self, sources: Sequence[SourceView]) -> int:
        """Return the index of the source to load from; by default that with the most tokens, the first of equals.

        Args:
            sources: At least one, the preferred first.
        """
        return max(range(len(sources)), key=lambda i: (sources[i].num_tokens, -i))

    @law(Law("an index of ``view.engines``, or None", _index_or_none, ("view.engines",)))
    def prefill_at(self, view: PrefillView) -> int | None:
        """Return the index of the engine that is to compute a prompt, or None: this one does.

        By default the least loaded one, a prompt's length more or less being the same, and of these the most affine; none if the
        prompt is shorter than ``min_tokens``, or if that engine would take over ``max_slowdown`` times as long as this one.
        """
        engines = view.engines
        if view.num_tokens < view.min_tokens or not engines:
            return None
        best = min(
            range(len(engines)), key=lambda i: (engines[i].num_waiting_tokens // view.num_tokens, -engines[i].affinity)
        )
        # A comparison with nan is false: what was not measured is tried.
        return None if engines[best].remote_s > view.max_slowdown * view.compute_s else best

    @law(one_of_words("compute", "retry"))
    def on_failure(self, view: FailureView) -> Literal["compute", "retry"]:
        """Return what becomes of the lost tokens: computed here, or looked up once more; by default computed."""
        return "compute"
