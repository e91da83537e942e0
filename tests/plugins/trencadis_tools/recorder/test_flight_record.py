from __future__ import annotations

import zlib

import pytest

from support.replays import record_of, recording_engine, serve_at_random
from trencadis.errors import ConfigError
from trencadis_tools.recorder.flight_record import decode_flight_record, encode_flight_record


@pytest.fixture(scope="module")
def data():
    engine = recording_engine(config={"flight_recorder.num_steps": 8})
    serve_at_random(engine, 1, num_rounds=30)
    return encode_flight_record(record_of(engine))


def test_a_file_gives_back_its_record(data):
    record = decode_flight_record(data)
    assert record.frame is not None
    assert decode_flight_record(encode_flight_record(record)).events == record.events


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda data: b"", "is no flight record"),
        (lambda data: b"PK\x03\x04" + data, "is no flight record"),
        (
            lambda data: data.replace(b"FLIGHT 2\n", b"FLIGHT 1\n", 1),
            "is a flight record of version 1; this Trencadís reads version 2",
        ),
        (lambda data: data[:-9], "is damaged: .*it is cut off"),
        (lambda data: data[:400] + bytes(9) + data[409:], "is damaged"),
        (lambda data: data[: data.index(b"\n") + 1] + zlib.compress(b"\x01"), "is damaged"),
    ],
)
def test_what_is_no_record_is_refused_in_words(data, spoil, cause):
    with pytest.raises(ConfigError, match=cause) as refused:
        decode_flight_record(spoil(data), name="x.flight")
    assert str(refused.value).startswith("x.flight ")
    assert refused.value.hint
