from __future__ import annotations

import runpy
from typing import Any

from trencadis_server.protocol.fields import other_fields
from trencadis_server.protocol.fields_page import ENDPOINTS, fields_page


def test_every_field_of_every_endpoint_is_on_the_page_with_a_note() -> None:
    sections = fields_page().split("\n## ")[1:]
    for section, (route, model) in zip(sections, ENDPOINTS.items(), strict=True):
        assert section.startswith(f"{route}\n")
        rows = [row.strip("|").split(" | ") for row in section.splitlines() if row.startswith("| `")]
        names = [row[0].strip(" `") for row in rows]
        assert names == [*model.model_fields, *other_fields(model.endpoint)]
        assert all(row[2].strip() for row in rows if row[0].strip(" `") != "audio")


def test_the_page_says_what_makes_a_field_harmless() -> None:
    page = fields_page()
    assert '| `tools` | refused unless `[]` or with `tool_choice` = `"none"` | Tool calls are not parsed. |' in page
    assert "| `metadata` | ignored | It labels stored answers, and none is stored. |" in page
    assert "| `messages` | required |" in page


def test_the_module_writes_the_page(capsys: Any) -> None:
    runpy.run_module("trencadis_server.protocol", run_name="__main__")
    assert capsys.readouterr().out == fields_page()
