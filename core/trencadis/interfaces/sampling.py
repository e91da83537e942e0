"""Contract of the noun ``sampling``: logits to tokens, on the device.

Shapes: L logits rows in a call, V vocabulary. A logits row belongs to a device row (a sequence) and a position: the
logits at position p choose the token at position p + 1. A sequence has several logits rows in one call when drafts are
verified; the history of each is the tokens up to its own position, so the same chain serves both cases unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np

from trencadis.errors import ContractError, InvalidRequestError
from trencadis.interfaces.laws import Law, law
from trencadis.records import RowError, RowStart, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "INTERFACE_VERSION",
    "STABILITY",
    "Distributions",
    "LogitsProcessor",
    "Sampled",
    "SampledLogprobs",
    "Sampler",
    "SamplingContext",
    "SupportsPreparation",
]

INTERFACE_VERSION = 1
STABILITY = "stable"


@attrs.frozen(kw_only=True)
class SamplingContext:
    """Rows and histories of the logits to sample.

    Attributes:
        rows: Device row of each logits row, on the host, ``[L]``.
        positions: Position of the token that yields each logits row, on the host, ``[L]``, 0 .. max_model_len - 1.
        tokens: Histories, int32 on the device: every row's tokens, ``[num_rows, max_model_len + 1]``, or, where drafts branch, one
            row for each logits row. Read-only.
        branches: Row of ``tokens`` that holds each logits row's history, ``[L]``; None where no drafts branch: then it is ``rows``.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: torch.Tensor
    branches: tuple[int, ...] | None = None

    @property
    def histories(self) -> tuple[int, ...]:
        """Row of ``tokens`` that holds each logits row's history in its first ``positions + 1`` entries, ``[L]``."""
        return self.rows if self.branches is None else self.branches

    def by_row(self, num_rows: int) -> SamplingContext:
        """Return the same with every row's tokens at its row, as where no drafts branch. Pure.

        Histories of logits rows whose drafts branch are one of several then; those of others are right.

        Args:
            num_rows: Device rows.
        """
        if self.branches is None:
            return self
        places = [0] * num_rows
        for row, branch in zip(self.rows, self.branches, strict=True):
            places[row] = branch
        return attrs.evolve(self, tokens=self.tokens[places], branches=None)


@attrs.frozen(kw_only=True)
class SampledLogprobs:
    """Log-probabilities of one logits row.

    Attributes:
        index: Which logits row.
        token_id: The sampled token.
        logprob: Log-probability of the token, natural logarithm: under the model's own logits, or those it was drawn from, as the sampler
            is configured.
        rank: 1 + number of tokens strictly more likely.
        top_token_ids: The most likely, best first.
        top_logprobs: Theirs.
    """

    index: int
    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@attrs.frozen(kw_only=True)
class Sampled:
    """Tokens for every logits row.

    Attributes:
        token_ids: int64 ``[L]`` on the device of the logits.
        logprobs: For the logits rows of sequences that request them.
        row_errors: Logits rows without a choosable token; their ``token_ids`` are ignored, but must be valid tokens.
        late_errors: Returns more of them, which only a look at the device's numbers shows; to be called once the step is done, on any
            thread. None: there are none, or the sampler has waited for the device.
    """

    token_ids: torch.Tensor
    logprobs: tuple[SampledLogprobs, ...] = ()
    row_errors: tuple[RowError, ...] = ()
    late_errors: Callable[[], tuple[RowError, ...]] | None = None


