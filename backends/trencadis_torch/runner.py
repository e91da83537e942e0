"""Runs passes: inputs ▶ the model's forward ▶ logits of the asked positions ▶ sampling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import BackendError
from trencadis.interfaces import AcceptanceRule, GuessBatch, LayerGate, Sampler
from trencadis.records import Drafts, Int32Array, Pass, Phase
from trencadis_torch.attention.adapter import PASS_ARGUMENT, AttentionPass
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.device import to_device
from trencadis_torch.inputs import ModelInputs, padded_inputs, ragged_inputs
from trencadis_torch.linear.decoder import decoder_of, original_of
from trencadis_torch.linear.decoder_pass import DecoderPasses
from trencadis_torch.parallel.tokens import TokenExchange
from trencadis_torch.prompt_logprobs import PromptLogprobs, PromptPlan, score_prompt
from trencadis_torch.rows import Rows
from trencadis_torch.verify import Emitted, SamplePlan, emit

if TYPE_CHECKING:
    from trencadis_torch.heads.drafter import HeadDrafter
    from trencadis_torch.heads.states import LayerInputs

__all__ = ["Forward", "GatedPass", "PassResult", "PassRunner", "selects_positions"]


class GatedPass:
    """Another pass, each layer of which goes through a gate. Made only for steps that have one.

    Args:
        inner: Attends.
        gate: Gate of the step.
    """

    def __init__(self, inner: AttentionPass, gate: LayerGate) -> None:
        self._inner = inner
        self._gate = gate

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Wait until the layer may be written to and read, then attend; as in ``RaggedPass``."""
        self._gate.wait(layer_index)
        return self._inner.attend(layer_index, query, keys, values, options=options)


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPass], torch.Tensor]
"""Token ids ``[1, T]``, positions ``[1, T]``, which tokens' logits ``[L]``, and the pass, to logits ``[L, V]``."""


@attrs.frozen(kw_only=True)
class PassResult:
    """Results of one pass, on the device.

    Attributes:
        emitted: Tokens, or None if no sequence of the pass emits.
        prompt: Scores of prompt tokens, or None.
        num_padded_tokens: Token positions computed.
    """

    emitted: Emitted | None
    prompt: PromptLogprobs | None
    num_padded_tokens: int


