from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.template_zoo import CONVERSATIONS, HOSTILE, SPECIAL, ZOO
from trencadis.errors import InvalidRequestError
from trencadis.text import Tokenizer
from trencadis.text.chat import encode_chat
from trencadis.text.chat_template import ChatTemplate, chat_template_of
from trencadis.text.template_pool import TemplatePool, TemplateStoppedError

CHATML = ZOO["chatml"].source
SIGNS = ["<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>", "</s>", "<s>", "  ", "\n"]


@pytest.fixture(scope="module")
def pool() -> TemplatePool:
    return TemplatePool(max_cpu_s=1.0)


def written(template: ChatTemplate, messages: Any, **options: Any) -> str:
    return template.submit(messages, **options).result()


def by_transformers(tokenizer: Tokenizer, source: str, messages: Any, **options: Any) -> str:
    """Return a conversation as transformers writes it."""
    text: str = tokenizer._hf.apply_chat_template(
        messages, chat_template=source, tokenize=False, **{"add_generation_prompt": True, **SPECIAL, **options}
    )
    return text


def in_forms(name: str, messages: Any) -> Any:
    """Return messages with the content that a template of the zoo wants."""
    forms = ZOO[name].forms
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}] if one["content"] else []}
        if one["role"] in forms
        else one
        for one in messages
    ]


def turned_away(kind: str) -> list[tuple[str, str]]:
    return [(name, conversation) for name, template in ZOO.items() for conversation in getattr(template, kind)]


def all_of_them(test: Any) -> Any:
    """Run every parameter set in every tier: each takes milliseconds."""
    return pytest.mark.representatives(100)(test)


# -------------------------------------------------------------------------------------------------- what is written


@all_of_them
@pytest.mark.parametrize("name", ZOO)
def test_every_template_writes_what_transformers_makes_it_write(tokenizer: Tokenizer, name: str) -> None:
    template = chat_template_of(ZOO[name].source, SPECIAL)
    for conversation, messages in CONVERSATIONS.items():
        if conversation in (*ZOO[name].lacks, *ZOO[name].loses):
            continue
        for opens in (True, False):
            expected = by_transformers(
                tokenizer, template.source, in_forms(name, messages), add_generation_prompt=opens
            )
            assert written(template, messages, add_generation_prompt=opens) == expected, conversation


@all_of_them
@pytest.mark.parametrize("name", ZOO)
def test_the_form_of_content_that_each_role_wants_is_found(name: str) -> None:
    forms = chat_template_of(ZOO[name].source, SPECIAL).forms()
    assert {role for role, form in forms.items() if form == "parts"} == set(ZOO[name].forms)
    assert set(forms) == {"user", "assistant", "system", "tool"}


@all_of_them
@pytest.mark.parametrize("name", ZOO)
def test_text_and_parts_of_text_are_the_same_to_every_template(name: str) -> None:
    template = chat_template_of(ZOO[name].source, SPECIAL)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert written(template, parts) == written(template, [{"role": "user", "content": "Hello"}])


@all_of_them
@pytest.mark.parametrize("name", ZOO)
def test_no_part_of_several_is_lost(name: str) -> None:
    template = chat_template_of(ZOO[name].source, SPECIAL)
    parts = [{"type": "text", "text": "first one"}, {"type": "text", "text": "second one"}]
    text = written(template, [{"role": "user", "content": parts}])
    assert text.index("first one") < text.index("second one")
    assert "'type'" not in text


@all_of_them
@pytest.mark.parametrize(("name", "conversation"), turned_away("loses"))
def test_a_prompt_without_a_messages_text_is_refused(name: str, conversation: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[\d\]: .* leaves out the text of this message of role"):
        written(chat_template_of(ZOO[name].source, SPECIAL), CONVERSATIONS[conversation])


@all_of_them
@pytest.mark.parametrize(("name", "conversation"), turned_away("lacks"))
def test_what_the_template_refuses_is_said_in_its_own_words(name: str, conversation: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"refused the messages: (System role not|roles must alternate)"):
        written(chat_template_of(ZOO[name].source, SPECIAL), CONVERSATIONS[conversation])


def test_a_template_that_reads_the_first_part_alone_does_not_lose_the_second(pool: TemplatePool) -> None:
    source = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
    template = ChatTemplate(source, {}, pool)
    assert written(template, [{"role": "user", "content": "Hello"}]) == "Hello"
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]: .* leaves out"):
        written(template, [{"role": "user", "content": parts}])


def test_a_part_that_is_no_text_is_refused(pool: TemplatePool) -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] = .* is no text"):
        written(ChatTemplate(CHATML, {}, pool), [{"role": "user", "content": image}])


