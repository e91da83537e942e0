"""The demo model twice: an engine is killed in the middle of its requests, and every text is that of one engine left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from trencadis import LLM, AsyncLLM, SamplingParams
from trencadis.client.factory import open_frontend
from trencadis.errors import ConfigValueError, ContinuationError
from trencadis.records import BeamSearchParams, RequestOutput, StructuredOutput
from trencadis.registry import load_with_plugins

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="kills a process by its id"),
]

PROMPTS = [
    "The old man looked at the sea and",
    "Alice was beginning to get very tired of",
    "To be, or not to be: that is",
]
SAMPLED = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 96}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=96),
    "seeded": SamplingParams(seed=7, top_p=0.9, **SAMPLED),
    "unseeded": SamplingParams(**SAMPLED),  # draws follow from the engine's seed and the request's name
    "penalties": SamplingParams(seed=1, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2, **SAMPLED),
    "dry": SamplingParams(seed=2, dry_multiplier=0.8, no_repeat_ngram_size=3, **SAMPLED),
    "bounds": SamplingParams(temperature=0.8, seed=3, min_tokens=70, max_tokens=90),
    "logprobs": SamplingParams(seed=4, logprobs=2, prompt_logprobs=1, **SAMPLED),
    "several": SamplingParams(seed=5, n=3, **SAMPLED),
    "best": SamplingParams(seed=6, n=1, best_of=2, **SAMPLED),
    "stop": SamplingParams(temperature=0.7, seed=8, stop=["qq", "zz"], ignore_eos=True, max_tokens=96),
    "regex": SamplingParams(seed=9, max_tokens=96, structured=StructuredOutput(kind="regex", text="([a-z]+ ){40}")),
}


def facts(output: RequestOutput) -> list[Any]:
    """Return what a client sees of an output, but for log-probabilities."""
    rows: list[Any] = [[entry.token_id for entry in output.prompt_logprobs or ()]]
    for one in output.outputs:
        tokens = [entry.token_id for entry in one.logprobs or ()]
        rows.append((one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason, tokens))
    return rows


def logprobs(output: RequestOutput) -> list[float]:
    return [
        entry.logprob
        for entries in (output.prompt_logprobs, *(one.logprobs for one in output.outputs))
        for entry in entries or ()
    ]


async def all_of(llm: AsyncLLM, outputs: dict[str, RequestOutput]) -> None:
    async def one(name: str, index: int) -> None:
        async for output in llm.generate(PROMPTS[index % 3], PARAMS[name], request_id=name, streams=index % 2 == 0):
            outputs[name] = output

    await asyncio.gather(*[one(name, index) for index, name in enumerate(PARAMS)])


async def undisturbed() -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    async with AsyncLLM("demo") as llm:
        await all_of(llm, outputs)
    return outputs


def client_of(llm: AsyncLLM) -> Any:
    return llm._runner.frontend.engine


async def kill_in_the_middle(llm: AsyncLLM, victim: int) -> dict[str, RequestOutput]:
    client, outputs = client_of(llm), {}
    replica = client.replicas.seats[victim]
    task = asyncio.ensure_future(all_of(llm, outputs))
    while sum(len(work.tokens) for work in list(replica.work.values())) < 60:
        assert not task.done(), "it never had sixty tokens"
        await asyncio.sleep(0)
    os.kill(replica.engine.client._transport._peer.pid, signal.SIGKILL)
    await task
    assert replica.num_lost > 0
    await until_ready(llm, victim)
    return outputs


async def until_ready(llm: AsyncLLM, replica: int) -> None:
    while (await llm.replicas())["replicas"][replica]["state"] != "ready":
        await asyncio.sleep(0.05)


async def with_replicas() -> list[dict[str, RequestOutput]]:
    async with AsyncLLM("demo", parallel={"data": 2}, router={"name": "round_robin"}) as llm:
        # Requests take turns: each is on the replica that ends in one of the two.
        outputs = [await kill_in_the_middle(llm, 0), await kill_in_the_middle(llm, 1)]
        await refuse_what_cannot_go_on(llm)
        embedded = await llm.embed(PROMPTS)
        assert [len(one.vector) for one in embedded] == [llm.model.embedding_size] * 3
        beams = await llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6))
        assert len(beams.outputs) == 3
    return outputs


async def refuse_what_cannot_go_on(llm: AsyncLLM) -> None:
    params = SamplingParams(mirostat_mode=2, seed=1, temperature=0.9, ignore_eos=True, max_tokens=400)
    stream = llm.generate(PROMPTS[0], params, request_id="mirostat")
    first = await anext(stream)
    assert first.outputs[0].token_ids
    client = client_of(llm)
    os.kill(
        client.replicas.seats[client.replicas.work["mirostat"].replica].engine.client._transport._peer.pid,
        signal.SIGKILL,
    )
    with pytest.raises(ContinuationError, match="mirostat_mode"):
        [one async for one in stream]


def test_texts_are_those_of_one_engine_whatever_the_parameters() -> None:
    expected = asyncio.run(undisturbed())
    for outputs in asyncio.run(with_replicas()):
        assert outputs.keys() == expected.keys()
        for name, one in outputs.items():
            assert facts(one) == facts(expected[name]), name
            # A prompt that is computed at once has sums in another order than one computed token by token.
            assert logprobs(one) == pytest.approx(logprobs(expected[name]), abs=1e-3)


def test_replicas_in_this_process_are_refused_and_say_what_to_do() -> None:
    resolved, registry = load_with_plugins(
        environ={}, overrides={"parallel": {"data": 2}, "engine": {"placement": "thread"}}
    )
    with pytest.raises(ConfigValueError, match=r"parallel\.data = 2 engines need a process each"):
        open_frontend(resolved.config, registry)


def test_an_error_of_one_replica_ends_the_start_of_all() -> None:
    with pytest.raises(Exception, match="cache"):
        LLM("demo", parallel={"data": 2}, cache={"memory_fraction": 1e-9})
