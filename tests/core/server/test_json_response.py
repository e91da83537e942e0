from __future__ import annotations

from trencadis.server.json_response import json_response
from trencadis.server.protocol.answers import Version


def test_a_record_is_a_json_object() -> None:
    response = json_response(Version(version="1"))
    assert (response.status_code, response.media_type, response.body) == (200, "application/json", b'{"version":"1"}')
