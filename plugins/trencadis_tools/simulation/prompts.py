"""Engine requests of a workload, for simulated devices: tokens are equal exactly where the workload says that contents are.

Requests for real models are made by :class:`trencadis_tools.workloads.Prompts`, which draws from a model's vocabulary: there blocks of a
few tokens may be equal by chance. Here every block and every request has a token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.records import FinishedSequence, Request, SamplingParams, evolve_unchecked
from trencadis_tools.workloads.workload import Workload

__all__ = ["SimulatedPrompts"]


_REQUEST = Request(request_id="", prompt_token_ids=(0,), cache_salt="")  # what is shared, the workload says alone


class SimulatedPrompts:
    """Makes the requests of a workload. Pure: the same workload gives the same tokens on every machine.

    Token 0 ends texts. The text of request i is the token ``i + 2``, and so are the tokens of its prompt that no other shares; blocks that requests
    share have tokens after those.

    Args:
        workload: The requests.
    """

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._block_tokens = workload.block_tokens
        self._params: dict[int, SamplingParams] = {}  # by longest answer; to check them takes longer than a step
        self._longest = max(one.num_output_tokens for one in workload.requests)
        self._index_of = {one.request_id: index for index, one in enumerate(workload.requests)}
        numbers: dict[int, int] = {}
        for one in workload.requests:
            for block in one.block_ids:
                numbers.setdefault(block, len(numbers))
        self._token_of = {block: len(self._requests) + 2 + number for block, number in numbers.items()}
        self.vocab_size = len(self._requests) + 2 + len(numbers)

    def request(self, index: int, before: Sequence[int] = ()) -> Request:
        """Return a request as it is sent.

        Args:
            index: In the workload.
            before: Tokens of prompt and answer that it continues.
        """
        asked = self._requests[index]
        if asked.continues:
            previous = self._requests[self._index_of[asked.after]]
            tokens = tuple(before)
            length = len(tokens) + asked.num_prompt_tokens - previous.num_prompt_tokens - previous.num_output_tokens
        else:
            shared, length = [], asked.num_prompt_tokens
            for block in asked.block_ids:
                shared += [self._token_of[block]] * self._block_tokens
            tokens = tuple(shared[:length])
        tokens += (index + 2,) * (length - len(tokens))
        most = asked.max_tokens or self._longest
        params = self._params.get(most)
        if params is None:
            params = self._params[most] = SamplingParams(max_tokens=most)
        return evolve_unchecked(
            _REQUEST,
            request_id=asked.request_id,
            prompt_token_ids=tokens,
            params=evolve_unchecked(params, seed=index),
            priority=asked.priority,
            tenant=asked.tenant,
            ttft_target_s=asked.ttft_target_s,
            tpot_target_s=asked.tpot_target_s,
        )

    def text(self, request: Request, end: FinishedSequence) -> Sequence[int]:
        """Return prompt and answer."""
        return (*request.prompt_token_ids, *end.token_ids.tolist())
