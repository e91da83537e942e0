from __future__ import annotations

import builtins
import ctypes
import functools
import os
import sys
import threading
import time

import attrs
import pytest

from trencadis import processes
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import Vocabulary
from trencadis.records import StructuredOutput
from trencadis.text import load_tokenizer, vocabulary_of
from trencadis_plugins.sampling import grammar
from trencadis_plugins.sampling.grammar import Grammars, grammars_of
from trencadis_plugins.sampling.grammar_state import GrammarState


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(load_tokenizer("demo"))


@pytest.fixture(scope="module")
def grammars(vocabulary):
    return Grammars(lambda: vocabulary)


def _accepts(grammars, vocabulary, wanted, text):
    """Whether a text, token by token, is one that may end."""
    matcher = grammars.matcher(wanted)
    ids = list(vocabulary.encode(text))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (
            StructuredOutput.json_object(),
            ["{}", '{"a": [1, null, {"b": "\\n é"}]}', '{ "a" : [ 1 , 2 ] }'],
            ["[]", "{", "1", '{\n  "a": 1\n}', '{\n"a":1}', '{"a":  1}'],
        ),
        (StructuredOutput.json_schema({"type": "integer"}), ["5", "-17"], ["5.5", '"5"', ""]),
        (StructuredOutput.regex(r"(foo|bar)\d{2}"), ["foo12"], ["xfoo12", "foo123", "foo1"]),
        (StructuredOutput.regex(r"^\w+@\w+\.com$"), ["me@here.com"], ["me@here.comma"]),
        (
            StructuredOutput.choice(["yes", "no", "", 'a "quoted" \\ text', "two\nlines", "é😀", "<|end|>"]),
            ["yes", "no", "", 'a "quoted" \\ text', "two\nlines", "é😀", "<|end|>"],
            ["maybe", "ye"],
        ),
        (StructuredOutput.choice([f"number {i}" for i in range(1024)]), ["number 0", "number 1023"], ["number 1024"]),
        (StructuredOutput.grammar('start: "a" b\nb: /[0-9]+/'), ["a1", "a23"], ["a", "1"]),
        (StructuredOutput.grammar('root ::= "a" b\nb ::= [0-9]+'), ["a1", "a23"], ["a", "1"]),
        (StructuredOutput.grammar(r'root ::= "\u00e9" [\u00e0-\u00e9]'), ["éé", "éà"], ["é", "u00e9"]),
        (StructuredOutput.grammar(r'root ::= "\u0022\u005c\U0001F600" [^\u005d]'), ['"\\😀x'], ['"\\😀]']),
        (StructuredOutput.grammar(r'root ::= "\\u00e9"'), [r"\u00e9"], ["é"]),
        (
            StructuredOutput.json_schema({"type": "string", "format": "password", "maxLength": 3}),
            ['"abc"', '""'],
            ['"abcd"', "1"],
        ),
        (
            StructuredOutput.json_schema(
                {
                    "type": "object",
                    "properties": {"format": {"type": "string", "format": "date"}, "b": {"format": "binary"}},
                    "required": ["format"],
                    "additionalProperties": False,
                }
            ),
            ['{"format": "2024-02-03"}', '{"format": "2024-02-03", "b": 1}'],
            ['{"format": "x"}', "{}"],
        ),
        # formats that JSON schema does not define say nothing, so that pydantic's SecretStr, Path and bytes can be asked for
        *(
            (StructuredOutput.json_schema({"type": "string", "format": name}), ['"any text"'], ["1"])
            for name in ("path", "binary", "ipv4network", "ipv6network", "ipv4interface", "base64")
        ),
        (StructuredOutput.json_schema({"enum": [{"format": "path"}]}), ['{"format": "path"}'], ["{}"]),
        (StructuredOutput.grammar('start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)"]),
    ],
    ids=lambda one: one.kind if isinstance(one, StructuredOutput) else "",
)
def test_texts_are_accepted_that_are_of_the_kind(grammars, vocabulary, wanted, right, wrong):
    assert [text for text in right if not _accepts(grammars, vocabulary, wanted, text)] == []
    assert [text for text in wrong if _accepts(grammars, vocabulary, wanted, text)] == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutput.json_schema({"type": "objct"}), "objct"),
        (StructuredOutput.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutput.json_schema({"$ref": "http://nowhere/schema"}), "nowhere"),
        (StructuredOutput.json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        *(
            (StructuredOutput.json_schema({"type": "string", "format": name}), name)
            for name in ("iri", "json-pointer", "regex")
        ),
        (StructuredOutput.json_schema({"properties": {f"p{i}": {} for i in range(4000)}}), "too big"),
        (StructuredOutput.regex("(a"), "unclosed group"),
        (StructuredOutput.regex(r"(a)\1"), "backreferences"),
        (StructuredOutput.regex(r"[^\s\S]"), "no text is of this kind"),
        (StructuredOutput.grammar('start: "a" b'), 'unknown name: "b"'),
        (StructuredOutput.grammar("root ::= ("), "cannot be served"),
        (StructuredOutput.grammar("("), "cannot be served"),
    ],
    ids=lambda one: one.kind if isinstance(one, StructuredOutput) else "",
)
def test_what_the_library_cannot_read_is_refused_with_its_reason(grammars, wanted, words):
    with pytest.raises(InvalidRequestError, match=rf"structured output \({wanted.kind}\) cannot be served") as caught:
        grammars.matcher(wanted)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 700
    assert caught.value.field == "structured"