@all_of_them
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("mistral", "harmony")])
@pytest.mark.parametrize("text", ["Good day", "  Good day  ", "Good\n\nday\n"])
def test_the_final_message_is_continued_as_by_transformers(tokenizer: Tokenizer, name: str, text: str) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    template = chat_template_of(ZOO[name].source, SPECIAL)
    given = copy.deepcopy(in_forms(name, messages))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = by_transformers(tokenizer, template.source, given, **options)
    assert written(template, messages, **options) == expected
    assert expected.endswith((text, text.strip()))


def test_a_message_without_text_cannot_be_continued(pool: TemplatePool) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None}]
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        written(ChatTemplate("{{ messages[0].content }}", {}, pool), messages, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ x | tojson }} {{ x | tojson(indent=2) }} {{ x | tojson(ensure_ascii=True, sort_keys=True) }}",
        "{{ x | tojson(separators=(',', ':')) }}",
        "{{ strftime_now('%Y %B') }} {{ dict(a=1) }} {{ dict.fromkeys([1, 2], 3) }}",
        "{% set ns = namespace(self=3, a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}",
        "   {% if true %}\n  trimmed {% endif %}\n\n x\n",
        "{{ tools is none }} {{ documents is none }} {{ unheard_of is defined }} {{ additional_special_tokens }}",
        "{{ x.items() | list | first }} {{ x['é'] | upper }} {{ (x | string)[::-1] }} {{ range(3) | list }}",
        "{% macro f(a, b=2) %}{{ a ~ b ~ caller() }}{% endmacro %}{% call f(1) %}!{% endcall %}",
    ],
)
def test_whatever_transformers_gives_to_templates_is_there(
    tokenizer: Tokenizer, source: str, pool: TemplatePool
) -> None:
    source += "{{ messages[0].content }}"
    x = {"é": "<a & 'b'>", "b": [1, 2.5, None, True], "a": {"日": "本\n"}}
    messages = [{"role": "user", "content": "Hello"}]
    template = ChatTemplate(source, SPECIAL, pool)
    assert written(template, messages, arguments={"x": x}) == by_transformers(tokenizer, source, messages, x=x)


def test_empty_entries_are_left_out_as_by_transformers(tokenizer: Tokenizer, pool: TemplatePool) -> None:
    source = "{{ messages | tojson }}"
    messages = [{"role": "user", "content": "Hello", "name": None}, {"role": "assistant", "content": None}]
    assert written(ChatTemplate(source, SPECIAL, pool), messages) == by_transformers(tokenizer, source, messages)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_there_under_each_name_that_templates_know(name: str, pool: TemplatePool) -> None:
    source = "{% for m in messages %}{{ m.content }}{{ [m.reasoning, m.reasoning_content, m.thinking] | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "content": "Hello", name: "because"}]
    assert written(ChatTemplate(source, {}, pool), messages) == 'Hello["because", "because", "because"]'


# ------------------------------------------------------------------------------------------------------ end of turn


@all_of_them
@pytest.mark.parametrize("name", ZOO)
def test_the_end_of_an_assistants_turn_is_found(name: str) -> None:
    assert chat_template_of(ZOO[name].source, SPECIAL).end_of_turn(SIGNS) == (ZOO[name].end or None)


# ------------------------------------------------------------------------------------------------- foreign programs


@all_of_them
@pytest.mark.parametrize("name", HOSTILE)
def test_no_template_harms_anything_but_its_own_requests(name: str, pool: TemplatePool) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        written(ChatTemplate(HOSTILE[name], SPECIAL, pool), CONVERSATIONS["user"])
    assert "template" in str(caught.value)
    assert written(ChatTemplate(CHATML, SPECIAL, pool), CONVERSATIONS["user"]).count("Hello there") == 1


def test_a_template_that_loops_is_stopped_and_the_deadline_named() -> None:
    pool = TemplatePool(max_cpu_s=0.5)
    template = ChatTemplate(HOSTILE["loops"], {}, pool)
    for _ in range(3):
        with pytest.raises(TemplateStoppedError, match=r"ran longer than 0\.5 s and was stopped"):
            written(template, CONVERSATIONS["user"])
    assert pool.num_started == 1, "what loops with a word is not tried again"


def test_a_worker_serves_on_however_much_memory_the_process_has_that_started_it() -> None:
    pool, held = TemplatePool(), bytearray(300 << 20)
    held[::4096] = bytes(len(held[::4096]))
    for _ in range(3):
        written(ChatTemplate(CHATML, SPECIAL, pool), CONVERSATIONS["user"])
    assert pool.num_started == 1


