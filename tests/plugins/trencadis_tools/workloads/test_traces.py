"""Each format by a few rows as its publisher writes them."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_gallery.bucketing.workloads.formats import FORMATS
from trencadis_tools.workloads.traces import Trace, TraceSource, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURSTGPT_HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT = (
    f"{BURSTGPT_HEAD}5,7,2.5,ChatGPT,472,18,490,Conversation log\n45,,9.0,GPT-4,1087,230,1317,API log\n"
    "60,7,1.0,ChatGPT,500,12,512,Conversation log\n"
)
SERVEGEN_HASHED = {"request_id": 3, "type": "text", "input_length": 40, "hash_ids": [5, 6, 9], "img_ids": []}
SERVEGEN_SIZED = {"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370, "duration": 14000}
BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 13, "type": "text", "turn": 1, "hash_ids": [89, 90, 91]},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 50, "output_length": 8, "type": "search", "turn": 2, "hash_ids": [89, 90, 92, 93]},
    {"chat_id": 161, "parent_chat_id": -1, "timestamp": 63.0, "input_length": 9, "output_length": 8, "type": "text", "turn": 1, "hash_ids": [94]},
]  # fmt: skip


@pytest.fixture
def read(tmp_path: Path):
    """``read(text or rows, **keys of [trace])``."""

    def run(content: str | list, **keys) -> Trace:
        file = tmp_path / "trace"
        file.write_text(content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content))
        return read_trace(TraceSource(file=str(file), **keys))

    return run


def test_azure(read) -> None:
    first, second = read(AZURE).requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert (first.tenant, first.priority, first.session, first.after, first.block_ids) == ("default", 0, "", "", ())


def test_azure_with_images_counts_them_as_tokens_or_is_refused(read) -> None:
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:01,2,100,5\n2024-10-15 00:00:02,0,7,5\n"
    assert [one.num_prompt_tokens for one in read(text, image_tokens=576).requests] == [1252, 7]
    assert [one.num_prompt_tokens for one in read(text, ignore=("NumImages",)).requests] == [100, 7]


def test_burstgpt_has_tenants_by_model_and_conversations_as_closed_loops(read) -> None:
    first, third, second = sorted(read(BURSTGPT).requests, key=lambda one: (one.session != "7", one.request_id))
    assert (first.tenant, second.tenant) == ("ChatGPT/Conversation log", "GPT-4/API log")
    assert (third.after, third.think_s, third.arrival_s) == (first.request_id, 60 - 7.5, 0.0)
    assert not third.continues, "its prompt has a length of its own"
    assert (second.arrival_s, second.session, second.after) == (40.0, "", "")
    opened = read(BURSTGPT, sessions="open").requests
    assert [(one.arrival_s, one.session, one.after) for one in opened] == [(0, "7", ""), (40, "", ""), (55, "7", "")]


def test_failed_requests_are_refused_dropped_or_given_a_token(read) -> None:
    text = f"{BURSTGPT_HEAD}5,,2.5,ChatGPT,472,0,472,API log\n6,,2.5,ChatGPT,4,1,5,API log\n"
    assert [one.num_output_tokens for one in read(text, failed="drop").requests] == [1]
    assert [one.num_output_tokens for one in read(text, failed="one_token").requests] == [1, 1]


def test_mooncake_has_blocks_of_512_tokens(read) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 27482, "input_length": 9, "output_length": 3, "hash_ids": []},
    ]
    trace = read(rows)
    assert trace.block_tokens == 512
    assert [one.block_ids for one in trace.requests] == [(1, 2), ()]
    assert trace.requests[1].arrival_s == pytest.approx(22.482)
    assert not any(one.block_ids for one in read(rows, ignore=("hash_ids",)).requests)


def test_sessions_of_aiperf_go_on_from_the_answer_before_after_their_delay(read) -> None:
    rows = [
        {"session_id": "a", "input_length": 300, "output_length": 40},
        {"session_id": "b", "input_length": 100, "output_length": 10},
        {"session_id": "a", "delay": 2500, "input_length": 150, "output_length": 20},
    ]
    first, other, second = read(rows).requests
    assert (second.after, second.think_s, second.continues) == (first.request_id, 2.5, True)
    assert second.num_prompt_tokens == 300 + 40 + 150
    assert (first.session, other.session, other.after) == ("a", "b", "")
    whole = [
        row | {"context_mode": "message_array_with_responses", "hash_ids": [number]} for number, row in enumerate(rows)
    ]
    first, _, second = read(whole).requests
    assert (second.after, second.num_prompt_tokens, second.block_ids, second.continues) == (
        first.request_id,
        150,
        (2,),
        False,
    )


def test_texts_are_counted_by_their_characters_if_it_is_said_how(read) -> None:
    rows = [{"text_input": "x" * 10, "output_length": 4}]
    assert read(rows, chars_per_token=4.0).requests[0].num_prompt_tokens == 3
    turns = [{"session_id": "s", "turns": [{"text": "x" * 8}, {"text": "y" * 4, "delay": 1000}]}]
    first, second = read(turns, chars_per_token=4.0).requests
    assert (second.after, second.think_s) == (first.request_id, 1.0)
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (2, 2 + 1 + 1)
    assert not read(turns, chars_per_token=4.0).has_outputs
    assert read([{"text": "abcd", "output_length": 2}], chars_per_token=4.0).requests[0].num_prompt_tokens == 1


def test_servegen_has_no_times_and_blocks_of_16_tokens_or_lengths(read) -> None:
    trace = read([SERVEGEN_HASHED])
    assert (trace.has_times, trace.has_outputs, trace.block_tokens) == (False, False, 16)
    assert trace.requests[0].block_ids == (5, 6, 9)
    assert trace.requests[0].request_id == "3"
    trace = read([SERVEGEN_SIZED])
    assert (trace.has_times, trace.has_outputs) == (False, True)


def test_bailian_has_conversations_by_their_parents_types_as_tenants_and_open_times(read) -> None:
    first, second, third = read(BAILIAN).requests
    assert [one.session for one in (first, second, third)] == ["159", "159", ""]
    assert [one.tenant for one in (first, second, third)] == ["text", "search", "text"]
    assert second.arrival_s == pytest.approx(1.386)
    assert (second.after, second.block_ids) == ("", (89, 90, 92, 93))


def dynamo(session: str, received_ms: int, total_ms: float, number: int, parent: str = "") -> dict:
    context = {"session_id": session} | ({"parent_session_id": parent} if parent else {})
    replay = {"trace_block_size": 16, "input_length": 20, "input_sequence_hashes": [2**64 - 9, number]}
    request = {
        "request_id": f"r{number}",
        "model": "Qwen",
        "input_tokens": 20,
        "output_tokens": 3,
        "cached_tokens": 0,
        "request_received_ms": received_ms,
        "total_time_ms": total_ms,
        "ttft_ms": 5.0,
        "replay": replay,
    }
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "agent_context": context}
    return {"timestamp": received_ms, "event": event | {"request": request}}


def test_dynamos_agents_wait_for_their_own_answers_and_for_those_of_agents_that_they_started(read) -> None:
    tool = {
        "timestamp": 1,
        "event": {"event_type": "tool_end", "agent_context": {"session_id": "root"}, "tool": {"status": "ok"}},
    }
    rows = [
        dynamo("root", 1000, 500.0, 1),
        tool,
        dynamo("scout", 1600, 1000.0, 2, parent="root"),
        dynamo("reader", 1650, 2000.0, 3, parent="root"),
        dynamo("root", 4000, 100.0, 4),
    ]
    one, two, three, four = read(rows).requests
    assert [request.after for request in (one, two, three, four)] == ["", "r1", "r1", "r3"]
    assert [request.think_s for request in (two, three, four)] == pytest.approx([0.1, 0.15, 0.35])
    assert {request.arrival_s for request in (one, two, three, four)} == {0.0}
    assert (one.block_ids, one.tenant) == ((2**64 - 9, 1), "Qwen")


def test_columns_that_a_workload_has_count_in_every_format(read) -> None:
    head, *rows = AZURE.splitlines()
    text = "\n".join([f"{head},tenant,priority,max_tokens,ttft_target_s", f"{rows[0]},team,2,64,0.5", f"{rows[1]},,,,"])
    first, second = read(text).requests
    assert (first.tenant, first.priority, first.max_tokens, first.ttft_target_s) == ("team", 2, 64, 0.5)
    assert (second.tenant, second.priority, second.max_tokens) == ("default", 0, 0)


def test_a_column_without_a_meaning_may_be_ignored(read) -> None:
    rows = [{"timestamp": 0, "input_length": 6, "output_length": 2, "user": "u", "region": "eu"}]
    assert len(read(rows, ignore=("user", "region")).requests) == 1


def test_no_format_hides_another() -> None:
    """A row with what one format requires, and what it may have, is not taken for an earlier one."""
    for place, one in enumerate(FORMATS):
        row = {*one.required}
        assert not [other.name for other in FORMATS[:place] if row >= {*other.required}]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compressed_traces_are_read(tmp_path: Path, compress) -> None:
    file = tmp_path / "trace.csv.packed"
    file.write_bytes(compress(AZURE.encode()))
    assert len(read_trace(TraceSource(file=str(file))).requests) == 2
    file.write_bytes(compress(AZURE.encode())[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(TraceSource(file=str(file)))