def test_equal_wishes_are_compiled_once_and_never_share_a_place(vocabulary):
    grammars = Grammars(lambda: vocabulary)
    futures = [grammars.begin(StructuredOutput.regex("ab")) for _ in range(3)]
    futures[0].cancel()
    first, second = (future.result().matcher() for future in futures[1:])
    assert grammars.begin(StructuredOutput.regex("ab")).done()
    assert grammars.num_compiled == 1
    first.consume_tokens(list(vocabulary.encode("ab")))
    assert first.is_stopped()
    assert not second.is_stopped()
    read = functools.cache(lambda: vocabulary)
    assert grammars_of(read) is grammars_of(read)


def test_a_tokenizer_without_an_end_is_refused(vocabulary):
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token"):
        Grammars(lambda: attrs.evolve(vocabulary, eos_token_id=None)).matcher(StructuredOutput.json_object())


def test_without_the_library_the_extra_is_named(vocabulary, monkeypatch):
    real = builtins.__import__

    def fail(name, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(InvalidRequestError, match=r'pip install "trencadis\[structured\]"'):
        Grammars(lambda: vocabulary).matcher(StructuredOutput.json_object())


# ------------------------------------------------------------------------------------------- what takes too long

POISON = (
    StructuredOutput.regex(".*" * 10_000 + "x"),
    StructuredOutput.json_schema({"type": "integer", "multipleOf": 999_983}),
)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("poison", POISON, ids=lambda one: one.kind)
def test_what_takes_too_long_to_compile_is_refused_and_python_goes_on_meanwhile(vocabulary, poison):
    grammars = Grammars(lambda: vocabulary, max_cpu_s=0.5)
    refused = grammars.begin(poison)
    num_turns = 0
    while not refused.done():  # a lock that is held for the trial's time would let this turn once
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 50
    with pytest.raises(InvalidRequestError, match=r"cannot be served: it takes longer than 0\.5 s to compile"):
        refused.result()
    assert grammars.begin(poison).done()
    assert grammars.num_compiled == 1
    assert grammars.matcher(StructuredOutput.regex("ab")).is_accepting() is False


def test_another_tenant_does_not_wait_for_one_that_sends_what_takes_long(vocabulary):
    grammars = Grammars(lambda: vocabulary, max_cpu_s=0.5)
    poisoned = [grammars.begin(StructuredOutput.regex(".*" * (9_000 + i) + "x"), tenant="greedy") for i in range(4)]
    own = grammars.begin(StructuredOutput.regex("[a-c]x"), tenant="greedy")
    grammars.begin(StructuredOutput.regex("[a-c]y"), tenant="other").result()
    assert not all(future.done() for future in poisoned)
    for future in poisoned[1:]:
        future.cancel()
    assert own.result().matcher()


def test_a_thread_without_work_ends_and_its_process_with_it(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar, "_IDLE_S", 0.01)
    before = set(threading.enumerate())
    grammars = Grammars(lambda: vocabulary)
    pending = grammars.begin(StructuredOutput.regex("ab"))
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name == "trencadis-grammars"]
    pending.result()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert grammars._num_threads == 0
    assert grammars.matcher(StructuredOutput.regex("abc"))


def test_a_trial_runs_with_a_niceness_that_leaves_the_cores_to_the_engine(vocabulary):
    before = set(processes._RUNNING)
    grammars = Grammars(lambda: vocabulary)
    grammars.matcher(StructuredOutput.regex("abcd"))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    (process,) = set(processes._RUNNING) - before
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + 10, 19)


def test_a_mask_costs_a_bounded_number_of_steps(grammars, vocabulary):
    """Without a bound on fuel the library takes a third of a second for each of them."""
    matcher = grammars.matcher(StructuredOutput.regex("a{1000000}"))
    matcher.try_consume_tokens(list(vocabulary.encode("a")))
    matcher.compute_bitmask()
    assert "too many expressions" in matcher.get_error()


def _properties(prefix: str, num: int) -> StructuredOutput:
    return StructuredOutput.json_schema({"type": "object", "properties": {f"{prefix}{i}": {} for i in range(num)}})


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc does not say what is held")
def test_the_memory_of_a_grammar_counts_although_it_fits_into_what_others_have_left(grammars, vocabulary):
    before = set(grammars._live.values())
    for prefix in "abcd":
        grammars.matcher(_properties(prefix, 500))
    sizes = [one.num_bytes for one in set(grammars._live.values()) - before]
    assert len(sizes) == 4
    assert min(sizes) > max(sizes) / 2 > 100_000


def test_a_grammar_whose_shared_states_are_used_up_is_compiled_anew_for_the_next_request(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", {**grammar.LIMITS, "max_lexer_states": 60})
    wanted = StructuredOutput.regex("(.{1,50}x){20}y")
    grammars = Grammars(lambda: vocabulary)
    text = list(vocabulary.encode("abcdefg" * 20))

    def read(matcher):
        state = GrammarState(
            matcher,
            vocabulary=vocabulary,
            eos_token_id=grammars.eos_token_id,
            end_token_ids={grammars.eos_token_id},
            on_failure=lambda: grammars.spend(wanted),
        )
        for end in range(len(text)):
            state.mask(text[:end])

    prepared = grammars.begin(wanted).result()  # of a request that runs on
    with pytest.raises(InvalidRequestError, match="too many states"):
        read(prepared.matcher())
    assert grammars.matcher(wanted) is not None, "what was prepared is there at once"
    assert grammars.num_compiled == 1
    anew = grammars.begin(wanted).result()
    assert anew is not prepared
    assert grammars.num_compiled == 2
    assert anew.matcher().try_consume_tokens(text[:2]) == 2
    assert not anew.is_spent


def test_a_refusal_that_is_remembered_holds_no_frames(grammars):
    with pytest.raises(InvalidRequestError):
        grammars.begin(StructuredOutput.regex("(frames")).result()
    error, _ = grammars._refused[StructuredOutput.regex("(frames")]
    assert error.__traceback__ is None
