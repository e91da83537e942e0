from __future__ import annotations

import ssl

import pytest

from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.config import RedisAddress
from trencadis_kv.connectors.redis.resp import ProtocolError, ServerError
from trencadis_kv.connectors.redis.store import transfer_error

ADDRESS = RedisAddress(host="there")


@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", TransferCause.FULL, "allkeys-lfu"),
        ("WRONGPASS invalid username-password pair", TransferCause.UNREACHABLE, "kv_connector.redis.password"),
        ("NOAUTH Authentication required.", TransferCause.UNREACHABLE, "kv_connector.redis.password"),
        ("NOPERM this user has no permissions", TransferCause.UNREACHABLE, "needs ping"),
        ("READONLY You can't write against a read only replica.", TransferCause.UNREACHABLE, "primary"),
        ("MASTERDOWN Link with MASTER is down", TransferCause.UNREACHABLE, "primary"),
        ("LOADING Redis is loading the dataset in memory", TransferCause.UNREACHABLE, "LOADING"),
        ("MISCONF Redis is configured to save RDB snapshots", TransferCause.UNREACHABLE, "save ''"),
        ("MOVED 3999 127.0.0.1:6381", TransferCause.UNREACHABLE, "cluster"),
        ("ERR max number of clients reached", TransferCause.UNREACHABLE, "max number"),
        ("ERR unknown command 'UNLINK'", TransferCause.RAISED, "unknown command"),
    ],
)
def test_answer_of_the_server_becomes_a_cause_and_a_remedy(text: str, cause: TransferCause, says: str) -> None:
    error = transfer_error(ServerError(text), ADDRESS)
    assert error.cause == cause
    assert says in str(error)
    assert str(ADDRESS) in str(error)


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (TimeoutError("timed out"), TransferCause.DEADLINE),
        (ConnectionRefusedError("refused"), TransferCause.UNREACHABLE),
        (ConnectionError("the server ended the connection"), TransferCause.UNREACHABLE),
        (ssl.SSLCertVerificationError("self-signed certificate"), TransferCause.UNREACHABLE),
        (ProtocolError("b'X' is no number"), TransferCause.CORRUPT),
    ],
)
def test_fault_of_the_connection_becomes_a_cause(raised: Exception, cause: TransferCause) -> None:
    assert transfer_error(raised, ADDRESS).cause == cause


def test_end_that_we_made_ourselves_is_no_fault_of_the_server() -> None:
    assert transfer_error(OSError("bad"), ADDRESS, is_interrupted=True).cause == TransferCause.CANCELLED
