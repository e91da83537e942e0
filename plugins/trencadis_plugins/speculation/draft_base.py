"""Base of speculators with a draft model, independent of the number of forwards per draft.

    view ─▶ rows, blocks ─▶ what the cache already holds ─▶ the rest is computed ─▶ guesses (a subclass) ─▶ drafts

A cache entry holds while the tokens up to it are those of the sequence. So nothing has to be told of rejections, preemptions,
rows that change hands or steps in which a sequence was left out: each is a shorter common beginning.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.errors import ConfigValueError, ContractError, InvalidRequestError, ModelLoadError
from trencadis.interfaces import AllocationPlan, Backend, ComponentContext, DraftView, Speculator, covering_buckets
from trencadis.records import (
    BoolArray,
    BucketLimits,
    DraftDistributions,
    Drafts,
    Int32Array,
    ModelFacts,
    Request,
    SamplingParams,
)
from trencadis_plugins.speculation.draft_asked import Asked, in_target, joined
from trencadis_plugins.speculation.draft_config import DraftWithModelConfig
from trencadis_plugins.speculation.draft_memory import DraftMemory, common_prefix
from trencadis_plugins.speculation.draft_runner import DraftRunner, Query
from trencadis_plugins.speculation.draft_sampler import DraftSampler, Echo, Guesses
from trencadis_plugins.speculation.draft_shapes import Buckets
from trencadis_plugins.speculation.draft_tokens import Translation

__all__ = ["Allocated", "DraftingModel"]

_GREEDY = SamplingParams(temperature=0.0)


@attrs.frozen(kw_only=True, eq=False)
class Allocated:
    """Parts that are made once the engine's sizes are known.

    Attributes:
        plan: Plan that the backend was allocated with.
        memory: Rows and blocks.
        runner: Feeds the backend.
        is_ragged: It takes any number of new tokens.
        most_query: Else the most of a sequence in a decode pass.
    """

    plan: AllocationPlan
    memory: DraftMemory
    runner: DraftRunner
    is_ragged: bool
    most_query: int


class DraftingModel(Speculator):
    """A speculator with a model of its own, on another backend of the engine's kind.

    Args:
        config: Table of the component.
        context: Makes the backend and finds the model.
    """

    def __init__(self, config: DraftWithModelConfig, context: ComponentContext) -> None:
        self.max_draft_tokens = config.max_draft_tokens
        self._config = config
        self._context = context
        self._backend: Backend | None = None
        self._facts: ModelFacts | None = None
        self._sampler = DraftSampler(num_kept=self._num_kept())
        self._allocated: Allocated | None = None

    # ------------------------------------------------------------------------------------------------- start-up

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that the draft model keeps for a token; loads it."""
        return self._loaded().kv_bytes_per_token

    def _loaded(self) -> ModelFacts:
        if self._facts is None:
            model = self._context.named_model(self._config.model)
            self._backend = self._context.make("backend", self._config.backend)
            source = attrs.evolve(model.source, is_draft=self._config.precision == "auto")
            self._facts = self._backend.load(source, sampler=self._sampler)
            self._check(self._backend)
            self._translation = self._translate(self._facts)
            closed = self._translation.closed
            self._prepare(model.source.path, closed)
            self._sampler.close_tokens(closed)
        return self._facts

    def _translate(self, facts: ModelFacts) -> Translation:
        target_size = facts.vocab_size if self._context.model is None else self._context.model.vocab_size
        if self._config.tokenizer == "same":
            return Translation.identity(target_size, facts.vocab_size)
        try:
            target = self._context.vocabulary()
            draft = self._context.named_model(self._config.model).vocabulary()
        except (InvalidRequestError, ModelLoadError) as error:
            raise ConfigValueError(
                f'[speculation] the draft model {self._config.model!r} has tokenizer = "{self._config.tokenizer}", and its tokens cannot be '
                f"compared with the target's: {str(error).removesuffix(error.hint).strip()}",
                hint='Set tokenizer = "same" in its table if both models have the same token ids; or give the one that lacks it a tokenizer.',
            ) from error
        return Translation.between(target, draft, target_size=target_size, draft_size=facts.vocab_size)

    def allocate(self, limits: BucketLimits) -> None:
        """Load the model if it is not, allocate its cache, and prepare its buckets.

        Raises:
            OutOfMemoryError: No room.
        """
        facts = self._loaded()
        backend = self._backend
        assert backend is not None, "loaded just now"
        is_ragged = backend.capabilities.layout == "ragged"
        # What the engine's buckets are for; nothing bounds a ragged pass.
        most_query = self._most_query(limits) if is_ragged else 1 + limits.max_draft_tokens
        plan = AllocationPlan(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_rows=limits.max_num_seqs,
            max_model_len=min(limits.max_model_len, facts.max_model_len),
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_draft_tokens=most_query - 1,
            acceptance=Echo(),
        )
        backend.allocate(plan)
        self._allocated = Allocated(
            plan=plan,
            memory=DraftMemory(num_rows=plan.num_rows, num_blocks=plan.num_blocks, block_size=plan.block_size),
            runner=DraftRunner(backend, plan, self._buckets(backend, limits), most_query=most_query),
            is_ragged=is_ragged,
            most_query=most_query,
        )

    def _buckets(self, backend: Backend, limits: BucketLimits) -> Buckets:
        if backend.capabilities.layout == "ragged":
            return Buckets()
        strategy = self._context.make("bucketing", "")
        listed = strategy.buckets(limits) if self._config.warmup else ()
        if not listed:
            return Buckets(strategy)
        # As the engine does: the model sees shapes that the strategy's table may leave out.
        beside = () if limits.unified else covering_buckets(strategy.bucket_for, listed, limits)
        return Buckets(strategy, backend.warm_up((*listed, *beside)).prepared)

    def close(self) -> None:
        """Free the model and its cache; may be called twice."""
        backend, self._backend, self._allocated = self._backend, None, None
        if backend is not None:
            backend.close()

    # ------------------------------------------------------------------------------------------------- a step

    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``view.max_draft_tokens`` drafts for each sequence; none for one that has no room."""
        self._observe(view)
        asked = self._ask(view)
        taken = self._run(asked) if asked else []
        return self._drafts(view, asked, taken)

    def _run(self, asked: Sequence[Asked]) -> list[Guesses]:
        """Compute drafts, and return what was chosen for them."""
        try:
            self._fill(asked)
            self._sampler.begin()
            self._guess(asked)
            self.ready.runner.wait()
            taken = self._sampler.take()
            self._read(asked, taken)
        except Exception:
            for one in asked:  # nobody knows what their cache holds
                self.ready.memory.forget(one.held.slot)
            raise
        finally:
            self._sampler.end()
        return taken

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Give the sequence's row and blocks back."""
        if self._allocated is not None:
            self._allocated.memory.forget(slot)

    @property
    def ready(self) -> Allocated:
        """Parts that are made once the engine's sizes are known.

        Raises:
            ContractError: They are not.
        """
        if self._allocated is None:
            raise ContractError(f"{type(self).__name__}: propose was called before allocate, or after close.")
        return self._allocated

    def _ask(self, view: DraftView) -> list[Asked]:
        """Return the sequences that can be drafted for, each with a row and with blocks."""
        ready, asked = self.ready, []
        ready.memory.begin(view.slots)
        for index, (slot, most) in enumerate(zip(view.slots.tolist(), view.max_draft_tokens.tolist(), strict=True)):
            tokens = self._translation.tokens(view.token_ids[index]) if most else None
            if tokens is None:
                continue
            size = len(tokens)
            count = min(most, self.max_draft_tokens, ready.plan.max_model_len - size)
            end = size + self._room(max(count, 0))
            fits = count > 0 and end <= ready.plan.max_model_len
            held = ready.memory.hold(slot, view.requests[index]) if fits else None
            if held is None or not ready.memory.reserve(held, end):
                continue
            params = self._params(view.requests[index])
            held.tokens = held.tokens[: min(common_prefix(held.tokens, tokens), size - 1)]
            ready.runner.start(held, tokens, params=params, seed=view.seeds[index])
            asked.append(
                Asked(
                    index=index,
                    held=held,
                    tokens=tokens,
                    num_known=len(view.token_ids[index]),
                    count=count,
                    is_linear=bool(view.linear_only[index]) or not self.drafts_trees,
                    is_greedy=params.is_greedy,
                )
            )
        return asked

    def _params(self, request: Request) -> SamplingParams:
        """Return by which parameters is drafted: those of the request that the draft sampler knows."""
        params = request.params
        if self._config.sampling == "greedy" or params.is_greedy:
            return _GREEDY
        return SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )

    def _fill(self, asked: Sequence[Asked]) -> None:
        """Compute what is too long to be computed with the guesses, in chunks, up to the last known token."""
        leave = self._leave(len(asked))
        long = [one for one in asked if one.num_missing > leave]
        while long:
            queries = []
            for one in long:
                start = len(one.held.tokens)
                end = min(len(one.tokens) - 1, start + self.ready.plan.max_num_batched_tokens)
                queries.append(Query(one.held, start, one.tokens[start:end], samples=False))
                one.held.tokens = one.tokens[:end]
            self.ready.runner.run(queries)
            long = [one for one in long if one.num_missing > 1]

    def _drafts(self, view: DraftView, asked: Sequence[Asked], taken: Sequence[Guesses]) -> Drafts:
        """Return the drafts in the view's order and in the target's tokens."""
        num_drafts = np.zeros(len(view.slots), np.int32)
        for one in asked:
            num_drafts[one.index] = len(one.drafts)
        # Sequences were asked in the view's order.
        tokens = joined([one.drafts for one in asked])
        return Drafts(
            num_drafts=num_drafts,
            token_ids=self._translation.to_target[tokens],
            parents=joined([one.branches for one in asked]) if self.drafts_trees and asked else None,
            distributions=self._distributions(asked, taken),
        )

    def _distributions(self, asked: Sequence[Asked], taken: Sequence[Guesses]) -> DraftDistributions | None:
        drawn = [guesses.distributions for guesses in taken if guesses.distributions is not None]
        if not drawn:
            return None
        rows = joined([one.distributions for one in asked])
        return DraftDistributions(rows=rows, probabilities=in_target(drawn, self._translation))

    # ------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def _guess(self, asked: Sequence[Asked]) -> None:
        """Run what yields the guesses; all that is chosen meanwhile is kept."""

    @abstractmethod
    def _read(self, asked: Sequence[Asked], taken: Sequence[Guesses]) -> None:
        """Set drafts, and what the cache holds, from what was kept."""

    @abstractmethod
    def _leave(self, num_sequences: int) -> int:
        """Return how many missing tokens may be computed with the guesses, at least 1."""

    def _room(self, count: int) -> int:
        """Return how many tokens after the text are computed for so many drafts, ``count`` or more."""
        return count

    def _num_kept(self) -> int:
        """Return how many of the most likely tokens the sampler keeps."""
        return 0

    def _most_query(self, limits: BucketLimits) -> int:
        """Return the most tokens of a sequence that guesses are made after, in a ragged pass."""
        return 1 + limits.max_draft_tokens

    def _check(self, backend: Backend) -> None:
        """Refuse a backend that cannot do what is asked for."""

    def _prepare(self, path: str, closed: BoolArray) -> None:
        """Called with the place that the model was loaded from; may exclude further tokens."""

    def _observe(self, view: DraftView) -> None:
        """Be shown what became of earlier drafts."""
