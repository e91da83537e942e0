from __future__ import annotations

import numpy as np
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.batching.passes import unified_shape
from trencadis.records import UnifiedShape
from trencadis_testing.shapes import unified_shape_of


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def test_shape_of_the_worked_example() -> None:
    """Blocks of four tokens; two decodes that share block 7, and a prompt chunk of three tokens behind block 9."""
    tables = np.array([[7, 2], [7, 3], [9, 4]], np.int32)
    assert unified_shape(ints([5, 6, 4]), ints([1, 1, 3]), tables, block_size=4) == UnifiedShape(5, 2, 4, True)


def test_decode_reads_the_block_that_its_token_begins_and_a_prompt_does_not() -> None:
    tables = np.array([[5, 8, 30]], np.int32)
    assert unified_shape(ints([4]), ints([1]), tables, block_size=4) == UnifiedShape(1, 0, 9, False)
    assert unified_shape(ints([4]), ints([2]), tables, block_size=4) == UnifiedShape(2, 1, 0, True)
    assert unified_shape(ints([0]), ints([9]), tables, block_size=4) == UnifiedShape(9, 0, 0, True)


@settings(max_examples=150, phases=(Stage.explicit, Stage.generate))
@given(st.data())
def test_shape_equals_a_count_block_by_block(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 4]))
    sequences = data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=5)
    )
    width = -(-max(start + length for start, length in sequences) // size)
    # Few ids, so that blocks are shared; an engine gives no sequence a block twice.
    pool = st.permutations(range(width + 6))
    tables = [data.draw(pool)[: width + 1] for _ in sequences]
    starts, lengths = (ints(list(part)) for part in zip(*sequences, strict=True))
    expected = unified_shape_of(starts.tolist(), lengths.tolist(), tables, block_size=size)
    assert unified_shape(starts, lengths, np.array(tables, np.int32), block_size=size) == expected
