from __future__ import annotations

import json

import pytest

from trencadis_server.batch.lines import BadLineError, OutputLine, encode, line_id, read_line

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "x"}}


def line(**changes):
    return json.dumps({**GOOD, **changes}).encode()


def test_a_good_line_keeps_its_body_as_it_stands():
    text = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"x":  1.50, "y": 12345678901234567890}}\n'
    found = read_line(text, 1)
    assert (found.custom_id, found.url) == ("a", "/v1/embeddings")
    assert bytes(found.body) == b'{"x":  1.50, "y": 12345678901234567890}'


@pytest.mark.parametrize(
    ("text", "code", "words", "custom_id"),
    [
        (b"not json", "invalid_line", "line 7", None),
        (b'{"custom_id": "a"}', "invalid_line", "method", "a"),
        (b'{"custom_id": 5, "method": "POST"}', "invalid_line", "line 7", None),
        (b"[1]", "invalid_line", "line 7", None),
        (b"\xff\xfe", "invalid_line", "line 7", None),
        (b"[" * 100_000, "invalid_line", "line 7", None),
        (line(method="GET"), "invalid_method", "'GET'", "a"),
        (line(url="/v1/models"), "invalid_url", "/v1/chat/completions", "a"),
        (line(body=[1]), "invalid_body", "no JSON object", "a"),
        (line(body={"stream": True}), "invalid_body", "does not stream", "a"),
    ],
)
def test_a_bad_line_is_named_by_its_number(text, code, words, custom_id):
    with pytest.raises(BadLineError, match=r"^line 7: ") as refused:
        read_line(text, 7)
    assert (refused.value.code, refused.value.custom_id) == (code, custom_id)
    assert words in str(refused.value)


def test_the_id_depends_on_the_line_and_its_number_alone():
    assert line_id(b"x\n", 1) == line_id(b" x", 1)
    assert len({line_id(b"x", 1), line_id(b"x", 2), line_id(b"y", 1), line_id(b":x", 1)}) == 4


def test_output_lines_have_openais_shape():
    answered = OutputLine.answered("batch_req_1", "a", status=200, request_id="req_1", body=b'{"x": 1}')
    assert json.loads(encode(answered)) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"x": 1}},
        "error": None,
    }
    refused = OutputLine.refused("batch_req_2", BadLineError("invalid_line", "line 2: no"))
    assert json.loads(encode(refused)) == {
        "id": "batch_req_2",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_line", "message": "line 2: no"},
    }
    failed = OutputLine.answered("batch_req_3", "c", status=400, request_id="", body=b"{}")
    assert [one.is_ok for one in (answered, refused, failed)] == [True, False, False]