def test_what_one_conversation_stops_is_started_again_for_the_next() -> None:
    pool = TemplatePool(max_cpu_s=0.5)
    source = CHATML + "{% if messages | length == 2 %}" + HOSTILE["loops"] + "{% endif %}"
    template = ChatTemplate(source, {}, pool)
    two = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    three = [*two, {"role": "user", "content": "three"}]
    template._forms = {"user": "text"}
    assert "three" in written(template, three)
    with pytest.raises(TemplateStoppedError):
        written(template, two)
    assert "three" in written(template, three)
    assert pool.num_started >= 2


def test_one_tenants_loops_leave_a_worker_to_the_others() -> None:
    pool = TemplatePool(max_cpu_s=30.0)
    loops, good = ChatTemplate(HOSTILE["loops"], {}, pool), ChatTemplate(CHATML, {}, pool)
    loops._forms = {"user": "text"}
    futures = [loops.submit(CONVERSATIONS["user"], tenant="one") for _ in range(8)]
    assert "Hello" in good.submit(CONVERSATIONS["user"], tenant="other").result()
    assert not any(future.done() for future in futures)


def test_a_conversation_that_is_cancelled_while_it_waits_is_not_rendered() -> None:
    pool = TemplatePool()
    template = ChatTemplate(CHATML, {}, pool)
    with pool._changed:  # no thread takes anything meanwhile
        future = template.submit(CONVERSATIONS["user"])
        assert future.cancel()
    assert "Hello" in written(template, CONVERSATIONS["user"])
    assert future.cancelled()


def test_what_json_has_not_is_refused(pool: TemplatePool) -> None:
    with pytest.raises(InvalidRequestError, match="what JSON has not"):
        written(ChatTemplate(CHATML, {}, pool), CONVERSATIONS["user"], arguments={"x": object()})


def test_the_process_of_a_template_sees_no_environment_and_opens_no_file(pool: TemplatePool) -> None:
    assert "Hello" in written(ChatTemplate(CHATML, {}, pool), CONVERSATIONS["user"])
    from trencadis import processes

    running = [one for one in processes._RUNNING if one.poll() is None]
    process = next(one for one in running if "template_worker" in str(one.args))
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0") if entry}
    assert names <= {b"PYTHONPATH", b"LANG", b"LC_ALL", b"LC_TIME", b"LD_LIBRARY_PATH", b"TZ"}
    with open(f"/proc/{process.pid}/limits", encoding="ascii") as file:
        limits = {line[:25].strip(): line[25:].split()[0] for line in file}
    assert limits["Max open files"] == limits["Max processes"] == limits["Max file size"] == "0"


_PARENT = """
import os, signal, sys
from trencadis.text import encode_chat, load_tokenizer
from trencadis import processes
tokenizer = load_tokenizer("demo")
print(len(processes._RUNNING), flush=True)
encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])
print(next(iter(processes._RUNNING)).pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a closed pipe ends it")
def test_a_worker_starts_with_the_first_chat_and_ends_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "0\n"
    worker = int(parent.stdout.readline())
    ended = os.pidfd_open(worker)
    parent.kill()
    parent.communicate()
    import select

    assert select.select([ended], [], [], 60.0)[0]
    os.close(ended)


def test_an_own_template_of_a_call_goes_through_the_same_door(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="it calls itself without end"):
        encode_chat(tokenizer, CONVERSATIONS["user"], template_arguments={"chat_template": HOSTILE["calls_itself"]})


def test_a_template_for_tools_is_taken_where_tools_come(tokenizer: Tokenizer) -> None:
    several = Tokenizer(copy.copy(tokenizer._hf))
    several._hf.chat_template = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ messages[0].content }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]

    def text(**arguments: Any) -> str:
        return tokenizer.decode(encode_chat(several, CONVERSATIONS["user"], template_arguments=arguments))

    assert (text(), text(tools=tools), text(chat_template="tool_use")) == (
        "D Hello there",
        "T Hello there",
        "T Hello there",
    )


def test_code_that_comes_with_a_tokenizer_writes_chats_itself(tokenizer: Tokenizer) -> None:
    class Own(type(tokenizer._hf)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
            if conversation[0]["content"] == "bad":
                raise ValueError("no such word")
            return [7, len(conversation), int(options["add_generation_prompt"])]

    hf = copy.copy(tokenizer._hf)
    hf.__class__ = Own
    assert encode_chat(Tokenizer(hf), CONVERSATIONS["turns"]) == (7, 5, 1)
    with pytest.raises(InvalidRequestError, match="refused the messages: no such word"):
        encode_chat(Tokenizer(hf), [{"role": "user", "content": "bad"}])


def test_conversations_of_all_kinds_survive_the_pipe(pool: TemplatePool) -> None:
    text = json.loads('"a\\u0000\\u2028\\ud83d\\ude00\\r\\n\\u0085"') + "\N{PARAGRAPH SEPARATOR}"
    assert written(ChatTemplate("{{ messages[0].content }}", {}, pool), [{"role": "user", "content": text}]) == text
