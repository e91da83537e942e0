from __future__ import annotations

import gc

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis import errors
from trencadis.client.process.conversion import (
    add_message,
    error_of,
    fault_of,
    model_of,
    prompt_messages,
    ready_message,
    request_of,
    step_message,
    step_outputs,
)
from trencadis.client.process.messages import decode_client_message, decode_worker_message, encode
from trencadis.errors import InternalError, InvalidRequestError, PluginLoadError, RequestRefusedError, TrencadisError
from trencadis.records import (
    Embedding,
    FinishedSequence,
    FinishReason,
    ModelFacts,
    Request,
    SamplingParams,
    StructuredOutput,
    TokenDeltas,
    TokenLogprobs,
)
from trencadis.startup import LedgerEntry

IDS = st.integers(0, 2**31 - 1)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.1, 1),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=3),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(IDS, max_size=3),
    logprobs=st.none() | st.integers(0, 50),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 9),
)
REQUESTS = st.builds(
    Request,
    request_id=st.text(),
    prompt_token_ids=st.lists(IDS, min_size=1),
    output_token_ids=st.none() | st.lists(IDS),
    params=PARAMS,
    priority=st.integers(-(2**40), 2**40),
    tenant=st.text(),
    cache_salt=st.text(),
    weight=st.none() | st.floats(0.01, 100),
    transfer_params=st.none()
    | st.dictionaries(
        st.text(), st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.lists(st.booleans()), max_size=3
    ),
    ttft_target_s=st.just(float("inf")) | st.floats(0.001, 60),
    tpot_target_s=st.just(float("inf")) | st.floats(0.001, 60),
    end_token_ids=st.lists(IDS, max_size=3),
)


@pytest.mark.slow
@settings(phases=[Phase.explicit, Phase.generate], max_examples=100)
@given(request=REQUESTS, handle=IDS)
def test_a_request_arrives_as_it_was_sent(request: Request, handle: int) -> None:
    message = decode_client_message(encode(add_message(request, handle)))
    assert request_of(message) == request  # type: ignore[arg-type]
    assert message.handle == handle  # type: ignore[union-attr]


def test_every_sampling_parameter_travels() -> None:
    changed = SamplingParams(
        n=2, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, frequency_penalty=0.5,
        presence_penalty=0.5, logit_bias={3: 1.5}, allowed_token_ids=(3, 4), bad_token_ids=(4,), min_tokens=2, max_tokens=9,
        stop=("x",), stop_token_ids=(5,), ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
        logprobs=1, prompt_logprobs=2, seed=7, max_draft_tokens=4, best_of=5, structured=StructuredOutput.regex("a+"),
        typical_p=0.5, epsilon_cutoff=0.1, eta_cutoff=0.1, top_n_sigma=2.0, xtc_probability=0.5, xtc_threshold=0.2, mirostat_mode=2,
        mirostat_tau=3.0, mirostat_eta=0.2, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_range=99,
        dry_breaker_token_ids=(6,), no_repeat_ngram_size=3, bad_words_ids=((7, 8), (9,)), logits_processors={"a": {"b": [1, "c"]}},
    )  # fmt: skip
    default = SamplingParams()
    names = [field.name for field in attrs.fields(SamplingParams)]
    assert all(getattr(changed, name) != getattr(default, name) for name in names), "a new parameter: add it here"
    request = Request(request_id="a", prompt_token_ids=(1,), params=changed)
    assert request_of(decode_client_message(encode(add_message(request, 0)))).params == changed  # type: ignore[arg-type]


