from __future__ import annotations

import enum
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis import errors
from trencadis.client.engine_client import StepOutputs, step_outputs
from trencadis.errors import InternalError, InvalidRequestError, RequestError, RequestRefusedError, TrencadisError
from trencadis.records import (
    Embedding,
    EmbeddingRequest,
    EngineLoad,
    FinishedSequence,
    FinishReason,
    Float32Array,
    Int32Array,
    ModelFacts,
    Request,
    SamplingParams,
    StructuredOutput,
    TokenDeltas,
    TokenLogprobs,
)
from trencadis_remote.process.messages import (
    ClientMessage,
    EmbedMessage,
    FailedMessage,
    LoadMessage,
    MetricsMessage,
    ReadyMessage,
    StartMessage,
    WorkerMessage,
)
from trencadis_remote.process.wire import (
    as_error,
    decode_client_message,
    decode_request,
    decode_start,
    decode_worker_message,
    encode,
)

IDS = st.integers(0, 2**31 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(), lambda inner: st.lists(inner, max_size=2)
)
TABLES = st.dictionaries(st.text(min_size=1), PLAIN, max_size=3)
CHANGED = SamplingParams(
    n=2, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, frequency_penalty=0.5,
    presence_penalty=0.5, logit_bias={3: 1.5}, allowed_token_ids=(3, 4), bad_token_ids=(4,), min_tokens=2, max_tokens=9,
    stop=("x",), stop_token_ids=(5,), ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
    logprobs=1, prompt_logprobs=2, seed=2**63 - 1, max_draft_tokens=4, best_of=5, structured=StructuredOutput.choice(["é", ""]),
    typical_p=0.5, epsilon_cutoff=0.1, eta_cutoff=0.1, top_n_sigma=2.0, xtc_probability=0.5, xtc_threshold=0.2, mirostat_mode=2,
    mirostat_tau=3.0, mirostat_eta=0.2, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_range=99,
    dry_breaker_token_ids=(6,), no_repeat_ngram_size=3, bad_words_ids=((7, 8), (9,)), logits_processors={"a": {"b": [1, "c"]}},
)  # fmt: skip
REQUESTS = st.builds(
    Request,
    request_id=st.text(),
    prompt_token_ids=st.lists(IDS, min_size=1),
    output_token_ids=st.none() | st.lists(IDS),
    params=st.sampled_from([SamplingParams(), CHANGED]),
    priority=st.integers(-(2**40), 2**40),
    tenant=st.text(),
    cache_salt=st.text(),
    weight=st.none() | st.floats(0.01, 100),
    transfer_params=st.none() | TABLES,
    ttft_target_s=st.just(float("inf")) | st.floats(0.001, 60),
    tpot_target_s=st.just(float("inf")) | st.floats(0.001, 60),
    end_token_ids=st.lists(IDS, max_size=3),
)


SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    Int32Array: st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: np.array(ids, np.int32)),
    Float32Array: st.lists(st.floats(width=32, allow_nan=False)).map(lambda vector: np.array(vector, np.float32)),
    Mapping[str, Any]: TABLES,
    dict[str, Any]: TABLES,
    msgspec.Raw: REQUESTS.map(lambda request: msgspec.Raw(encode(request))),
    RequestError: st.none(),  # errors, which equal nothing but themselves, have tests of their own
    TrencadisError: st.none(),
}


