from __future__ import annotations

import pytest

from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.connector import ABSENT, EXISTS, FULL, transfer_error


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-900, TransferCause.UNREACHABLE),
        (-901, TransferCause.UNREACHABLE),
        (-1010, TransferCause.UNREACHABLE),
        (-1, TransferCause.RAISED),
        (-400, TransferCause.RAISED),
        (-1100, TransferCause.RAISED),
    ],
)
def test_code_has_a_cause(code, cause):
    error = transfer_error(code, "h:1")
    assert error.cause == cause
    assert str(code) in str(error)


def test_master_that_does_not_answer_is_named_with_what_to_do():
    error = transfer_error(-900, "10.0.0.7:50051")
    assert "10.0.0.7:50051" in str(error)
    assert "kv_connector.mooncake.master" in error.hint


def test_objects_that_are_not_to_be_had_are_no_errors():
    assert {-704, -707, -800} <= ABSENT
    assert not ABSENT & {FULL, EXISTS, -706, -900}
