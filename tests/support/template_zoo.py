"""A zoo of chat templates: one of each kind that published checkpoints bring, written for tests in their structure.

``ZOO`` are templates that serve: each with the form of content it wants and the roles whose text it writes. ``HOSTILE`` do what no
template should. All use the special tokens of :data:`SPECIAL`, whatever their models' are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CONVERSATIONS", "HOSTILE", "SPECIAL", "ZOO", "ZooTemplate"]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "additional_special_tokens": ["<a>", "<b>"]}


@dataclass(frozen=True)
class ZooTemplate:
    """A template, and what is true of it.

    Attributes:
        source: The template.
        forms: Form of content of the roles that differ from ``text``.
        lacks: Names of :data:`CONVERSATIONS` that it refuses itself.
        loses: Names of conversations of which it leaves out a text.
        end: Text that it writes after an assistant's text, if that is a special token.
    """

    source: str
    forms: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    loses: tuple[str, ...] = ()
    end: str = "<|im_end|>"


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


_SYSTEM = {"role": "system", "content": 'Answer in\n\n  one "word" & no more. Ünïcödé \\ 日本'}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
_RESULT = {
    "role": "tool",
    "tool_call_id": "call00001",
    "name": "weather",
    "content": '{"sky": "grey",\n "wind": "<b>5</b>"}',
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [_user("Hello there")],
    "spaces": [_user("  \n What is  this?\n\n\n```py\nprint('x')\n```  \n ")],
    "signs": [_user('He said "no" & <left> {{ messages }} {% raw %} \\n \\u00e9 \x00 😀👩‍👩‍👧 </think>')],
    "short": [_user("?")],
    "system": [_SYSTEM, _user("Where is the king?")],
    "turns": [_user("One?"), _assistant("Two."), _user("Three?"), _assistant("**Four**!"), _user("Five?")],
    "system_turns": [_SYSTEM, _user("One?"), _assistant("Two."), _user("Three?")],
    "thoughts": [
        _user("One?"),
        _assistant("<think>\nmaybe two, or three\n</think>\n\nTwo."),
        _user("And then?"),
    ],
    "reasoning": [_user("One?"), _assistant("Two.", reasoning_content="it follows one"), _user("And then?")],
    "empty_answer": [_user("One?"), _assistant(""), _user("And then?")],
    "long": [_user(" ".join(f"word{i}" for i in range(4000)))],
    "tool": [_user("How is the weather?"), _assistant("", tool_calls=[_CALL]), _RESULT],
    "tool_turns": [
        _user("How is the weather?"),
        _assistant("I look.", tool_calls=[_CALL]),
        _RESULT,
        _assistant("It is grey."),
        _user("Thanks. And the wind?"),
    ],
}

_TOOLS = ("tool", "tool_turns")
_SYSTEMS = ("system", "system_turns")

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# In the structure of Qwen 3: tools, thoughts that are dropped before the last question, tool results in turns of the user.
_THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Functions\\n<functions>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</functions><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string and not message.content.startswith('<result>') %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>\\n' + content + '\\n</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# In the structure of Mistral: turns must alternate, the system's text comes with the last question, ids of nine letters.
_MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- elif system_message is defined and message == user_messages[-1] %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception("ids have nine letters") }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/RESULTS]' }}
    {%- else %}
        {{- raise_exception("only user, system, assistant and tool") }}
    {%- endif %}
{%- endfor %}
"""

# In the structure of Gemma 2: no system, strict turns, the assistant is "model".
_GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<|im_start|>' + role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>model\\n'}}{% endif %}"
)

# In the structure of Gemma 3: texts or parts, the system's text before the first question.
_GEMMA_3 = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|im_start|>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\\n' }}{%- endif -%}
"""

# In the structure of gpt-oss: channels, a system turn of its own, the operator's text in a developer turn; what ends a text within an
# answer is not what ends the answer.
_HARMONY = """
{%- macro system() -%}
    {{- "Knowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {{- "# Valid channels: analysis, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + system() + "<|im_end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer = "" %}{%- set loop_messages = messages %}
{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer + "<|im_end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set future = namespace(found=false) %}
            {%- for later in loop_messages[loop.index:] %}
                {%- if later.role == 'assistant' and "tool_calls" not in later %}{%- set future.found = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and not future.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|im_end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" + call.arguments | tojson + "<|call|>" }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|im_end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "</s>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|im_end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name + " to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|im_end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|im_end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" }}{%- endif -%}
"""

# In the structure of GLM: nothing ends a turn but the next one's beginning; a macro reads texts and parts.
_GLM = """
{%- macro visible(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set thoughts = '' %}
{%- set content = visible(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set thoughts = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and thoughts -%}
{{ '\\n<think>' + thoughts.strip() + '</think>' }}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% for call in m.tool_calls or [] %}
{%- set call = call.function or call -%}
{{ '\\n<call>' + call.name }}
{% for k, v in call.arguments.items() %}
<key>{{ k }}</key>
<value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</value>
{% endfor %}
</call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<result>\\n' + visible(m.content) + '\\n</result>' }}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""

# In the structure of SmolVLM and other models that see: every content is a list.
_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':' }}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# Text of the system, parts of all others.
_MIXED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'system' %}{{ message.content + '' }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# For trainers: marks what the assistant said; with loop controls.
_GENERATION = """
{%- for message in messages %}
    {%- if loop.index0 > 1000 %}{%- break %}{%- endif %}
    {%- if message.role == 'nothing' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}
    {%- else -%}
        {{ message.content + '<|im_end|>' }}
    {%- endif -%}
    {{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# In the structure of the first Phi-3: roles that it does not know are left out without a word.
_SILENT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\\n' + '<|assistant|>' + '\\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
)

# As bases are prompted: no special token at all.
_PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role | capitalize + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\\n{% endif %}"
)

ZOO = {
    "chatml": ZooTemplate(_CHATML),
    "thinking": ZooTemplate(_THINKING),
    "mistral": ZooTemplate(_MISTRAL, end="</s>"),
    "gemma_2": ZooTemplate(_GEMMA_2, lacks=(*_SYSTEMS, *_TOOLS)),
    "gemma_3": ZooTemplate(_GEMMA_3, lacks=_TOOLS),
    "harmony": ZooTemplate(_HARMONY),
    "glm": ZooTemplate(_GLM, end="<|user|>"),
    "parts": ZooTemplate(_PARTS, forms=("user", "system", "assistant", "tool")),
    "mixed": ZooTemplate(_MIXED, forms=("user", "assistant", "tool")),
    "generation": ZooTemplate(_GENERATION),
    "silent": ZooTemplate(_SILENT, loses=(*_SYSTEMS, *_TOOLS)),
    "plain": ZooTemplate(_PLAIN, end=""),
}

_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"

HOSTILE = {
    "loops": _LOOP,
    "loops_after_text": _CHATML + _LOOP,
    "fills_memory": "{{ 'a' * 30000000000 }}",
    "grows": "{% set ns = namespace(a='aaaaaaaaaa') %}{% for i in range(30) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "writes_without_end": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "calls_itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "reaches_for_classes": "{{ messages.__class__.__mro__ }}",
    "reaches_for_globals": "{{ raise_exception.__globals__ }}",
    "is_no_template": "{% for %}",
    "raises": "{{ raise_exception('not today') }}",
    "divides_by_zero": "{{ 1 // 0 }}",
    "writes_nothing": "",
}