def selects_positions(model: Any) -> bool:
    """Return whether a model's forward takes the positions whose logits are wanted. Pure."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _plain_forward(model: Any) -> Forward:
    """Return a model's own ``forward``, all steps after its output projection included, as a function of tensors and a pass.

    A model that cannot select positions computes the logits of all.

    Args:
        model: Model of transformers, with the paged attention switched on.
    """
    selects = selects_positions(model)

    def forward(
        token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        options: dict[str, Any] = {PASS_ARGUMENT: attention}
        if selects:
            options["logits_to_keep"] = keep
        result = model(input_ids=token_ids, position_ids=positions, use_cache=False, **options)
        logits: torch.Tensor = result.logits[0]
        return logits if selects else logits.index_select(0, keep)

    return forward


def _later_forward(model: Any) -> Forward:
    """Return the forward of a model that is made when it is needed."""
    made = functools.cache(lambda: _plain_forward(original_of(model)))

    def forward(*inputs: Any) -> torch.Tensor:
        return made()(*inputs)

    return forward


class PassRunner:
    """A model with rows and a cache, one pass at a time.

    A runner of a part of each pass overrides :meth:`inputs` and :meth:`forward`.

    Args:
        model: Model of transformers, with the paged attention switched on.
        rows: Tokens and block tables.
        cache: Keys and values.
        layout: ``ragged`` or ``padded``.
        workspace: Buffers to use again.
        wrap: Makes what runs of the model's forward; None: that itself.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: Rows,
        cache: PagedKVCache,
        layout: str,
        workspace: Workspace,
        wrap: Callable[[Forward], Forward] | None = None,
    ) -> None:
        plain = _later_forward(model) if hasattr(model, "original") else _plain_forward(model)
        self._forward = plain if wrap is None else wrap(plain)
        self._rows = rows
        self._cache = cache
        self._padded = layout == "padded"
        self._num_ranks = 1  # that have sequences of their own
        self._workspace = workspace
        decoder = decoder_of(model) if isinstance(cache.kernel, NativeAttention) else None
        self._decoder = None if decoder is None else DecoderPasses(decoder, cache)
        self._head: HeadDrafter | None = None

    def follow_with(self, head: HeadDrafter, states: LayerInputs) -> None:
        """Have a head follow every pass from now on.

        Args:
            head: Gets the hidden states of each pass.
            states: Those that it reads.
        """
        self._head, self._states = head, states
        if self._decoder is not None:
            self._decoder.tell(states.layers)

    def run(
        self,
        one: Pass,
        *,
        drafts: Drafts | None,
        sampler: Sampler,
        acceptance: AcceptanceRule,
        gate: LayerGate | None = None,
        exchange: TokenExchange | None = None,
    ) -> PassResult:
        """Run a pass and write the emitted tokens after the rows' tokens.

        Args:
            one: The pass; without sequences only padding is computed, which leaves no trace.
            drafts: Drafts of the whole plan.
            sampler: Chooses tokens.
            acceptance: Says how many drafts stand.
            gate: That each layer waits at.
            exchange: Between ranks, one of which samples and scores prompts; None: there is one rank.
        """
        trees = DraftTrees.of(one, drafts)
        inputs = plain = self.inputs(one, trees)
        if gate is not None:
            inputs = attrs.evolve(inputs, attention=GatedPass(inputs.attention, gate))
        samples = SamplePlan.of(
            one,
            inputs.firsts,
            self._rows.history,
            padded=self._padded,
            num_sequences=self._num_ranks * one.bucket.batch_size,
            trees=trees,
        )
        prompts = PromptPlan.of(one, inputs.firsts, self._rows)
        logits, sample_rows, prompt_rows = self._logits(one, inputs, samples, prompts)
        emitted = prompt = None
        if prompts is not None and (exchange is None or exchange.is_output):
            prompt = score_prompt(logits[prompt_rows], prompts, self._rows)
        if samples is not None:
            emitted = emit(
                logits[sample_rows],
                samples,
                one,
                drafts=drafts,
                rows=self._rows,
                sampler=sampler,
                acceptance=acceptance,
                exchange=exchange,
            )
            if trees is not None and emitted is not None:
                self._close_up(trees, emitted, samples.sequences)
        if self._head is not None:
            stood = None if trees is None or samples is None else _standing(one, trees, emitted, samples.sequences)
            self._follow(self._head, one, plain, gate, stood)
        return PassResult(emitted=emitted, prompt=prompt, num_padded_tokens=inputs.num_tokens)

    def _follow(
        self, head: HeadDrafter, one: Pass, inputs: ModelInputs, gate: LayerGate | None, stood: _Standing | None
    ) -> None:
        """Let the head write its keys and values, once the tokens after those of the pass are known.

        Args:
            head: Writes.
            one: The pass.
            inputs: The pass as the model got it.
            gate: That each layer waits at.
            stood: The tokens that follow each other, where drafts branched; None: all.
        """
        attention = inputs.attention
        if not isinstance(attention, RaggedPass):
            return
        if gate is not None:
            gate.wait(head.layer_index)
        if self._decoder is not None and gate is None and attention.trees is None:
            states = self._decoder.told.flatten(1)
        else:
            states = self._states.states
        positions, slots = inputs.positions[0], attention.slots
        if stood is not None:
            node, place, positions = to_device(
                np.stack([stood.nodes, stood.places, stood.positions]).astype(np.int64), states.device
            )
            one, states, slots = attrs.evolve(one, query_lens=stood.query_lens), states[node], slots[place]
        head.follow(one, states, positions, slots)

    def guess(self, batch: GuessBatch) -> Int32Array | None:
        """Continue texts with the most likely tokens; None if the model does not run in one call.

        Args:
            batch: The texts.
        """
        if self._decoder is None or self._padded:
            return None
        self._rows.write_tables(batch.table_writes)
        return self._decoder.guess(batch, self._rows.tables)

    def inputs(self, one: Pass, trees: DraftTrees | None = None) -> ModelInputs:
        """Return the model's inputs for a pass.

        Args:
            one: The pass.
            trees: Trees of drafts that branch; only without padding.

        Raises:
            BackendError: Drafts branch in a padded pass.
        """
        if not self._padded:
            return ragged_inputs(one, self._rows, self._cache, self._workspace, trees)
        if trees is not None:
            raise BackendError(
                'drafts branch, and a padded pass takes linear ones: "backend.tree_attention" is not provided.'
            )
        return padded_inputs(one, self._rows, self._cache)

    def _close_up(self, trees: DraftTrees, emitted: Emitted, sequences: npt.NDArray[np.int64]) -> None:
        """Move keys and values of accepted drafts to where linear ones would have written them."""
        assert emitted.paths is not None, "drafts that branch have paths"
        assert emitted.num_emitted is not None, "and counts"
        row, source, target = trees.moves(emitted.paths, emitted.num_emitted - 1, sequences)
        size, tables = self._cache.block_size, self._rows.tables
        sources, targets = (tables[row, one // size].long() * size + one % size for one in (source, target))
        self._cache.move(sources, targets)

    def forward(self, inputs: ModelInputs, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the logits ``[L, V]`` at some tokens of the pass, and write keys and values.

        A plain decoder runs in one call, but for passes that wait at each layer and drafts that branch. Else the model's own
        ``forward`` computes them, with whatever it does after its output projection.

        Args:
            inputs: Inputs of the pass.
            tokens: Indices into the pass, ``[L]``.
        """
        attention = inputs.attention
        if self._decoder is not None and isinstance(attention, RaggedPass) and attention.trees is None:
            return self._decoder.logits(attention, inputs.token_ids, inputs.positions, tokens)
        return self.logits_at(inputs, to_device(tokens, inputs.token_ids.device))

    def logits_at(self, inputs: ModelInputs, keep: torch.Tensor) -> torch.Tensor:
        """Return the same logits; looks at nothing on the host.

        Args:
            inputs: Inputs of the pass.
            keep: Indices into the pass, int64 ``[L]`` on the device.
        """
        return self._forward(inputs.token_ids, inputs.positions, keep, inputs.attention)

    def _logits(
        self, one: Pass, inputs: ModelInputs, samples: SamplePlan | None, prompts: PromptPlan | None
    ) -> tuple[torch.Tensor, slice | torch.Tensor, slice | torch.Tensor]:
        """Return logits, and which of their rows are to be sampled and scored."""
        nothing: slice = slice(0, 0)
        if samples is None and prompts is None:
            decodes = one.bucket.phase is Phase.DECODE
            count = one.bucket.batch_size * (one.bucket.query_len if decodes else 1) if self._padded else 1
            return self.forward(inputs, np.zeros(count, np.int64)), nothing, nothing
        if prompts is None and samples is not None:
            return self.forward(inputs, samples.tokens), slice(None), nothing
        scored = prompts.tokens if prompts is not None else np.empty(0, np.int64)
        sampled = samples.tokens if samples is not None else np.empty(0, np.int64)
        if self._padded:
            device = inputs.token_ids.device
            everything = np.arange(inputs.num_tokens)
            return self.forward(inputs, everything), to_device(sampled, device), to_device(scored, device)
        count = len(scored)
        return self.forward(inputs, np.concatenate([scored, sampled])), slice(count, None), slice(0, count)


@attrs.frozen(kw_only=True, eq=False)
class _Standing:
    """The tokens of a pass that follow each other, once accepted drafts lie after each other.

    Attributes:
        nodes: Index of each into the pass as it was computed, ``[T]``.
        places: Index of the token in whose place it lies now, ``[T]``.
        positions: In its text, ``[T]``.
        query_lens: How many of each sequence, int32.
    """

    nodes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_lens: Int32Array


def _standing(
    one: Pass, trees: DraftTrees, emitted: Emitted | None, sequences: npt.NDArray[np.int64]
) -> _Standing | None:
    """Return the tokens of a pass that follow each other: of drafts that branch, those that were accepted; waits for the device."""
    if emitted is None or emitted.paths is None or emitted.num_emitted is None:
        return None
    paths, accepted = emitted.paths.cpu().numpy(), emitted.num_emitted.cpu().numpy() - 1
    lengths, firsts = one.query_lens.copy(), np.cumsum(one.query_lens) - one.query_lens
    nodes = [first + np.arange(length) for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)]
    for path, count, sequence in zip(paths, accepted.tolist(), sequences.tolist(), strict=False):
        if trees.branches[sequence]:
            nodes[sequence] = firsts[sequence] + np.concatenate([[0], path[:count]])
            lengths[sequence] = 1 + count
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return _Standing(
        nodes=np.concatenate(nodes),
        places=np.repeat(firsts, lengths) + within,
        positions=np.repeat(one.starts, lengths) + within,
        query_lens=lengths,
    )