def made_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a message or a record declares; of the records themselves, too."""
    args = get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, bool | enum.Enum | type(None)):
        return st.from_type(kind)
    if get_origin(kind) is tuple:
        is_list = args[-1] is Ellipsis
        return st.lists(made_of(args[0]), max_size=3).map(tuple) if is_list else st.tuples(*map(made_of, args))
    if get_origin(kind) is Sequence:
        return st.lists(made_of(args[0]), max_size=3)
    if args:
        return st.one_of(*map(made_of, args))
    fields = {name: made_of(one) for name, one in get_type_hints(kind).items() if not name.startswith("_")}
    return st.builds(kind, **{**fields, **({"refused": st.just(())} if kind is StepOutputs else {})})


MESSAGES = (*get_args(ClientMessage), *get_args(WorkerMessage))


def arrived(message: Any) -> Any:
    return (decode_client_message if type(message) in get_args(ClientMessage) else decode_worker_message)(
        encode(message)
    )


@pytest.mark.representatives(len(MESSAGES))
@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if kind is not FailedMessage])
@settings(phases=[Phase.explicit, Phase.generate], max_examples=20)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    message = data.draw(made_of(kind))
    assert arrived(message) == message


@settings(phases=[Phase.explicit, Phase.generate], max_examples=40)
@given(request=REQUESTS)
def test_a_request_arrives_as_it_was_sent(request: Request) -> None:
    assert decode_request(encode(request)) == request


def test_the_request_of_every_sampling_parameter_changes_every_one() -> None:
    default = SamplingParams()
    names = [field.name for field in attrs.fields(SamplingParams)]
    assert all(getattr(CHANGED, name) != getattr(default, name) for name in names), "a new parameter: add it above"


@pytest.mark.representatives(len(MESSAGES))
@pytest.mark.parametrize("kind", MESSAGES)
@settings(phases=[Phase.explicit, Phase.generate], max_examples=1)
@given(data=st.data())
def test_fields_of_another_type_missing_and_surplus_ones_are_refused(kind: type, data: st.DataObject) -> None:
    message = data.draw(made_of(kind))
    decode = decode_client_message if kind in get_args(ClientMessage) else decode_worker_message
    fields = msgspec.msgpack.decode(encode(message))
    wrong = [[*fields, None], ["Nobody", *fields[1:]]]
    for index, (name, declared) in enumerate(get_type_hints(kind).items(), start=1):
        if declared is not msgspec.Raw:
            wrong.append([*fields[:index], [[]], *fields[index + 1 :]])
        if name in kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]:  # type: ignore[attr-defined]
            wrong.append(fields[:index])
    for one in wrong:
        with pytest.raises(msgspec.DecodeError):
            decode(msgspec.msgpack.encode(one))  # type: ignore[operator]


EMPTY = np.empty(0, np.int32)
FINISHED = FinishedSequence(
    request_id="a", slot=1, token_ids=EMPTY, finish_reason=FinishReason.STOP, num_prompt_tokens=1
)
EMBEDDING = Embedding(request_id="a", vector=np.empty(0, np.float32), num_tokens=1)
MODEL = ModelFacts(
    architecture="A", dtype="float32", vocab_size=5, max_model_len=6, eos_token_ids=(1,), num_parameters=3, weights_bytes=4,
    kv_bytes_per_token=1,
)  # fmt: skip
REQUEST = Request(request_id="a", prompt_token_ids=(1,))
RECORDS: dict[type, tuple[Any, Any, tuple[Any, ...]]] = {
    EmbeddingRequest: (
        EmbedMessage(request=EmbeddingRequest(request_id="a", token_ids=(1,))),
        decode_client_message,
        (1,),
    ),
    Request: (REQUEST, decode_request, ()),
    SamplingParams: (REQUEST, decode_request, ("params",)),
    ModelFacts: (ReadyMessage(model=MODEL, max_model_len=4, plan_hash="h"), decode_worker_message, (1,)),
    EngineLoad: (LoadMessage(load=EngineLoad(num_waiting=1)), decode_worker_message, (1,)),
    FinishedSequence: (StepOutputs(finished=(FINISHED,)), decode_worker_message, (4, 0)),
    Embedding: (StepOutputs(embeddings=(EMBEDDING,)), decode_worker_message, (7, 0)),
}
"""Each record that travels: a message with one, what decodes it, and where the record is in it."""


@pytest.mark.representatives(len(RECORDS))
@pytest.mark.parametrize("record", RECORDS)
def test_fields_of_a_record_have_their_types_and_those_without_a_default_are_there(record: Any) -> None:
    message, decode, path = RECORDS[record]

    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        whole = table = msgspec.msgpack.decode(encode(message))
        for step in path:
            table = table[step]
        change(table)
        return msgspec.msgpack.encode(whole)

    assert decode(changed(lambda table: table.update(eval="os", __class__="os.system"))) == decode(
        encode(message)
    )  # skipped
    for field in attrs.fields(record):
        for wrong in ([[]], msgspec.msgpack.Ext(5, b"x")):
            with pytest.raises((msgspec.DecodeError, InvalidRequestError)):
                decode(changed(lambda table, name=field.name, wrong=wrong: table.update({name: wrong})))
        if field.default is attrs.NOTHING:
            with pytest.raises(
                (msgspec.DecodeError, InvalidRequestError), match=f"missing required field `{field.name}`"
            ):
                decode(changed(lambda table, name=field.name: table.pop(name)))


@pytest.mark.parametrize(
    "array", [["<i4", b"abc"], ["|O", b""], ["<f4", b"abcd"], [[], b""], b"", ["<i4"], ["<i4", "abcd"]]
)
def test_what_is_no_array_of_whole_numbers_is_refused(array: Any) -> None:
    data = msgspec.msgpack.decode(encode(StepOutputs(finished=(FINISHED,))))
    data[4][0]["token_ids"] = array
    with pytest.raises(msgspec.ValidationError, match="token_ids"):
        decode_worker_message(msgspec.msgpack.encode(data))


def test_what_is_no_message_is_refused() -> None:
    alive = encode(MetricsMessage(text="a"))
    for data in (b"", b"\x80", alive[:-1], b"cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(msgspec.DecodeError):
            decode_worker_message(data)
    with pytest.raises(msgspec.DecodeError):
        decode_client_message(alive)  # a message of the other side


def test_the_tables_of_a_configuration_arrive() -> None:
    start = StartMessage(
        tables={"engine": {"seed": 3, "names": ["a"]}}, sources={"engine.seed": "flag"},
        log_levels=("info", "info"), python_path=None,
    )  # fmt: skip
    assert decode_start(encode(start)) == start


def test_log_probabilities_that_arrived_are_not_looked_at_by_the_garbage_collector() -> None:
    entry = TokenLogprobs(
        index=0, position=1, token_id=5, logprob=-0.5, rank=2, top_token_ids=(7,), top_logprobs=(-1.0,)
    )
    assert not any(map(gc.is_tracked, arrived(StepOutputs(logprobs=(entry,) * 9)).logprobs))


def test_a_step_of_32_sequences_costs_a_tenth_of_a_millisecond_at_most() -> None:
    ids = np.arange(32, dtype=np.int32)
    deltas = TokenDeltas(slots=ids, num_tokens=np.ones(32, np.int32), token_ids=ids)
    times = []
    for _ in range(200):
        start_s = time.thread_time()
        decode_worker_message(encode(step_outputs(deltas)))
        times.append(time.thread_time() - start_s)
    assert min(times) < 100e-6


# ------------------------------------------------------------------------------------------------------------ errors


def sent(error: BaseException) -> TrencadisError:
    """The error as it arrives."""
    arrived_error: TrencadisError = arrived(FailedMessage(error=as_error(error))).error
    return arrived_error


@pytest.mark.parametrize("name", [name for name in errors.__all__ if isinstance(getattr(errors, name), type)])
def test_every_error_keeps_class_message_and_hint(name: str) -> None:
    error = getattr(errors, name)("it broke.", hint="Mend it.")
    assert type(sent(error)) is type(error)
    assert (str(sent(error)), sent(error).hint) == ("it broke. Mend it.", "Mend it.")
    assert sent(error).http_status == error.http_status


def test_the_field_at_fault_and_when_to_try_again_arrive() -> None:
    ((name, error),) = arrived(StepOutputs(refused=(("a", RequestRefusedError("full", retry_after_s=7.5)),))).refused
    assert (name, type(error), error.retry_after_s) == ("a", RequestRefusedError, 7.5)
    assert sent(InvalidRequestError("no", field="stop_token_ids")).field == "stop_token_ids"  # type: ignore[attr-defined]


def test_an_error_of_a_plugin_arrives_as_the_nearest_class_of_ours() -> None:
    class OwnError(RequestRefusedError):
        pass

    assert type(sent(OwnError("no"))) is RequestRefusedError
    assert type(sent(KeyError("x"))) is InternalError
    assert "KeyError" in str(sent(KeyError("x")))


@pytest.mark.parametrize("kind", ["did_you_mean", "__builtins__", "annotations", "nothing"])
def test_an_error_cannot_name_anything_but_an_error_of_ours(kind: str) -> None:
    data = msgspec.msgpack.decode(encode(FailedMessage(error=InvalidRequestError("x"))))
    data[1][0] = kind
    assert type(decode_worker_message(msgspec.msgpack.encode(data)).error) is InternalError  # type: ignore[union-attr]


def test_the_error_of_a_request_arrives_as_one_whatever_its_class() -> None:
    ((_, error),) = arrived(StepOutputs(refused=(("a", InternalError("x")),))).refused  # type: ignore[arg-type]
    assert (type(error), str(error)) == (InvalidRequestError, "x")
