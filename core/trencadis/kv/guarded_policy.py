"""A KV policy, guarded: what it raises, or answers beyond its range, is replaced by the contract's default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from trencadis.interfaces import FailureView, KVPolicy, LoadView, PrefillView, SaveView, SourceView

__all__ = ["GuardedPolicy"]

logger = logging.getLogger("trencadis.kv")

T = TypeVar("T")

_DEFAULTS = KVPolicy()


class GuardedPolicy(KVPolicy):
    """Asks a policy, and answers as the contract says.

    Args:
        policy: Who decides.

    Attributes:
        policy: Who decides.
        num_errors: Answers that were replaced.
    """

    def __init__(self, policy: KVPolicy) -> None:
        self.policy = policy
        self.num_errors = 0
        self._warned: set[str] = set()

    def admits_save(self, view: SaveView) -> int:
        """Return how many leading blocks are saved, 0 .. ``num_blocks``."""
        return self._asked(
            "admits_save", lambda policy: policy.admits_save(view), lambda answer: _is_whole(answer, view.num_blocks)
        )

    def admits_load(self, view: LoadView) -> float:
        """Return how long the load may take, 0 .. ``timeout_s``."""
        return self._asked(
            "admits_load", lambda policy: policy.admits_load(view), lambda answer: 0.0 <= answer <= view.timeout_s
        )

    def choose_source(self, sources: Sequence[SourceView]) -> int:
        """Return the index of a source."""
        return self._asked(
            "choose_source",
            lambda policy: policy.choose_source(sources),
            lambda answer: _is_whole(answer, len(sources) - 1),
        )

    def prefill_at(self, view: PrefillView) -> int | None:
        """Return the index of an engine, or None."""
        return self._asked(
            "prefill_at",
            lambda policy: policy.prefill_at(view),
            lambda answer: answer is None or _is_whole(answer, len(view.engines) - 1),
        )

    def on_failure(self, view: FailureView) -> Literal["compute", "retry"]:
        """Return what becomes of lost tokens."""
        return self._asked(
            "on_failure", lambda policy: policy.on_failure(view), lambda answer: answer in ("compute", "retry")
        )

    def _asked(self, name: str, ask: Callable[[KVPolicy], T], is_legal: Callable[[T], bool]) -> T:
        """Return the policy's answer if it is legal, else that of the contract's defaults."""
        try:
            answer = ask(self.policy)
            if is_legal(answer):
                return answer
            error: Exception | None = None
            said = f"answered {answer!r}, which is out of range"
        except Exception as raised:
            error, said = raised, f"raised {type(raised).__name__}"
        self.num_errors += 1
        level = logging.DEBUG if name in self._warned else logging.WARNING
        self._warned.add(name)
        logger.log(
            level,
            "The KV policy %s %s in %s(); the contract's default stands in, here and wherever it happens again.",
            type(self.policy).__name__,
            said,
            name,
            exc_info=error,
        )
        return ask(_DEFAULTS)


def _is_whole(answer: object, most: int) -> bool:
    return type(answer) is int and 0 <= answer <= most
