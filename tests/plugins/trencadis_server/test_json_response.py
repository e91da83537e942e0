from __future__ import annotations

from trencadis_server.protocol.answers import Version
from trencadis_server.protocol.json_response import json_response


def test_a_record_is_a_json_object() -> None:
    response = json_response(Version(version="1"))
    assert (response.status_code, response.media_type, response.body) == (200, "application/json", b'{"version":"1"}')