def test_a_step_arrives_with_transfer_ids_for_slots() -> None:
    entry = TokenLogprobs(
        index=1, position=9, token_id=5, logprob=-0.5, rank=2, top_token_ids=(7, 5), top_logprobs=(-0.1, -0.5)
    )
    finished = FinishedSequence(
        request_id="a", slot=4, token_ids=np.array([5, 6], np.int32), finish_reason=FinishReason.STOP, num_prompt_tokens=3,
        num_cached_tokens=2, num_preemptions=1, arrival_s=1.5, first_scheduled_s=2.5, first_token_s=None, finish_s=3.5,
        error="x", stop_token_id=6, transfer_params={"a": [1, None, 2**80]},
        num_approximate_tokens=1,
    )  # fmt: skip
    embedding = Embedding(request_id="e", vector=np.array([0.25, -1], np.float32), num_tokens=4, error="")
    deltas = TokenDeltas(
        slots=np.array([4, 2], np.int32),
        num_tokens=np.array([2, 1], np.int32),
        token_ids=np.array([5, 6, 7], np.int32),
        finished=(finished,),
        logprobs=(entry,),
        prompt_logprobs=(msgspec.structs.replace(entry, index=2),),
        embeddings=(embedding,),
    )
    handles = np.array([9, 9, 30, 9, 40], np.int32)
    # Slot 4 has been given to another already: the handle of what finished is told apart.
    message = decode_worker_message(encode(step_message(deltas, handles, [41])))
    arrived = step_outputs(message)  # type: ignore[arg-type]
    assert arrived.slots == [40, 30]
    assert (arrived.num_tokens, arrived.token_ids) == ([2, 1], [5, 6, 7])
    assert arrived.finished == (attrs.evolve(finished, slot=41),)
    assert arrived.logprobs == (entry,)
    assert arrived.embeddings == (embedding,)
    (before,) = prompt_messages(deltas, handles)
    first = step_outputs(decode_worker_message(encode(before)))  # type: ignore[arg-type]
    assert first.prompt_logprobs == (msgspec.structs.replace(entry, index=30),)
    assert not first.slots


def test_log_probabilities_of_a_long_prompt_are_many_messages_none_of_them_long() -> None:
    entry = TokenLogprobs(
        index=0, position=1, token_id=5, logprob=-0.5, rank=2, top_token_ids=(7,) * 50, top_logprobs=(-0.1,) * 50
    )
    empty = np.empty(0, np.int32)
    entries = tuple(msgspec.structs.replace(entry, position=position) for position in range(1, 1000))
    deltas = TokenDeltas(slots=empty, num_tokens=empty, token_ids=empty, prompt_logprobs=entries)
    messages = [encode(message) for message in prompt_messages(deltas, np.array([3], np.int32))]
    assert max(map(len, messages)) < 2**17
    arrived = [one for data in messages for one in step_outputs(decode_worker_message(data)).prompt_logprobs]  # type: ignore[arg-type]
    assert [one.position for one in arrived] == list(range(1, 1000))
    assert not any(map(gc.is_tracked, arrived)), "the garbage collector looks at them"


def test_facts_about_the_model_arrive() -> None:
    model = ModelFacts(
        architecture="A", dtype="float32", vocab_size=5, max_model_len=6, eos_token_ids=(1, 2), num_parameters=3,
        weights_bytes=2**40, kv_bytes_per_token=1, generates=False, embedding_size=8,
    )  # fmt: skip
    start = (LedgerEntry("imports", 2.5, None), LedgerEntry("kernels", 0.25, True))
    message = decode_worker_message(encode(ready_message(model, max_model_len=4, plan_hash="h", start=start)))
    assert model_of(message) == model  # type: ignore[arg-type]
    assert (message.max_model_len, message.plan_hash, message.start) == (4, "h", start)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in errors.__all__ if isinstance(getattr(errors, name), type)])
def test_every_error_keeps_class_message_and_hint(name: str) -> None:
    error = getattr(errors, name)("it broke.", hint="Mend it.")
    arrived = error_of(fault_of(error))
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.hint) == ("it broke. Mend it.", "Mend it.")
    assert arrived.http_status == error.http_status


def test_the_field_at_fault_arrives() -> None:
    arrived = error_of(fault_of(InvalidRequestError("no", field="stop_token_ids")))
    assert isinstance(arrived, InvalidRequestError)
    assert arrived.field == "stop_token_ids"


def test_an_error_of_a_plugin_arrives_as_the_nearest_class_of_ours() -> None:
    class OwnError(RequestRefusedError):
        pass

    assert type(error_of(fault_of(OwnError("no")))) is RequestRefusedError
    arrived = error_of(fault_of(KeyError("x")))
    assert type(arrived) is InternalError
    assert "KeyError" in str(arrived)


def test_when_to_try_again_arrives() -> None:
    arrived = error_of(fault_of(RequestRefusedError("full", retry_after_s=7.5)))
    assert isinstance(arrived, RequestRefusedError)
    assert arrived.retry_after_s == 7.5


def test_a_fault_cannot_name_anything_but_an_error_of_ours() -> None:
    fault = fault_of(PluginLoadError("x"))
    for kind in ("did_you_mean", "__builtins__", "annotations", "nothing"):
        fault.kind = kind
        assert type(error_of(fault)) is InternalError
    assert isinstance(error_of(fault_of(InvalidRequestError("x"))), TrencadisError)
