from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_gallery.bucketing.workloads.trace import Arrival, parse_trace, read_text

TRACES = Path(__file__).parents[5] / "shared" / "data" / "traces"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azure_rows_become_arrivals_counted_from_the_first():
    text = f"{HEAD}2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    first, second = parse_trace(text, "a.csv")
    assert first == Arrival(0.0, 374, 44)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_lines_become_arrivals():
    text = (
        '{"timestamp": 5000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n\n'
        '{"timestamp": 27482, "input_length": 9, "output_length": 3, "hash_ids": []}\n'
    )
    assert parse_trace(text, "m.jsonl") == (Arrival(0.0, 7, 2), Arrival(22.482, 9, 3))


@pytest.mark.parametrize("stamp", ["2024-05-10 00:00:00.009930+00:00", "2024-05-10T00:00:00Z", "2024-05-10 00:00:00"])
def test_other_ways_to_write_a_time_are_read(stamp):
    assert parse_trace(f"{HEAD}{stamp},1,1\n", "a.csv") == (Arrival(0.0, 1, 1),)


def test_requests_without_tokens_are_left_out():
    text = f"{HEAD}2023-11-16 18:00:00,0,4\n2023-11-16 18:00:01,4,0\n2023-11-16 18:00:02,5,1\n"
    assert parse_trace(text, "a.csv") == (Arrival(0.0, 5, 1),)


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such trace file"):
        read_text(tmp_path / "nope.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("name", "num_requests", "mean_prompt"),
    [("azure_llm_2023_conv.csv", 19366, 1155), ("azure_llm_2023_code.csv", 8819, 2048)],
)
def test_public_traces_have_their_known_size_and_mean(name, num_requests, mean_prompt):
    file = TRACES / name
    if not file.exists():
        pytest.skip(f"{file} is not there: the shared data folder is not part of the repository")
    rows = parse_trace(read_text(file), name)
    assert len(rows) == num_requests
    assert sum(row.num_prompt_tokens for row in rows) / len(rows) == pytest.approx(mean_prompt, abs=1)
