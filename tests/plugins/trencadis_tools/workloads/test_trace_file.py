from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.workloads import builtin_names, trace_file


def test_a_built_in_name_stands_for_its_trace_and_a_path_for_itself() -> None:
    found = trace_file("mooncake_conversation")
    assert found.name == "mooncake_fast25_conversation_first30min.jsonl.xz"
    assert found.is_file()
    assert trace_file("some/trace.csv") == Path("some/trace.csv")


def test_a_workload_without_a_trace_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(
        ConfigError, match=r"poisson: a workload without a trace\. Those with one: azure_code, azure_conv, "
    ):
        trace_file("poisson")
    assert "poisson" in builtin_names()
