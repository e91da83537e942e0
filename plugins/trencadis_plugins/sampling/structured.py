"""Structured output: masks tokens that a grammar forbids. Masks are computed while the model runs.

    commit ─▶ thread: the token, as soon as the device has it ─▶ a step in the grammar ─▶ the mask of the next position
    apply  ◀─ that mask; after drafts, and after rejected tokens, masks are computed from the histories

Shapes: L logits rows of a call, R of them with structured output, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import attrs
import numpy as np
import torch

from trencadis.interfaces import SamplingContext, SupportsPreparation, Vocabulary
from trencadis.records import Int32Array, RowStart, SamplingParams
from trencadis_plugins.sampling.arithmetic import on_host, tensor_on
from trencadis_plugins.sampling.grammar import CompiledGrammar, grammars_of
from trencadis_plugins.sampling.grammar_state import GrammarState, LeftGrammarError
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowProcessor, on_device

__all__ = ["Structured"]

_MAX_FAILURES = 4096
"""Kept reasons: most are of drafts that are rejected."""


@attrs.define(eq=False)
class _Row:
    """State of a sequence with structured output.

    Attributes:
        state: In the grammar; used by the thread of ``ahead`` while that runs.
        num_prompt_tokens: Length of the prompt; the output begins after it.
        ahead: The last mask computed in advance.
        position: Position of that mask; -1: depends on which drafts are accepted.
        outputs: Outputs of the logits rows in the last call, if they were looked at.
    """

    state: GrammarState
    num_prompt_tokens: int
    ahead: Future[Int32Array]
    position: int
    outputs: list[list[int]] = attrs.field(factory=list)


class Structured(RowProcessor, SupportsPreparation):
    """Masks every token that cannot continue a text of the requested grammar.

    The text ends where it may, with end-of-sequence tokens: they are masked anywhere else, and all that is left after a text that is
    complete. After a draft that is forbidden no token is allowed: the row does not count where the draft is rejected, and ends the request
    where it stands all the same.

    Args:
        vocabulary: Reads the tokenizer; called when the first request asks for structured output.

    Attributes:
        num_masks: Logits rows that needed a mask.
        num_ready: How many of these masks had been computed when they were needed.
    """

    needs_history = True
    label = "structured output"
    has_state = True
    rebuilds_state = True

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._rows = RowStates[_Row](self.label)
        self._thread: ThreadPoolExecutor | None = None
        self.failures: dict[tuple[int, int], str] = {}
        self.num_masks = 0
        self.num_ready = 0

    def prepare(self, params: SamplingParams, *, tenant: str) -> tuple[Future[CompiledGrammar], ...]:
        """Compile the grammar of a request; fails with the library's reason if it cannot be served."""
        if params.structured is None:
            return ()
        return (grammars_of(self._vocabulary).begin(params.structured, tenant=tenant),)

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether a text of the grammar may begin with a token."""
        mask = self._state(start).mask([])
        word, bit = divmod(token_id, 32)
        return word < len(mask) and bool(mask[word] >> bit & 1)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the request has a structured-output constraint. Pure."""
        return start.params.structured is not None

    def start_row(self, start: RowStart) -> None:
        """Add a sequence, and start to compute its next mask."""
        self._rows.pop(start.row, None)
        super().start_row(start)

    def _take(self, start: RowStart) -> None:
        if start.params.structured is None:
            return
        state = self._state(start)
        output = start.token_ids[start.num_prompt_tokens :].tolist()
        self._rows[start.row] = _Row(
            state=state,
            num_prompt_tokens=start.num_prompt_tokens,
            ahead=self._submit(lambda: state.mask(output)),
            position=len(start.token_ids) - 1,
        )

    def _state(self, start: RowStart) -> GrammarState:
        """Return a sequence's state at the beginning of its grammar."""
        wanted, grammars = start.params.structured, grammars_of(self._vocabulary)
        assert wanted is not None, "it asks"
        matcher = grammars.matcher(wanted)
        vocabulary, eos_token_id = grammars.vocabulary, grammars.eos_token_id
        return GrammarState(
            matcher,
            vocabulary=vocabulary,
            eos_token_id=eos_token_id,
            end_token_ids=_ends(start, eos_token_id, vocabulary.special_token_ids),
            on_failure=lambda: grammars.spend(wanted),
        )

    # ------------------------------------------------------------------------------------------------- masks

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return logits.masked_fill_(_banned(np.stack(self._masks(context)), logits), -torch.inf)

    def _masks(self, context: SamplingContext) -> list[Int32Array]:
        """Return the mask of each logits row: of no token where the text has left the grammar."""
        masks: dict[int, Int32Array] = {}
        unknown: list[int] = []
        for number, indices in _by_row(context).items():
            row = self._rows[number]
            row.outputs = []
            if len(indices) == 1 and row.position == context.positions[indices[0]]:
                self.num_ready += row.ahead.done()
                masks[indices[0]] = self._mask(row.ahead.result, context, indices[0])
            else:
                unknown += indices
        for index, output in zip(unknown, self._outputs(context, unknown), strict=True):
            row = self._rows[context.rows[index]]
            self.num_ready += row.ahead.done() and row.state.has_mask(output)
            wait([row.ahead])  # the state is its thread's while it runs; what it found is for another output
            row.outputs.append(output)
            masks[index] = self._mask(partial(row.state.mask, output), context, index)
        self.num_masks += len(context.rows)
        return [masks[index] for index in range(len(context.rows))]

    def _mask(self, mask: Callable[[], Int32Array], context: SamplingContext, index: int) -> Int32Array:
        """Return the mask of a logits row, of no token where its text has left the grammar: then keeps why."""
        place = context.rows[index], context.positions[index]
        self.failures.pop(place, None)
        try:
            return mask()
        except LeftGrammarError as error:
            if len(self.failures) >= _MAX_FAILURES:
                self.failures.clear()
            self.failures[place] = str(error)
            return self._nothing()

    def _nothing(self) -> Int32Array:
        """Return a mask that allows no token."""
        return np.zeros(-(-len(grammars_of(self._vocabulary).vocabulary.tokens) // 32), np.int32)

    def _outputs(self, context: SamplingContext, index: Sequence[int]) -> list[list[int]]:
        """Return the outputs up to some logits rows; waits for the device if there are any."""
        if not index:
            return []
        begins = [self._rows[context.rows[i]].num_prompt_tokens for i in index]
        ends = [context.positions[i] + 1 for i in index]
        first = min(begins)
        rows = tensor_on([context.histories[i] for i in index], context.tokens.device)
        tokens = context.tokens[rows, first : max(ends)].tolist()
        return [row[begin - first : end - first] for row, begin, end in zip(tokens, begins, ends, strict=True)]

    # ------------------------------------------------------------------------------------------------- ahead

    def commit(self, token_ids: torch.Tensor, context: SamplingContext) -> None:
        """Start to compute the masks of the next positions; does not wait for the device."""
        asked = np.flatnonzero(self.asked(context)).tolist()
        if not asked:
            return
        tokens = on_host(token_ids)
        for number, indices in _by_row(context, asked).items():
            row = self._rows.get(number)
            if row is None:
                continue  # its request ends with an error, and this one call is about others, too
            if len(indices) == 1:
                row.position = context.positions[indices[0]] + 1
                row.ahead = self._submit(_one_more(row.state, tokens, indices[0]))
            else:
                row.position = -1
                row.ahead = self._submit(_most_likely(row.state, tokens, indices, row.outputs))

    def _submit(self, work: Callable[[], Int32Array]) -> Future[Int32Array]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trencadis-structured")
        return self._thread.submit(work)


def _one_more(state: GrammarState, tokens: Callable[[], list[int]], index: int) -> Callable[[], Int32Array]:
    return lambda: state.advance(tokens()[index])


def _most_likely(
    state: GrammarState, tokens: Callable[[], list[int]], indices: list[int], outputs: list[list[int]]
) -> Callable[[], Int32Array]:
    """Return the computation of the mask after the drafts as drawn; the acceptance rule may accept others."""

    def work() -> Int32Array:
        chosen = tokens()
        # The last row's token follows whatever was accepted.
        end = next(i for i, after in enumerate([*outputs[1:], []]) if after[-1:] != [chosen[indices[i]]])
        return state.mask([*outputs[end], chosen[indices[end]]])

    return work


def _by_row(context: SamplingContext, among: Sequence[int] | None = None) -> dict[int, list[int]]:
    """Return the logits rows of each sequence, by ascending position. Pure."""
    indices = range(len(context.rows)) if among is None else among
    found: dict[int, list[int]] = {}
    for index in sorted(indices, key=context.positions.__getitem__):
        found.setdefault(context.rows[index], []).append(index)
    return found


def _ends(start: RowStart, eos_token_id: int, special_token_ids: frozenset[int]) -> set[int]:
    """Return the tokens that end a text of the grammar. Pure.

    A stop token that is text ends a text wherever the grammar has it; where the text may end it must not come instead of an end, for it
    would be part of it. A sequence that does not end at all repeats the tokenizer's own end.
    """
    texts = set(start.params.stop_token_ids) - special_token_ids
    return set(start.eos_token_ids) - texts or {eos_token_id}


def _banned(words: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens masks forbid, bool ``[R, V]`` on the logits' device, with tokens outside of the vocabulary. Pure.

    Args:
        words: int32 ``[R, W]``.
        logits: ``[L, V]``.
    """
    vocab_size = logits.shape[1]
    num_words = -(-vocab_size // 32)
    fitting = np.zeros((len(words), num_words), np.int32)
    fitting[:, : words.shape[1]] = words[:, :num_words]
    if logits.device.type == "cpu":
        bits = np.unpackbits(fitting.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)
    return _banned_on_device(on_device(fitting, logits), vocab_size)


def _banned_on_device(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the same from words on the device: they are 32 times smaller than the mask. Pure."""
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :vocab_size] == 0
