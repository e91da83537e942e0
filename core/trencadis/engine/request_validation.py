"""The door of the engine: who may come in, and who is turned away."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trencadis.engine.request_check import check_request
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.stage import SamplingRules
from trencadis.engine.state import EngineState
from trencadis.errors import (
    ContinuationError,
    InvalidRequestError,
    RequestRefusedError,
)
from trencadis.records import ModelFacts, Request

__all__ = ["RequestValidator"]


class RequestValidator:
    """Validates requests before they are queued.

    Args:
        state: The engine's state, read only.
        policy: The guarded scheduling policy, which has the admission control.
        model: The loaded model.
        sampling: Says what the sampler can do for a request.

    Attributes:
        model: The loaded model.
        sampling: The argument.
    """

    def __init__(
        self,
        state: EngineState,
        policy: GuardedScheduling,
        model: ModelFacts,
        sampling: SamplingRules,
    ) -> None:
        self._state = state
        self._policy = policy
        self.model = model
        self.sampling = sampling

    def admit(
        self,
        request: Request,
        accept: Iterable[Callable[[Request], Request]],
        accept_last: Iterable[Callable[[Request], Request]],
    ) -> Request:
        """Return a request as it will run.

        Args:
            request: The request as it came.
            accept: Stages complete or refuse it.
            accept_last: The same, for what costs something.

        Raises:
            RequestError: See :meth:`check` and :meth:`ask`, or a stage refuses it.
            StepFailedError: See :meth:`ask`.
        """
        self.check(request)
        for act in accept:
            request = act(request)
        if request.output_token_ids is None:  # else another engine has accepted it
            self.ask(request)
        for act in accept_last:
            request = act(request)
        return request

    def check(self, request: Request) -> None:
        """Raise unless the engine can serve the request.

        Raises:
            PromptTooLongError: The prompt leaves no room for one output token.
            InvalidRequestError: An empty prompt, a token id outside the vocabulary, or an id that is live.
            ContinuationError: Another engine has begun it, and its parameters do not let it go on here.
        """
        if request.request_id in self._state.slot_of:
            raise InvalidRequestError(
                f"request {request.request_id!r} is live already.", hint="Choose another request id."
            )
        check_request(
            request,
            vocab_size=self.model.vocab_size,
            max_model_len=self._state.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
        )
        self.sampling.check(request.params)
        if request.output_token_ids and not self.sampling.is_portable(request.params):
            raise ContinuationError(
                f"request {request.request_id!r}: its engine has ended, and no other can go on with it: its sampling parameters depend "
                "on more than its tokens, as mirostat_mode and some logits processors do.",
                hint="Send it again.",
            )

    def ask(self, request: Request) -> None:
        """Raise unless the policy accepts the request.

        Raises:
            RequestRefusedError: The policy's admission control said no.
            StepFailedError: The policy failed, and there is no fallback.
        """
        state = self._state
        num_waiting, num_tokens = state.waiting_of(request)
        refusal = self._policy.admit(
            request, num_waiting=state.num_queued, num_waiting_tokens=state.num_waiting_tokens
        ) or self._policy.admit_tenant(request, num_waiting=num_waiting, num_waiting_tokens=num_tokens)
        if refusal:
            raise RequestRefusedError(f"request {request.request_id!r} was refused: {refusal}.")
