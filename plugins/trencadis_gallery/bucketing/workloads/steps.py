"""From arrivals to the shapes of passes: the smallest simulation of an engine that still batches.

One step: every running sequence decodes once, all in one pass; what the token budget leaves goes to prompts in order of
arrival, the last of them in chunks; prefills are grouped, longest first, into passes whose rectangle stays within the
budget. A step lasts as long as :class:`DeviceCost` says, and the clock jumps over times without work.

Left out: prefix hits and preemption. A sequence is admitted when all its blocks fit, and with contiguous blocks the
range in use is taken to be as dense as a defragmenter keeps it. With drafts every decode has the longest draft, and none
of it is accepted. Sequences are cut to the longest length.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from trencadis.records import BucketLimits, Phase, Shape
from trencadis_gallery.bucketing.workloads.cost import DeviceCost
from trencadis_gallery.bucketing.workloads.trace import Arrival

__all__ = ["simulate_steps"]


def simulate_steps(
    arrivals: Sequence[Arrival], limits: BucketLimits, cost: DeviceCost
) -> Mapping[Shape, tuple[int, int]]:
    """Return how many passes of each shape the requests cause, and the new tokens they hold together. Pure.

    Args:
        arrivals: By time of arrival.
        limits: Limits of the engine.
        cost: How long a pass takes, which decides how many requests meet in a batch.
    """
    engine = _Engine(limits, cost)
    waiting = deque(arrivals)
    while waiting or engine.has_work:
        if not engine.has_work:
            engine.now_s = max(engine.now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= engine.now_s and engine.admits(waiting[0]):
            engine.admit(waiting.popleft())
        engine.step()
    return {shape: (count, engine.tokens[shape]) for shape, count in engine.passes.items()}


class _Prompt:
    """A sequence whose prompt is being computed."""

    def __init__(self, num_prompt: int, num_output: int, num_blocks: int) -> None:
        self.num_prompt, self.num_output, self.num_blocks = num_prompt, num_output, num_blocks
        self.num_computed = 0


class _Decodes:
    """All decoding sequences at once: each gains a token a step, so that a step costs O(1), not O(sequences)."""

    def __init__(self, block_size: int, num_drafts: int) -> None:
        self._block_size, self._extra = block_size, 1 + num_drafts
        self._crossing = [0] * block_size  # by step modulo block size: sequences that begin a block then
        self._leaving: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._step = 0
        self.num_sequences = 0
        self.num_blocks = 0  # read by the next step

    def join(self, prompt: _Prompt) -> None:
        length, num_steps = prompt.num_prompt + self._extra, prompt.num_output - 1
        phase = (self._step - length + 1) % self._block_size
        self._crossing[phase] += 1
        self.num_sequences += 1
        self.num_blocks += -(-length // self._block_size)
        last_blocks = -(-(length + num_steps - 1) // self._block_size)
        self._leaving[self._step + num_steps - 1].append((phase, last_blocks, prompt.num_blocks))

    def advance(self) -> int:
        """End a step; returns the blocks that finished sequences give back."""
        freed = 0
        for phase, last_blocks, num_reserved in self._leaving.pop(self._step, ()):
            self._crossing[phase] -= 1
            self.num_sequences -= 1
            self.num_blocks -= last_blocks
            freed += num_reserved
        self._step += 1
        self.num_blocks += self._crossing[self._step % self._block_size]
        return freed


class _Engine:
    def __init__(self, limits: BucketLimits, cost: DeviceCost) -> None:
        self._limits, self._cost = limits, cost
        self._prompts: list[_Prompt] = []
        self._decodes = _Decodes(limits.block_size, limits.max_draft_tokens)
        self._free_blocks = limits.num_blocks
        self.now_s = 0.0
        self.passes: Counter[Shape] = Counter()
        self.tokens: Counter[Shape] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._prompts or self._decodes.num_sequences)

    def admits(self, arrival: Arrival) -> bool:
        """A sequence larger than the whole cache runs alone, else nothing after it would ever run."""
        num_sequences = len(self._prompts) + self._decodes.num_sequences
        fits = self._sequence(arrival).num_blocks <= self._free_blocks
        return num_sequences < self._limits.max_num_seqs and (fits or not num_sequences)

    def admit(self, arrival: Arrival) -> None:
        prompt = self._sequence(arrival)
        self._free_blocks -= prompt.num_blocks
        self._prompts.append(prompt)

    def _sequence(self, arrival: Arrival) -> _Prompt:
        longest = self._limits.max_model_len
        num_prompt = min(arrival.num_prompt_tokens, max(1, longest - 1))
        num_output = max(1, min(arrival.num_output_tokens, longest - num_prompt))
        return _Prompt(num_prompt, num_output, -(-(num_prompt + num_output) // self._limits.block_size))

    def step(self) -> None:
        limits, decodes = self._limits, self._decodes
        step_s = self._cost.step_s
        budget = limits.max_num_batched_tokens
        if decodes.num_sequences:
            budget -= decodes.num_sequences
            num_blocks = max(decodes.num_sequences, decodes.num_blocks)
            shape = Shape(decodes.num_sequences, 1 + limits.max_draft_tokens, num_blocks, Phase.DECODE)
            step_s += self._count(shape, shape.num_tokens)
            self._free_blocks += decodes.advance()
        chunks = self._chunks(budget)
        for group in self._groups(chunks):
            context = max(-(-prompt.num_computed // limits.block_size) for prompt, _ in group)
            shape = Shape(len(group), group[0][1], context, Phase.PREFILL)
            step_s += self._count(shape, sum(size for _, size in group))
        for prompt, size in chunks:
            self._computed(prompt, size)
        self.now_s += step_s

    def _chunks(self, budget: int) -> list[tuple[_Prompt, int]]:
        chunks = []
        for prompt in self._prompts:
            size = min(budget, prompt.num_prompt - prompt.num_computed)
            if size <= 0:
                break
            chunks.append((prompt, size))
            budget -= size
        return chunks

    def _groups(self, chunks: list[tuple[_Prompt, int]]) -> list[list[tuple[_Prompt, int]]]:
        limits = self._limits
        groups: list[list[tuple[_Prompt, int]]] = []
        for chunk in sorted(chunks, key=lambda chunk: -chunk[1]):
            size = len(groups[-1]) + 1 if groups else 0
            if (
                groups
                and size <= limits.max_prefill_batch_size
                and size * groups[-1][0][1] <= limits.max_num_batched_tokens
            ):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return groups

    def _computed(self, prompt: _Prompt, size: int) -> None:
        """Note a chunk; a whole prompt has its first output token, and decodes the others."""
        prompt.num_computed += size
        if prompt.num_computed < prompt.num_prompt:
            return
        self._prompts.remove(prompt)
        if prompt.num_output > 1:
            self._decodes.join(prompt)
        else:
            self._free_blocks += prompt.num_blocks

    def _count(self, shape: Shape, num_tokens: int) -> float:
        self.passes[shape] += 1
        self.tokens[shape] += num_tokens
        return self._cost.pass_s(shape)
