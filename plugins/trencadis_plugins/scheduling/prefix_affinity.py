"""Requests with the longest cached prefix first."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView
from trencadis.records import BoolArray, FloatArray, Int32Array, Int64Array, Request
from trencadis_plugins.scheduling.columns import SlotColumn
from trencadis_plugins.scheduling.config import PrefixAffinityConfig
from trencadis_plugins.scheduling.fcfs import Fcfs

__all__ = ["Families", "PrefixAffinity"]


_Key = tuple[str, tuple[int, ...]]


class Families:
    """Gives live requests with the same first tokens and cache salt one number.

    Args:
        num_tokens: First tokens that are compared; shorter prompts are of no family. 0: nobody is.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._members: dict[_Key, list[int]] = {}  # number of the family, number of its members
        self._key_of: dict[int, _Key] = {}  # by slot
        self._column = SlotColumn()
        self._last = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, slot: int, request: Request) -> None:
        """Put a request to its family."""
        prompt = request.prompt_token_ids
        if not self._num_tokens or len(prompt) <= self._num_tokens:
            return
        key = (request.cache_salt, prompt[: self._num_tokens])
        if key not in self._members:
            self._last += 1
            self._members[key] = [self._last, 0]
        self._members[key][1] += 1
        self._key_of[slot] = key
        self._column[slot] = self._members[key][0]

    def remove(self, slot: int) -> None:
        """Forget a request, and its family with its last member."""
        key = self._key_of.pop(slot, None)
        self._column[slot] = 0
        if key is not None:
            self._members[key][1] -= 1
            if not self._members[key][1]:
                del self._members[key]

    def of(self, slots: Int32Array) -> FloatArray:
        """Return the family of each slot, 1 or more, never used again; 0 for none."""
        return self._column.of(slots)


class PrefixAffinity(Fcfs):
    """Admits the longest cached prefix first, while it is still cached; waiting makes up for cached tokens.

    Of sequences that begin alike and find nothing cached one goes ahead and the others wait until it has its first token: so one pays
    for the prefix and the others find it. If they do not find it then, they wait for each other no more. A very long queue is
    admitted by arrival: sorting it takes longer than a step may.

    Args:
        config: When to fall back, what counts as alike, ageing.

    Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024 (longest prefix match);
    the in-batch rule and its limit of 32 are those of its implementation, which looks everybody up and so stops at 128 waiting.
    """

    def __init__(self, config: PrefixAffinityConfig | None = None) -> None:
        config = config if config is not None else PrefixAffinityConfig()
        super().__init__(config)
        self._max_waiting, self._shared_tokens = config.max_waiting, config.shared_tokens
        self._age_tokens_per_s = config.age_tokens_per_s
        self.families = Families(config.shared_tokens)
        self._led: Int64Array = np.empty(0, np.int64)  # families of which one went ahead, and that are still cold
        self._held: frozenset[int] = frozenset()

    def on_added(self, *, slot: int, request: Request) -> None:
        """Put it to those that begin alike."""
        self.families.add(slot, request)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by cached tokens, most first; those that wait for another's prefix last."""
        waiting = view.waiting
        self._held = frozenset()
        if len(waiting) > self._max_waiting:
            return waiting
        cached = view.prefix_tokens(waiting)
        families = self.families.of(waiting).astype(np.int64)
        follows = self._followers(view, families, (cached <= self._shared_tokens) & (families > 0))
        self._held = frozenset(waiting[follows].tolist())
        value = cached - self._age_tokens_per_s * view.arrival_s[waiting]
        return waiting[np.lexsort((-value, follows))]

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return nothing for those that wait for another's prefix."""
        if slot in self._held and not view.num_blocks[slot]:
            return 0
        return super().chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget)

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Forget it."""
        self.families.remove(slot)

    def _followers(self, view: SchedulerView, families: Int64Array, is_cold: BoolArray) -> BoolArray:
        """Return who waits for one of its family that goes ahead in this step or is at its prompt."""
        running = view.running
        ahead = self.families.of(running[np.isinf(view.first_token_s[running])]).astype(np.int64)
        was_led = np.isin(families, self._led)
        kinds, firsts = np.unique(families, return_index=True)
        is_first = np.zeros(len(families), np.bool_)
        is_first[firsts] = True
        follows = (np.isin(families, ahead) | ~(is_first | was_led)) & is_cold
        self._led = kinds if is_cold.all() else np.unique(families[is_cold])
        return follows
