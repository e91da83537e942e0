"""The guarded eviction policy: its victims are candidates, and it knows a content by one id, wherever that lies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType, ModuleType
from typing import Any

from trencadis.engine.guard import Guarded
from trencadis.errors import ContractError
from trencadis.faults import Fallback, as_words, shown
from trencadis.interfaces import EvictionPolicy
from trencadis.interfaces.laws import Rule

__all__ = ["GuardedEviction"]


class GuardedEviction(Guarded[EvictionPolicy]):
    """An eviction policy whose victims are candidates. A policy that takes over is shown the candidates before it is asked.

    A policy knows a content by one id, wherever it lies: contents that moved are translated on the way in and out.

    Args:
        label: See :class:`~trencadis.engine.guard.Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`~trencadis.engine.guard.Guarded`.
        options: See :class:`~trencadis.engine.guard.Guarded`.

    Attributes:
        wants_uses: The policy defines ``on_use``, which is called for every block that fills up; without, it need not be called.
    """

    _is_uninformed = False
    _candidates: AbstractSet[int] = frozenset()
    _id_of: Mapping[int, int] = MappingProxyType({})  # of blocks whose content moved
    _block_of: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self,
        label: str,
        strategy: EvictionPolicy,
        make_fallback: Callable[[], EvictionPolicy] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(EvictionPolicy, label, strategy, make_fallback, **options)

    def _note_strategy(self) -> None:
        self.wants_uses = type(self.strategy).on_use is not EvictionPolicy.on_use

    def inform_again(self) -> None:
        """Show the policy all candidates when it is next asked: it has been told of none."""
        self._is_uninformed = True

    @property
    def known_ids(self) -> dict[int, int]:
        """The id by which the policy knows the content of a block, of those that moved."""
        return dict(self._id_of)

    def restore_ids(self, ids: Mapping[int, int]) -> None:
        """Take the ids that another engine's policy knew."""
        self._id_of = dict(ids)
        self._block_of = {known: block for block, known in ids.items()}

    def twin(self) -> GuardedEviction:
        """Return one that knows the same and learns on its own, without a fallback.

        Raises:
            ContractError: The policy cannot be copied.
        """
        known = vars(self.strategy) if hasattr(self.strategy, "__dict__") else {}
        shared = {id(value): value for value in known.values() if isinstance(value, ModuleType)}
        try:
            made = GuardedEviction(self.label, copy.deepcopy(self.strategy, shared))
        except Exception as error:
            raise ContractError(f"{type(self.strategy).__name__} cannot be copied: {as_words(error)}") from error
        made.restore_ids(self.known_ids)
        made._is_uninformed = self._is_uninformed
        return made

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchange the contents of two blocks in each pair, without the policy's knowledge."""
        ids = dict(self._id_of)
        for one, other in pairs:
            ids[one], ids[other] = ids.get(other, other), ids.get(one, one)
        self.restore_ids({block: known for block, known in ids.items() if block != known})

    def on_use(
        self, blocks: Sequence[int], *, keys: Sequence[bytes], depths: Sequence[int], salt: str, now_s: float
    ) -> None:
        """Tell what blocks in use hold."""
        if not self._is_uninformed:
            self.ask.on_use(self._ids(blocks), keys=keys, depths=depths, salt=salt, now_s=now_s)

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Tell of new candidates."""
        if not self._is_uninformed:
            self.ask.on_free(self._ids(blocks), depths=depths, now_s=now_s)

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Tell of candidates that are referenced again."""
        if not self._is_uninformed:
            self.ask.on_hit(self._ids(blocks), now_s=now_s)

    def forget(self, blocks: Sequence[int]) -> None:
        """Tell of candidates that were taken away."""
        if not self._is_uninformed:
            self.ask.forget(self._ids(blocks))

    def victims(self, num_blocks: int, *, candidates: set[int]) -> list[int]:
        """Return ``num_blocks`` different candidates."""
        self._candidates = candidates
        return self._blocks(self.ask.victims(num_blocks))

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place; it is told of the candidates when it is next asked."""
        super().quarantine(cause)
        self._is_uninformed = True

    def _put_back(self, label: str, strategy: EvictionPolicy, fallback: Fallback[EvictionPolicy]) -> None:
        super()._put_back(label, strategy, fallback)
        self._is_uninformed = True

    def _made(self, rule: Rule, call: Callable[..., Any]) -> Callable[..., Any]:
        if rule.method != "victims":
            return super()._made(rule, call)

        def informed(num_blocks: int) -> Any:
            if self._is_uninformed:
                blocks = sorted(self._ids(self._candidates))
                self.strategy.on_free(blocks, depths=[0] * len(blocks), now_s=0.0)
                self._is_uninformed = False
            return call(num_blocks)

        return super()._made(rule, informed)

    def _check_victims(self, answer: list[int], args: tuple[int], _: Mapping[str, Any]) -> list[int]:
        if set(self._blocks(answer)) <= self._candidates:
            return answer
        raise ContractError(f"victims({args[0]}) returned {shown(answer)}; they must be {args[0]} different candidates")

    def _ids(self, blocks: Collection[int]) -> list[int]:
        ids = self._id_of
        return [ids.get(block, block) for block in blocks] if ids else list(blocks)

    def _blocks(self, ids: Sequence[int]) -> list[int]:
        blocks = self._block_of
        return [blocks.get(known, known) for known in ids] if blocks else list(ids)
