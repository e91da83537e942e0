from __future__ import annotations

import runpy
from typing import Any

from trencadis_server.protocol.fields_page import fields_page


def test_the_module_writes_the_page(capsys: Any) -> None:
    runpy.run_module("trencadis_server.protocol", run_name="__main__")
    assert capsys.readouterr().out == fields_page()
