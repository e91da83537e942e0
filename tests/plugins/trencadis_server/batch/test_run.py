from __future__ import annotations

import asyncio
import json

import pytest

from trencadis.errors import ConfigError
from trencadis_server.batch import Summary, run_batch


@pytest.fixture
def batch(fake_house, tmp_path):
    """Runs a batch over lines; returns the summary and what is in the files."""

    def go(lines, *, errors=False):
        source, output, failed = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "err.jsonl"))
        source.write_text("".join(f"{line}\n" for line in lines))
        files = {"input_file": source, "output_file": output, "error_file": failed if errors else None}
        summary = asyncio.run(asyncio.wait_for(run_batch(*fake_house(), **files), 30))
        return summary, *(
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            for file in (output, failed)
        )

    return go


def line(name, url="/v1/completions", **body):
    body = {"model": "demo", "prompt": [5, 6], "max_tokens": 3, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def embedding(name):
    body = {"model": "demo", "input": "The sea"}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body})


def test_lines_are_answered_by_the_same_endpoints_as_over_http(batch, serve):
    summary, output, _ = batch([line("a"), embedding("b")])
    assert summary == Summary(num_ok=2)
    found = {one["custom_id"]: one["response"]["body"] for one in output}

    async def over_http(api):
        return (await api.ok("/v1/completions", prompt=[5, 6], max_tokens=3))["choices"][0]["text"]

    assert found["a"]["choices"][0]["text"] == serve(over_http)
    assert len(found["b"]["data"][0]["embedding"]) == 8


def test_lines_may_ask_for_every_sampler(batch):
    asked = line("a", typical_p=0.9, xtc_probability=0.5, dry_multiplier=0.8, bad_words=["the sea"], mirostat_mode=2)
    summary, _, failed = batch([asked, line("b", xtc_threshold=0)], errors=True)
    assert summary == Summary(num_ok=1, num_failed=1)
    assert "xtc_threshold" in json.dumps(failed)


def test_a_second_run_adds_only_what_is_missing(batch):
    batch([line("a"), line("b")])
    summary, output, _ = batch([line("a"), line("b"), line("c")])
    assert summary == Summary(num_ok=1, num_skipped=2)
    assert [one["custom_id"] for one in output][2:] == ["c"]
    assert len(output) == 3


def test_failures_go_to_their_own_file_and_are_tried_again(batch):
    bad = line("bad", temperature="hot")
    summary, output, failed = batch([line("a"), bad], errors=True)
    assert summary == Summary(num_ok=1, num_failed=1)
    assert ([one["custom_id"] for one in output], [one["custom_id"] for one in failed]) == (["a"], ["bad"])
    assert failed[0]["response"]["status_code"] == 400
    summary, output, failed = batch([line("a"), line("bad")], errors=True)
    assert summary == Summary(num_ok=1, num_skipped=1)
    assert ([one["custom_id"] for one in output], failed) == (["a", "bad"], [])


def test_a_file_that_is_named_twice_is_refused(fake_house, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(line("a"))
    with pytest.raises(ConfigError, match="named twice"):
        asyncio.run(run_batch(*fake_house(), input_file=file, output_file=tmp_path / "." / "in.jsonl"))
    assert file.read_text() == line("a")