class Distributions(Protocol):
    """Distributions at every logits row of a call, with random numbers that belong to them."""

    @property
    def probabilities(self) -> torch.Tensor:
        """``[L, V]``; sums are 1; one-hot for greedy rows."""
        ...

    def uniforms(self) -> torch.Tensor:
        """Return a number of (0, 1) for each logits row, ``[L]``: it decides which draft after the row's token is accepted.

        float64, or float32 on a device that has no float64.
        """
        ...

    def draw(self, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return tokens drawn in proportion to weights, int64 ``[n]``.

        Independent of ``uniforms`` and of the draws that made drafts; the same whatever else is in the call.

        Args:
            weights: ``[n, V]``, at least 0, not all 0.
            index: Logits row that each belongs to, int64 ``[n]``.
        """
        ...


class LogitsProcessor(ABC):
    """One step of a chain: changes the logits of the rows that it applies to.

    Calls come in this order: ``allocate`` once; then ``start_row`` for each sequence that takes a row, and for each batch
    ``apply`` and, with a state, ``commit``. All on the backend's thread.

    Attributes:
        name: By which a request switches it on, with arguments (``SamplingParams.logits_processors``), if the operator
            enabled it; empty: no request needs to.
        argmax_invariant: The most likely token stays the most likely one; skipped for greedy rows.
        needs_history: Reads ``context.tokens``.
        supports_branches: Reads them by ``context.histories``, so that several drafts may follow one token; matters with ``needs_history``.
            Without it the context has no branches, whatever the drafts of sequences that it does not apply to.
        speculation_safe: Correct for several logits rows of one sequence in one call: those of drafts, of which only the
            first few may come to count.
        has_state: Depends on state from ``commit``, beside parameters, history and position. The state is kept by position, so that it is
            rolled back with rejected tokens.
        honours: Parameters of requests that it applies, as :attr:`Sampler.honours` has them.
        rebuilds_state: ``start_row`` makes the same state anew from the tokens of a sequence, so that another engine may have chosen
            them.
    """

    name: str = ""
    argmax_invariant: bool = False
    needs_history: bool = False
    supports_branches: bool = False
    speculation_safe: bool = True
    has_state: bool = False
    honours: frozenset[str] = frozenset()
    rebuilds_state: bool = False

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse the arguments of a request that switches the processor on by ``name``. Pure; before it runs anywhere.

        The default takes none.

        Raises:
            InvalidRequestError: They are not what the processor takes.
        """
        if arguments:
            raise InvalidRequestError(
                f"logits_processors[{self.name!r}] = {dict(arguments)!r}: this processor takes no arguments.",
                field="logits_processors",
            )

    def check_params(self, params: SamplingParams) -> None:  # noqa: B027 - optional
        """Refuse parameters of a request that the processor cannot honour. Pure; before the request runs anywhere.

        Called for requests with structured output alone, in the engine's process and before ``allocate``. The default refuses none.

        Raises:
            InvalidRequestError: It cannot be honoured; the message says why.
        """

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether an affected sequence could start with a token that another engine chose. Pure; in the engine's process.

        Called before ``allocate``, or without it. The default: with any.

        Args:
            start: Start of the sequence, at the end of its prompt; its row means nothing.
            token_id: Token of the vocabulary; tokens that the parameters themselves exclude are not passed.
        """
        return True

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the processor changes a sequence's logits; ``apply`` is skipped for calls without such rows. Pure.

        The default: those whose request names the processor, and all if it has no name.
        """
        return not self.name or self.name in start.params.logits_processors

    @abstractmethod
    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences' state; called once, before anything else."""

    @abstractmethod
    def start_row(self, start: RowStart) -> None:
        """Take the parameters of a sequence that takes a row; forgets what the row held. Host work, once per admission."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Return changed logits, float32 ``[L, V]``; may work in place. Rows that it does not apply to stay bit-equal."""

    def commit(self, token_ids: torch.Tensor, context: SamplingContext) -> None:  # noqa: B027 - optional
        """Receives the tokens chosen from the logits of the last ``apply``; once for each, if ``has_state``.

        With drafts, tokens after the first one that differs from its draft were chosen in vain: the next call starts again from
        there, and what was kept for later positions must not matter then.

        Args:
            token_ids: int64 ``[L]`` on the device.
            context: Whose they are: that of ``apply``.
        """

    def snapshot(self, row: int) -> Any:
        """Return a copy of a row's state, for ``restore``; None without a state. Pure.

        A sequence that comes back to a row ends with an error if there is none, unless ``rebuilds_state``.
        """
        return None

    def restore(self, row: int, state: Any) -> None:  # noqa: B027 - optional
        """Give a row the state that ``snapshot`` returned, of this row or another; after its ``start_row``."""


class SupportsPreparation(ABC):
    """Capability of a sampler or a logits processor: some requests need work before they can run, such as compiling a grammar.

    Until it is done the request waits, counted among those that wait, and no other does.
    """

    @abstractmethod
    def prepare(self, params: SamplingParams, *, tenant: str) -> tuple[Future[Any], ...]:
        """Begin what a request needs before it can run. Called in the engine's process and on its thread, once for each request.

        Must return within a millisecond; the work is done elsewhere: by a thread that lets go of Python's lock, or a process. It should
        have a bound in time and memory, for a client says what it is.

        Args:
            params: Parameters of the request; ``check`` has passed them.
            tenant: Whose it is, so that the work of one need not hold up the work of others.

        Returns:
            Empty: nothing is needed. The request runs when all are done; the results are kept until it ends, so
            that :meth:`Sampler.start_row` finds what was prepared; the engine does not look at them. A ``RequestError`` as the exception
            refuses the request, any other fails it. Futures are cancelled if the request ends before.
        """


def _sampled(method: str, answer: Any, logits: torch.Tensor) -> Sampled:
    """Return what was sampled; the range of tokens is looked at where they are on the host, elsewhere by the backend once they are."""
    if not isinstance(answer, Sampled):
        raise ContractError(f"it returned {type(answer).__name__}, not Sampled")
    ids: Any = answer.token_ids
    num_rows, vocab_size = logits.shape
    if str(getattr(ids, "dtype", "")) != "torch.int64":
        raise ContractError(
            f"its token_ids are {getattr(ids, 'dtype', type(ids).__name__)}, not a tensor of torch.int64"
        )
    if tuple(ids.shape) != (num_rows,) or ids.device != logits.device:
        raise ContractError(
            f"its token_ids are {tuple(ids.shape)} on {ids.device}, not ({num_rows},) on {logits.device}"
        )
    if ids.device.type == "cpu" and num_rows:
        values: np.ndarray[Any, Any] = ids.numpy()
        # As unsigned numbers negative ones are the largest: one comparison instead of two.
        if np.maximum.reduce(values.view(np.uint64)) >= vocab_size:
            wrong = int(values[(values < 0) | (values >= vocab_size)][0])
            raise ContractError(f"it chose token {wrong}; the model knows 0 to {vocab_size - 1}")
    for error in answer.row_errors:
        if not isinstance(error, RowError) or type(error.index) is not int or not 0 <= error.index < num_rows:
            raise ContractError(f"it has an error of a row that is none of 0 to {num_rows - 1}")
    return answer


class Sampler(ABC):
    """Chooses tokens. Lives with the backend, in its process and on its thread.

    Attributes:
        honours: Which parameters of requests have their effect: names of groups or single parameters of
            ``trencadis.records.PARAMETER_GROUPS``. A request that asks for another one is refused before it runs anywhere. May be set
            when the sampler is made; constant afterwards. Must be stated: ``frozenset()`` if every request must have the defaults.
        isolates_rows: A promise: what concerns one row is reported in ``Sampled.row_errors`` and nothing is raised for it, and
            ``context.tokens`` is not written to. Without it the engine hands out copies, and finds the rows at fault by sampling each
            sequence alone after a call that raised.
    """

    honours: frozenset[str] = frozenset()
    isolates_rows: bool = False

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Called before ``allocate`` on devices where every new sequence of operations costs a compilation.

        From then on what ``sample`` runs on the device follows from the number of logits rows and from a *path*, nothing else;
        all rows of a call take one path.

        Returns:
            Parameters of a sequence for each path, so that a warm-up can take every path with rows that are all alike; empty,
            the default, if the sampler cannot promise this.
        """
        return ()

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that this sampler cannot honour. Pure; called in the engine's process, before ``allocate``.

        Called for every request that is not one of defaults, after :attr:`honours` was compared with it. The default refuses
        processors that requests name, and structured output.

        Raises:
            InvalidRequestError: A processor is named that there is not, or with arguments that it does not take; or the structure
                cannot be kept to.
        """
        if params.structured is not None:
            raise InvalidRequestError(
                f"structured output ({params.structured.kind}): this engine's sampler does not constrain tokens.",
                hint='Leave the field out, or ask the operator for [sampling] name = "standard".',
                field="structured",
            )
        if params.logits_processors:
            raise InvalidRequestError(
                f"logits_processors names {', '.join(params.logits_processors)}: this engine's sampler has no processors that a "
                "request may switch on.",
                hint='Leave the field out, or ask the operator for [sampling] name = "standard" and its processors.',
                field="logits_processors",
            )

    @abstractmethod
    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences' parameters and state; called once, before anything else."""

    @abstractmethod
    def start_row(self, start: RowStart) -> None:
        """Take the parameters of a sequence that takes a row; forgets what the row held before."""

    @abstractmethod
    @law(Law("a token of the vocabulary for each logits row, or an error of it", _sampled, ("logits",)))
    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Choose one token for each logits row.

        A row's token depends on its own logits, history, parameters, seed and position, and on nothing else in the batch.

        Args:
            logits: ``[L, V]`` in the model's dtype; may be overwritten.
            context: Whose they are.
        """

    def supports_drafts(self, params: SamplingParams, *, branching: bool) -> bool:
        """Return whether drafts of a sequence can be verified: several of its logits rows in one call. Pure; in the engine's process.

        A sequence without such support gets no drafts; one that supports no branching drafts gets linear ones.

        Args:
            params: Parameters of the sequence.
            branching: Two of the rows may be alternatives to each other: ``SamplingContext.branches`` is then given.
        """
        return not branching

    def is_portable(self, params: SamplingParams) -> bool:
        """Return whether an equal sampler of another engine may choose a sequence's first token. Pure.

        Later tokens must not depend on which engine chose it: parameters, seed and tokens determine them. Called in
        the engine's process, before ``allocate`` or without it. The default: False.
        """
        return False

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return whether a sequence that :meth:`is_portable` could start with a token. Pure; called as :meth:`is_portable`.

        Args:
            start: Start of the sequence, at the end of its prompt; its row means nothing.
            token_id: Token of the vocabulary; tokens that the parameters themselves exclude are not passed.
        """
        return True

    @law(Law("as of :meth:`sample`", _sampled, ("logits",)))
    def verify(
        self, logits: torch.Tensor, context: SamplingContext, choose: Callable[[Distributions], torch.Tensor]
    ) -> Sampled:
        """Let an acceptance rule choose from the distributions that :meth:`sample` would draw from.

        Only called for rules that need distributions, if the component provides ``sampling.distributions``.

        Args:
            logits: ``[L, V]`` in the model's dtype; may be overwritten.
            context: Whose they are.
            choose: Called once; returns a token for each logits row, int64 ``[L]``. They are reported and committed as sampled ones.
        """
        raise NotImplementedError(f"{type(self).__name__} does not provide sampling.distributions")
