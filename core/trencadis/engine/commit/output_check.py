"""Checks what a step brings back before anything of it counts.

A backend or an executor that returns something else than its batch's output fails that step, and the error names both. A wrong token
would be committed, cached and served otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from trencadis.engine.sampling.logprobs import are_whole, wrong_logprobs
from trencadis.engine.stage import Stages
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ContractError, StepFailedError
from trencadis.faults import as_words, reraise_interrupt, shown
from trencadis.interfaces import PendingStep
from trencadis.records import Plan, RowError, StepOutput, TokenLogprobs

__all__ = ["FailedStep", "OutputCheck"]


class FailedStep(PendingStep):
    """A step that could not be submitted; ``wait`` raises why.

    Args:
        error: The exception that ``submit`` raised.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        """Raise the error."""
        raise self._error


class OutputCheck:
    """Waits for the steps of one engine and checks their outputs.

    A check costs a few vectorised operations over the tokens of the step, some microseconds; log-probabilities cost what there are of
    them.

    Args:
        vocab_size: Tokens that the model knows.
        label: Names executor and backend in messages.
        stages: They check what they read of an output.
    """

    def __init__(self, *, vocab_size: int, label: str = "the executor", stages: Stages | None = None) -> None:
        self._vocab_size = vocab_size
        self._label = label
        self._stages = stages or Stages()
        self._newest: StepOutput | None = None

    def output_of(self, step: SubmittedStep) -> StepOutput:
        """Return a step's output; blocks until the step is done.

        Raises:
            StepFailedError: The step raised, or what came back is not its output; names executor and backend.
        """
        plan = step.plan
        try:
            output = step.pending.wait()
            fault = "" if self._is_plain(plan, output) else self._fault(plan, output)
            for fault_in in self._stages.fault_in:
                fault = fault or fault_in(output)
        except StepFailedError:
            raise
        except BaseException as error:  # an executor may hand on what a backend raised in a thread of its own
            reraise_interrupt(error)
            raise StepFailedError(f"{self._label} raised {as_words(error)}") from error
        if fault:
            cause = ContractError(f"the output of step {plan.step} {fault}")
            raise StepFailedError(f"{self._label}: {cause}.", hint=_HINT) from cause
        self._newest = output
        return output

    def _is_plain(self, plan: Plan, output: StepOutput) -> bool:
        """Return whether an output has one right token wherever the plan says, and nothing else that could be wrong.

        Nearly all have: of those :meth:`_fault` would find no fault with more work. Of the others it is to look.
        """
        if type(output) is not StepOutput or output is self._newest or output.step != plan.step:
            return False
        counts, tokens = output.num_emitted, output.token_ids
        if not (type(counts) is type(tokens) is np.ndarray and counts.dtype is tokens.dtype is _INT32):
            return False
        samples = plan.samples.tobytes()
        if not (counts.ndim == tokens.ndim == 1 and 0 < len(tokens) == samples.count(1)):
            return False
        if output.row_errors or output.logprobs or output.prompt_logprobs:
            return False
        # Compared as bytes: equal arrays of one type, at a tenth of the price of comparing short arrays element by element.
        if counts.tobytes() != plan.samples.astype(_INT32).tobytes():
            return False
        unsigned = tokens.view(np.uint32)
        numbers = type(output.num_padded_tokens) is type(output.num_compilations) is int
        return (
            unsigned[unsigned.argmax()] < self._vocab_size
            and type(output.device_s) is float
            and 0.0 <= output.device_s < math.inf
            and numbers
            and output.num_padded_tokens >= 0
            and output.num_compilations >= 0
        )

    def _fault(self, plan: Plan, output: StepOutput) -> str:
        """Return what is wrong with an output, or an empty string."""
        if not isinstance(output, StepOutput):
            return f"is {shown(output)}, not a StepOutput"
        if output is self._newest or output.step not in (plan.step, -1):
            return f"is that of step {output.step}, which came back before"
        counts, tokens = output.num_emitted, output.token_ids
        for name, array in (("num_emitted", counts), ("token_ids", tokens)):
            if type(array) is not np.ndarray or array.dtype != np.int32 or array.ndim != 1:
                return f"has {name} = {shown(array)}, which must be an int32 array of one dimension"
        return (
            self._wrong_counts(plan, output)
            or self._wrong_tokens(output)
            or self._wrong_numbers(output)
            or (self._wrong_logprobs(plan, output) if output.logprobs or output.prompt_logprobs else "")
        )

    def _wrong_counts(self, plan: Plan, output: StepOutput) -> str:
        counts, least = output.num_emitted, plan.samples
        if len(counts) != len(least):
            return f"counts tokens of {len(counts)} sequences, and the step has {len(least)}"
        if output.row_errors:
            fault = _wrong_errors(plan, output.row_errors)
            if fault:
                return fault
            least = least.copy()
            least[[one.index for one in output.row_errors]] = False
        most = least * (1 + plan.num_to_verify)
        wrong = (counts < least) | (counts > most)
        if np.logical_or.reduce(wrong):
            i = int(wrong.argmax())
            return (
                f"has {counts[i]} tokens for sequence {i} of the step, which yields {int(least[i])} to {int(most[i])}"
            )
        total = int(np.add.reduce(counts))
        return "" if total == len(output.token_ids) else f"has {len(output.token_ids)} tokens and counts {total}"

    def _wrong_tokens(self, output: StepOutput) -> str:
        tokens = output.token_ids
        # As unsigned numbers negative ones are the largest: one comparison instead of two.
        if not len(tokens) or np.maximum.reduce(tokens.view(np.uint32)) < self._vocab_size:
            return ""
        wrong = int(tokens[(tokens < 0) | (tokens >= self._vocab_size)][0])
        return f"has token {wrong}; the model knows 0 to {self._vocab_size - 1}"

    @staticmethod
    def _wrong_numbers(output: StepOutput) -> str:
        if not 0.0 <= output.device_s < math.inf:
            return f"has device_s = {shown(output.device_s)}, which must be a finite number of seconds"
        for name in ("num_padded_tokens", "num_compilations"):
            number = getattr(output, name)
            if not isinstance(number, int) or number < 0:
                return f"has {name} = {shown(number)}, which must be a whole number from 0 on"
        return ""

    def _wrong_logprobs(self, plan: Plan, output: StepOutput) -> str:
        for name in ("logprobs", "prompt_logprobs"):
            for entry in getattr(output, name):
                fault = self._wrong_entry(entry, plan.num_sequences)
                if fault:
                    return f"has an entry of {name} {fault}: {shown(entry)}"
        return ""

    def _wrong_entry(self, entry: TokenLogprobs, num_sequences: int) -> str:
        if not isinstance(entry, TokenLogprobs):
            return "that is no TokenLogprobs"
        if not are_whole((entry.position,), 1 << 31):
            return "whose position is no whole number from 0 on"
        return wrong_logprobs(entry, end=num_sequences, vocab_size=self._vocab_size)


_INT32 = np.dtype(np.int32)

_HINT = "Run the conformance suite of executor and backend (trencadis_testing), or choose others."


def _wrong_errors(plan: Plan, errors: tuple[RowError, ...]) -> str:
    for one in errors:
        if not isinstance(one, RowError) or not isinstance(one.message, str):
            return f"has {shown(one)} among its row_errors, which is no RowError"
        if not are_whole((one.index,), plan.num_sequences):
            return f"has an error of sequence {shown(one.index)}, and the step has {plan.num_sequences}"
    return ""
