"""One output of a step that several ranks answered."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.records import StepOutput
from trencadis_plugins.executor.ranks.executor import _Answers, _RanksStep
from trencadis_plugins.executor.ranks.link import Kind
from trencadis_plugins.executor.ranks.wire import encode_output


class Waits:
    """An executor whose ranks have answered."""

    def wait_for(self, answers):
        assert answers.are_complete


@pytest.mark.parametrize("compiled", [(0, 0), (2, 0), (0, 3), (2, 2)])
def test_programs_are_counted_that_any_rank_compiled_and_all_else_is_of_the_output_rank(compiled):
    answers = _Answers(number=1, num_ranks=2, since_s=0.0)
    for rank, number in enumerate(compiled):
        tokens = np.array([7] if rank == 0 else [], np.int32)
        output = StepOutput(token_ids=tokens, num_emitted=np.array([len(tokens)], np.int32), num_compilations=number)
        answers.by_rank[rank] = Kind.OUTPUT, encode_output(output, None)
    found = _RanksStep(Waits(), answers, output_rank=0).wait()
    assert found.num_compilations == sum(compiled)
    assert found.token_ids.tolist() == [7]
