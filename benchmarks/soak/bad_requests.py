"""Generator of bad requests with a seed: every endpoint and field of the server's OpenAPI document, and what a document cannot say.

    document ▶ fields, their schemas ▶ values that break or just keep them ▶ Case (method, path, headers, body)

Case ``i`` of a seed depends on the seed, the index and the document alone, so one case can be made again by itself. New
fields are covered as soon as the document has them.
"""

# ruff: noqa: ARG005, PLW0108 - tables of functions that all take the same arguments

from __future__ import annotations

import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["KINDS", "BadRequests", "Case", "dump"]

Json = Any
JSON = {"content-type": "application/json"}
MODEL = "demo"


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: Seed, index and kind, to make it again and to read in a report.
        method: HTTP method.
        path: Path with query, as sent.
        headers: Without Host and Content-Length.
        body: As sent.
        is_admin: For the administration's port.
        must_refuse: It cannot be served: an answer 2xx is a defect, too.
    """

    name: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_admin: bool = False
    must_refuse: bool = False


class Raw(float):
    """A number written as given, such as ``1e999``, which Python's floats cannot hold."""

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, 0.0)
        made.text = text
        return made

    text: str

    def __repr__(self) -> str:
        return self.text


class Pairs(dict):  # type: ignore[type-arg]
    """An object with keys that occur more than once."""

    def __init__(self, pairs: list[tuple[str, Json]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def dump(value: Json) -> bytes:
    """Return JSON as bytes; numbers without end and half surrogates are written as they are. Iterative, for deep values."""
    parts: list[str] = []
    stack: list[Json] = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, _Text):
            parts.append(one)
        elif isinstance(one, Raw):
            parts.append(one.text)
        elif isinstance(one, Pairs) or (isinstance(one, dict) and not _is_flat(one)):
            pairs = one.pairs if isinstance(one, Pairs) else list(one.items())
            items: list[Json] = [_Text("{")]
            for index, (name, inner) in enumerate(pairs):
                items += [_Text(("," if index else "") + json.dumps(name) + ":"), inner]
            stack += reversed([*items, _Text("}")])
        elif isinstance(one, list) and not _is_flat(one):
            items = [_Text("[")]
            for index, inner in enumerate(one):
                items += [_Text(",") if index else _Text(""), inner]
            stack += reversed([*items, _Text("]")])
        else:
            parts.append(json.dumps(one))
    return "".join(parts).encode("ascii")


class _Text(str):
    """JSON that is written already."""


def _is_flat(value: Json) -> bool:
    """Return whether the standard library can write a container: nothing in it is a container or a number of ours."""
    inner = value.values() if isinstance(value, dict) else value
    return not any(isinstance(one, dict | list | Raw) for one in inner)


def deep(levels: int, *, kind: str = "list", leaf: Json = 1) -> Json:
    """Return a value nested so many levels."""
    for _ in range(levels):
        leaf = [leaf] if kind == "list" else {"a": leaf}
    return leaf


# Values -----------------------------------------------------------------------------------------------------------------

NUMBERS: tuple[Json, ...] = (
    0, -1, 1, 2, 3.5, -0.0, 1e-320, 5e-324, 1e-45, 1e-7, 1e38, 3.5e38, 1e308, -1e308, 2**31 - 1, 2**31, -(2**31) - 1,
    2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30), Raw("1e999"), Raw("-1e999"),
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1" + "0" * 400), Raw("9" * 5000), Raw("0." + "1" * 5000),
    Raw("1E-99999"), Raw("-0"), Raw("1.0"), Raw("01"), Raw("+1"), Raw(".5"), Raw("0x10"),
)  # fmt: skip

TEXTS: tuple[str, ...] = (
    "", " ", "\x00", "a\x00b", "\ud800", "a\udfffb", "\udc00\ud800", "\ufffe", "\uffff", "\ufeff", "\u202e", "é", "e\u0301" * 50,
    "👩‍👩‍👧‍👦" * 20, "\U0010ffff", "<|endoftext|>", "<s>", "</s>", "<|im_end|>", "{{7*7}}", "{% for x in range(10**9) %}x{% endfor %}",
    "{}", "%s%n", "../../etc/passwd", "null", "\r\nx: y", "𝕳𝖊𝖑𝖑𝖔", "ﷺ" * 100, "\u0300" * 1000, "a" * 1025, "x" * 5000,
    "\n" * 3000, "\x1b[31m", "127.0.0.1:22", "demo\x00", "ТEST", "ß" * 300, "\u2028",
)  # fmt: skip

LARGE_TEXTS: tuple[Callable[[], str], ...] = (
    lambda: "a" * 1_000_000,
    lambda: "a " * 300_000,
    lambda: "\x00" * 200_000,
    lambda: "é" * 400_000,
    lambda: "🧨" * 100_000,
    lambda: "\ud800" * 50_000,
    lambda: "<|endoftext|>" * 20_000,
    lambda: " " * 2_000_000,
    lambda: "a" * 65_537,
    lambda: "0123456789" * 50_000,
)

KEYS: tuple[str, ...] = (
    "",
    "\ud800",
    "a" * 200_000,
    "\x00",
    "__proto__",
    "__class__",
    "model",
    "a.b[0]",
    "0",
    "-1",
    "1e3",
    "99999",
    "é",
)


def any_value(rng: random.Random, depth: int = 0) -> Json:
    """Return a small value of any type."""
    choice = rng.randrange(8 if depth < 3 else 5)
    if choice == 0:
        return None
    if choice == 1:
        return rng.random() < 0.5
    if choice == 2:
        return rng.choice(NUMBERS)
    if choice in {3, 4}:
        return rng.choice(TEXTS)
    if choice in {5, 6}:
        return [any_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5)))]
    return {
        rng.choice(KEYS) if rng.random() < 0.5 else f"k{i}": any_value(rng, depth + 1)
        for i in range(rng.choice((0, 1, 3)))
    }


def large_value(rng: random.Random) -> Json:
    """Return a value of a megabyte or so, in one of the shapes that are expensive to look at."""
    size = rng.choice((10_000, 100_000, 300_000))
    return rng.choice(
        (
            lambda: list(range(size)),
            lambda: [0] * size,
            lambda: ["x"] * size,
            lambda: [""] * size,
            lambda: [[]] * size,
            lambda: [{}] * size,
            lambda: [None] * size,
            lambda: [1.5] * size,
            lambda: [2**70] * (size // 10),
            lambda: [[1]] * (size // 10),
            lambda: {str(i): 1 for i in range(size)},
            lambda: {str(i): -100.0 for i in range(size)},
            lambda: {f"k{i}": "v" for i in range(size // 3)},
            lambda: {"A" * 1_000_000: [""] * size},
            lambda: {"A" * 300_000: {str(i): {} for i in range(size // 5)}},
            lambda: Pairs([("a", 1)] * size),
            lambda: deep(rng.choice((33, 200, 1000, 5000, 50_000))),
            lambda: deep(rng.choice((33, 200, 1000, 5000, 50_000)), kind="dict"),
            lambda: {"a": deep(1000, leaf=10**30)},
            lambda: [1, "\ud800"],
            lambda: rng.choice(LARGE_TEXTS)(),
        )
    )()


# Grammars ---------------------------------------------------------------------------------------------------------------

REGEXES: tuple[Callable[[], str], ...] = (
    lambda: ".*" * 10_000 + "x",
    lambda: ".*" * 500 + "x",
    lambda: "(a*)*b",
    lambda: "(a+)+$",
    lambda: "(a|a)*" * 20 + "b",
    lambda: "a{1000000}",
    lambda: "(a{1000}){1000}",
    lambda: "((a{100}){100}){100}",
    lambda: "(.{0,1000}){0,1000}",
    lambda: ".*a.{20}",
    lambda: ".*a.{200}",
    lambda: "(x+x+)+y",
    lambda: "(" * 5_000 + "a" + ")" * 5_000,
    lambda: "(" * 60_000,
    lambda: "|".join(f"w{i}" for i in range(10_000)),
    lambda: "[" + "a-z" * 20_000 + "]",
    lambda: "[\\p{L}\\p{N}]{1,5000}",
    lambda: "\\w{1,30000}",
    lambda: "(?=a)b",
    lambda: "(a)\\1",
    lambda: "[z-a]",
    lambda: "a{5,2}",
    lambda: "*a",
    lambda: "\\",
    lambda: "\ud800",
    lambda: "\x00+",
    lambda: "(?i)" + "k" * 30_000,
    lambda: "a?" * 3_000 + "a" * 3_000,
    lambda: "[^\\x00-\\x{10ffff}]",
    lambda: "(?P<n>a)(?P<n>b)",
    lambda: "",
    lambda: "é{1,4000}" * 10,
    lambda: ".{1,60000}",
)

GRAMMARS: tuple[Callable[[], str], ...] = (
    lambda: 'start: "a" start',
    lambda: "start: start",
    lambda: 'start: start start | "a"',
    lambda: 'start: a\na: b\nb: a | "x"',
    lambda: "start: missing",
    lambda: 'start: "a"{1000000}',
    lambda: 'start: ("a"{1000}){1000}',
    lambda: 'root ::= "a"{1,100000}',
    lambda: 'root ::= root root | "" ',
    lambda: 'root ::= (("a"?)*)*',
    lambda: "root ::= " + "(" * 10_000,
    lambda: "start: " + " | ".join(f'"w{i}"' for i in range(5_000)),
    lambda: "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(200)), 'r200: "a"']),
    lambda: "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3_000)), 'r3000: "a"']),
    lambda: "start: /.*/ " * 2_000,
    lambda: "start: /(a+)+b/",
    lambda: "start: /.*a.{300}/",
    lambda: "%ignore /.*/\nstart: /.*/",
    lambda: "start: %json {}",
    lambda: 'start: %json {"type": "array", "minItems": 1000000000}',
    lambda: "start: \x00",
    lambda: "\ud800",
    lambda: "a" * 65_536,
    lambda: "",
)

SCHEMAS: tuple[Callable[[], Json], ...] = (
    lambda: {"$ref": "#"},
    lambda: {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}},
    lambda: {"$ref": "http://127.0.0.1:1/schema.json"},
    lambda: {"$ref": "file:///etc/passwd"},
    lambda: {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    lambda: {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    lambda: {"type": "array", "minItems": 10**30},
    lambda: {"type": "array", "minItems": 5_000, "maxItems": 10_000, "items": {"type": "array", "minItems": 500}},
    lambda: {"type": "string", "minLength": 10**7},
    lambda: {"type": "string", "maxLength": -1},
    lambda: {"type": "string", "minLength": 5, "maxLength": 1},
    lambda: {"type": "string", "pattern": ".*" * 5_000 + "x"},
    lambda: {"type": "string", "pattern": "(a{1000}){1000}"},
    lambda: {"type": "string", "pattern": "("},
    lambda: {"type": "integer", "minimum": 10**40, "maximum": 10**41},
    lambda: {"type": "integer", "minimum": 5, "maximum": 1},
    lambda: {"type": "number", "multipleOf": 0},
    lambda: {"type": "number", "multipleOf": 1e-300},
    lambda: {"enum": list(range(16_000))},
    lambda: {"enum": []},
    lambda: {"enum": ["x" * 1000] * 1000},
    lambda: {"const": "x" * 60_000},
    lambda: {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(1_000)]},
    lambda: {"oneOf": [{"type": "integer"}] * 500},
    lambda: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3_000)}},
    lambda: {"type": "object", "required": [f"p{i}" for i in range(2_000)]},
    lambda: {"type": "object", "patternProperties": {"(a+)+": {}}},
    lambda: {"not": {}},
    lambda: False,
    lambda: {"type": "nonsense"},
    lambda: {"type": ["string", "nonsense"]},
    lambda: {"type": 5},
    lambda: {"properties": 5},
    lambda: _nested_schema(20),
    lambda: _nested_schema(31),
    lambda: _nested_schema(300),
    lambda: _wide_schema(6, 4),
    lambda: {"format": "date-time", "type": "string"},
    lambda: {"type": "object", "additionalProperties": {"$ref": "#"}},
    lambda: {"\ud800": 1},
    lambda: {"type": "string", "const": "\ud800"},
    lambda: {"x": 10**30},
    dict,
)


def _nested_schema(levels: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _wide_schema(levels: int, width: int) -> Json:
    if not levels:
        return {"type": "integer"}
    inner = _wide_schema(levels - 1, width)
    return {"type": "object", "properties": {f"p{i}": inner for i in range(width)}}


# Prompts ----------------------------------------------------------------------------------------------------------------

PROMPTS: tuple[Callable[[random.Random], Json], ...] = (
    lambda rng: rng.choice(TEXTS),
    lambda rng: rng.choice(LARGE_TEXTS)(),
    lambda rng: [rng.randrange(512) for _ in range(rng.choice((1, 7, 2047, 2048, 2049, 5000)))],
    lambda rng: [rng.choice((-1, 0, 511, 512, 4096, 2**31 - 1, 2**31, 2**63, 2**64, 10**30))],
    lambda rng: [5, rng.choice((True, None, "a", 1.5, [], {}, "\ud800", 10**30))],
    lambda rng: [rng.choice(TEXTS) for _ in range(rng.choice((2, 10, 100)))],
    lambda rng: [[5]] * rng.choice((2, 65, 1025, 16_385)),
    lambda rng: ["x"] * rng.choice((65, 1025, 16_385, 100_000)),
    lambda rng: [[5], "a", [[6]]],
    lambda rng: [[]],
    lambda rng: [],
    lambda rng: [""],
    lambda rng: [1] * rng.choice((100_000, 1_000_000, 5_000_000)),
    lambda rng: [[1] * 3000] * 20,
    lambda rng: any_value(rng),
)


def messages(rng: random.Random) -> Json:
    """Return a conversation that is wrong somewhere, or long."""
    roles = ("user", "assistant", "system", "developer", "tool", "function", "root", "", None, 5, "\ud800")
    content = rng.choice(
        (
            lambda: rng.choice(TEXTS),
            lambda: rng.choice(LARGE_TEXTS)(),
            lambda: [{"type": "text", "text": rng.choice(TEXTS)}] * rng.choice((1, 50, 17_000)),
            lambda: [{"type": rng.choice(("image_url", "input_audio", "text", "", None)), "text": "x"}],
            lambda: [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
            lambda: any_value(rng),
            lambda: None,
        )
    )()
    message = {"role": rng.choice(roles[: 3 if rng.random() < 0.6 else None]), "content": content}
    if rng.random() < 0.3:
        name = rng.choice(("name", "tool_calls", "tool_call_id", "function_call", "audio", "annotations", "nonsense"))
        message[name] = large_value(rng) if rng.random() < 0.2 else any_value(rng)
    count = rng.choice((1, 1, 1, 2, 40, 16_384, 20_000))
    return [message] * max(1, min(count, 3_000_000 // (len(dump(message)) + 1)))


TEMPLATE_KWARGS: tuple[Json, ...] = (
    {"messages": []}, {"tools": [{}] * 1000}, {"add_generation_prompt": "x"}, {"bos_token": "x" * 100_000}, {"raise_exception": 1},
    {"enable_thinking": 10**30}, {"self": 1}, {"tokenize": True}, {"chat_template": "{{ 7 * 7 }}"}, {"return_tensors": "pt"},
    {"\ud800": 1}, {"": ""}, {"conversation": []}, {"max_length": 1}, {"documents": deep(500)}, {"tokenizer": 1},
)  # fmt: skip


def transfer_params(rng: random.Random) -> Json:
    """Return parameters for a KV connector: floods, and the names that connectors read with values they do not expect."""
    names = (
        "do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "remote_block_ids", "remote_engine_id",
        "remote_request_id", "tp_size", "transfer_id", "host", "port", "address", "request_id", "namespace", "p2p", "tenant",
    )  # fmt: skip
    values = (*NUMBERS, *TEXTS, True, None, [], {}, [1] * 10_000, "127.0.0.1", 22, 65_536, ["127.0.0.1", 1])
    if rng.random() < 0.2:
        return large_value(rng)
    return {rng.choice(names): rng.choice(values) for _ in range(rng.choice((1, 3, 8, 65)))}


def processors(rng: random.Random) -> Json:
    """Return arguments of logits processors."""
    argument = rng.choice(
        (10**30, [1, "\ud800"], "\ud800", deep(1000), deep(40, kind="dict"), Raw("NaN"), [10**30], {"\ud800": 1})
    )
    return rng.choice(
        (
            {"x": {"a": argument}},
            {"x": argument},
            {"\ud800": {}},
            {f"p{i}": {} for i in range(100)},
            any_value(rng),
            large_value(rng),
        )
    )


SPECIAL: dict[str, Callable[[random.Random], Json]] = {
    "prompt": lambda rng: rng.choice(PROMPTS)(rng),
    "input": lambda rng: rng.choice(PROMPTS)(rng),
    "tokens": lambda rng: rng.choice(PROMPTS)(rng),
    "messages": messages,
    "guided_regex": lambda rng: rng.choice(REGEXES)(),
    "guided_grammar": lambda rng: rng.choice(GRAMMARS)(),
    "guided_json": lambda rng: rng.choice(SCHEMAS)(),
    "guided_choice": lambda rng: rng.choice(
        ([], [""], ["a"] * 1025, ["a" * 60_000] * 20, ["\ud800"], [1], [f"c{i}" for i in range(1024)])
    ),
    "structured_outputs": lambda rng: rng.choice(
        (
            {"regex": rng.choice(REGEXES)()},
            {"grammar": rng.choice(GRAMMARS)()},
            {"json": rng.choice(SCHEMAS)()},
            {"json": "{" * 1000},
            {"choice": ["a"] * 20_000},
            {"json_object": "yes"},
            {"regex": "a", "json": {}},
            {"nonsense": 1},
            {},
        )
    ),
    "response_format": lambda rng: rng.choice(
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": rng.choice(SCHEMAS)()}},
            {"type": "json_schema"},
            {"type": "json_object", "json_schema": 5},
            {"type": rng.choice(TEXTS)},
            {"type": "text", "x": large_value(rng)},
        )
    ),
    "logit_bias": lambda rng: rng.choice(
        (
            {str(i): 1 for i in range(rng.choice((1_000, 100_000, 1_000_000)))},
            {"999999999": 100},
            {"512": 1},
            {"-1": 1},
            {"1": Raw("NaN")},
            {"1": 101},
            {str(i): -100 for i in range(512)},
            {"a": 1},
            {"٣": 1},
            {"0" * 9: 1},
            Pairs([("1", 1)] * 1000),
        )
    ),
    "allowed_token_ids": lambda rng: rng.choice(
        ([], [0], [1], [2**31 - 1], [511, 512], [0] * 1_000_000, list(range(600)), [1.5], ["1"])
    ),
    "stop_token_ids": lambda rng: rng.choice(([], [2**31 - 1], list(range(100_000)), [-1], list(range(512)))),
    "stop": lambda rng: rng.choice(("", ["a"] * 17, ["a" * 1025], ["\ud800"], ["e", " ", "a"], ["\x00"], [""])),
    "bad_words": lambda rng: rng.choice(
        ([f"w{i}" for i in range(1000)], ["a" * 256] * 1000, ["a"] * 1001, [""], ["\ud800"], [" "])
    ),
    "dry_sequence_breakers": lambda rng: rng.choice((["\ud800"], ["a" * 257], ["a"] * 17, [""], [1])),
    "kv_transfer_params": transfer_params,
    "logits_processors": processors,
    "chat_template_kwargs": lambda rng: rng.choice(TEMPLATE_KWARGS),
    "model": lambda rng: rng.choice((*TEXTS, "Demo", "demo ", "x" * 100_000, None, 5, ["demo"])),
    "n": lambda rng: rng.choice((0, -1, 128, 129, 10**9, 10**30, 1.0, "1")),
    "best_of": lambda rng: rng.choice((0, 1, 20, 128, 10**9)),
    "seed": lambda rng: rng.choice((2**63, -(2**63), 10**30, 0.5, "1")),
}
"""Fields whose dangers their types do not show."""


# Fields by schema -------------------------------------------------------------------------------------------------------


def resolve(schema: Json, document: Json) -> Json:
    """Return a schema with its reference followed."""
    while isinstance(schema, dict) and "$ref" in schema:
        found: Json = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def alternatives(schema: Json, document: Json) -> list[Json]:
    """Return the schemas of which one must hold, without null."""
    schema = resolve(schema, document)
    found = [
        inner
        for one in schema.get("anyOf", [schema])
        for inner in (
            [resolve(one, document)] if "anyOf" not in resolve(one, document) else alternatives(one, document)
        )
    ]
    return [one for one in found if one.get("type") != "null"]


def edge_value(schema: Json, document: Json, rng: random.Random, depth: int = 0) -> Json:
    """Return a value at, or just beyond, an edge of what a schema allows; also many that it does allow."""
    one = rng.choice(alternatives(schema, document) or [{}])
    if "enum" in one and rng.random() < 0.7:
        return rng.choice(one["enum"])
    if "const" in one:
        return one["const"]
    match one.get("type"):
        case "integer":
            return rng.choice([int(edge) + step for edge in _edges(one) for step in (-1, 0, 1)])
        case "number":
            return rng.choice([edge + step for edge in _edges(one) for step in (-1e-9, 0, 1e-9, 5e-324)])
        case "boolean":
            return rng.random() < 0.5
        case "string":
            return _edge_text(one, rng)
        case "array":
            if depth > 4:
                return []
            count = rng.choice((0, 1, 2, min(one.get("maxItems", 3), 300), min(one.get("maxItems", 3), 300) + 1))
            return [edge_value(one.get("items", {}), document, rng, depth + 1) for _ in range(count)]
        case "object":
            return _edge_object(one, document, rng, depth)
    return any_value(rng)


def _edges(schema: Json) -> list[Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return [schema[name] for name in names if name in schema] or [0, 2**31, 1e6]


def _edge_text(schema: Json, rng: random.Random) -> str:
    sizes = [
        0,
        1,
        schema.get("minLength", 0),
        min(schema.get("maxLength", 100), 70_000),
        min(schema.get("maxLength", 100), 70_000) + 1,
    ]
    return rng.choice(TEXTS) if rng.random() < 0.4 else rng.choice("aé\x00 7") * rng.choice(sizes)


def _edge_object(schema: Json, document: Json, rng: random.Random, depth: int) -> Json:
    if depth > 4:
        return {}
    made = {}
    for name, inner in schema.get("properties", {}).items():
        if name in schema.get("required", ()) or rng.random() < 0.3:
            made[name] = edge_value(inner, document, rng, depth + 1)
    if "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
        made["more"] = edge_value(schema["additionalProperties"], document, rng, depth + 1)
    if rng.random() < 0.1:
        made[rng.choice(KEYS)] = any_value(rng)
    return made


# The generator ----------------------------------------------------------------------------------------------------------

GOOD: dict[str, Json] = {
    "/v1/completions": {"model": MODEL, "prompt": "The ship", "max_tokens": 3},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3},
    "/v1/embeddings": {"model": MODEL, "input": "The ship"},
    "/tokenize": {"model": MODEL, "prompt": "The ship"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
}
"""Requests that are answered 200, from which bad ones are made."""


class BadRequests:
    """The bad requests of one seed.

    Args:
        seed: Of the whole series.
        document: The server's OpenAPI document.
        kinds: Names of :data:`KINDS` to draw from; all by default.
    """

    def __init__(self, seed: int, document: Json, kinds: tuple[str, ...] = ()) -> None:
        self.seed = seed
        self.document = document
        self.bodies: dict[str, dict[str, Json]] = {}
        for path, operations in document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            schema = resolve(content.get("application/json", {}).get("schema", {}), document)
            if schema.get("properties"):
                self.bodies[path] = schema["properties"]
        self._kinds = [kind for kind in KINDS if not kinds or kind in kinds]
        self._weights = [KINDS[kind][1] for kind in self._kinds]

    def case(self, index: int) -> Case:
        """Return one case of the series."""
        rng = random.Random(f"{self.seed}:{index}")
        kind = rng.choices(self._kinds, self._weights)[0]
        case: Case = KINDS[kind][0](self, rng)
        return Case(**{**case.__dict__, "name": f"{self.seed}:{index} {kind} {case.name}".strip()})

    def __iter__(self) -> Iterator[Case]:
        """Yield the series, which has no end."""
        index = 0
        while True:
            yield self.case(index)
            index += 1

    def _path(self, rng: random.Random) -> str:
        """Return an endpoint that takes a body; generation more often, since it has the most fields."""
        paths = sorted(self.bodies)
        return rng.choices(paths, [8 if "completions" in path else 1 for path in paths])[0]

    def _post(self, name: str, path: str, body: Json, **more: Any) -> Case:
        return Case(f"{path} {name}", "POST", path, JSON, body if isinstance(body, bytes) else dump(body), **more)

    def _good(self, path: str, rng: random.Random) -> dict[str, Json]:
        good = dict(GOOD.get(path, {"model": MODEL}))
        if "completions" in path:
            good |= {
                "max_tokens": rng.choice((1, 2, 8)),
                "temperature": rng.choice((0, 0.7, 2)),
                "stream": rng.random() < 0.3,
            }
        return good

    # Kinds

    def wrong_type(self, rng: random.Random) -> Case:
        path = self._path(rng)
        name = rng.choice(sorted(self.bodies[path]))
        return self._post(name, path, self._good(path, rng) | {name: any_value(rng)})

    def edge(self, rng: random.Random) -> Case:
        path = self._path(rng)
        name = rng.choice(sorted(self.bodies[path]))
        value = edge_value(self.bodies[path][name], self.document, rng)
        return self._post(name, path, self._good(path, rng) | {name: value})

    def combination(self, rng: random.Random) -> Case:
        """Many fields at their edges at once: contradictions."""
        path = self._path(rng)
        names = rng.sample(sorted(self.bodies[path]), min(rng.choice((2, 3, 6, 12)), len(self.bodies[path])))
        kept = [name for name in names if name not in {"model", "prompt", "messages", "weight"}]
        body = self._good(path, rng)
        for name in kept:
            body[name] = _kept(self.bodies[path][name], self.document, rng)
        return self._post("+".join(kept), path, _modest(body))

    def special(self, rng: random.Random) -> Case:
        path = self._path(rng)
        name = rng.choice(sorted(SPECIAL.keys() & self.bodies[path].keys()))
        return self._post(name, path, self._good(path, rng) | {name: SPECIAL[name](rng)})

    def grammar(self, rng: random.Random) -> Case:
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        name = rng.choice(("guided_regex", "guided_grammar", "guided_json", "structured_outputs", "response_format"))
        return self._post(name, path, self._good(path, rng) | {name: SPECIAL[name](rng)})

    def impossible(self, rng: random.Random) -> Case:
        """Well-formed fields that contradict each other, or cannot be held."""
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        name, fields = rng.choice(_contradictions(rng))
        return self._post(name, path, self._good(path, rng) | fields)

    def large(self, rng: random.Random) -> Case:
        path = self._path(rng)
        name = rng.choice([*sorted(self.bodies[path]), "nonsense"])
        return self._post(name, path, self._good(path, rng) | {name: large_value(rng)})

    def unknown(self, rng: random.Random) -> Case:
        path = self._path(rng)
        known = rng.choice(sorted(self.bodies[path]))
        name = rng.choice(
            (known[:-1], known + "s", known.upper(), rng.choice(KEYS), "x" * 500_000, known.replace("_", "-") + "-")
        )
        return self._post(ascii(name[:30]), path, self._good(path, rng) | {name: any_value(rng)})

    def not_json(self, rng: random.Random) -> Case:
        path = self._path(rng)
        good = dump(self._good(path, rng))
        body = rng.choice(
            (
                b"", b"{", b"null", b"[]", b'"x"', b"5", b"\xff\xfe{}", b"\xef\xbb\xbf" + good, good[: rng.randrange(len(good))], good + good,
                good + b"\x00", good.decode().encode("utf-16"), good.decode().encode("utf-32"), b"\x00" * 1000, b"\xff" * 1000, b" " * 1_000_000,
                b"[" * 100_000, b'{"a":' * 100_000, b"[" * 50_000 + b"]" * 50_000, good[:-1] + b',"model":5}', good[:-1] + b',"a":"\xed\xa0\x80"}',
                b"{" + b'"model":"demo",' * 100_000 + b'"prompt":"x"}', good[:-1] + b",}", good.replace(b'"', b"'"), b"model=demo&prompt=x",
                bytes(rng.randrange(256) for _ in range(300)), good[:-1] + b',"max_tokens":' + b"9" * 1_000_000 + b"}",
            )
        )  # fmt: skip
        return self._post(ascii(body[:20]), path, body)

    def flipped(self, rng: random.Random) -> Case:
        """A good body with some bytes changed."""
        path = self._path(rng)
        body = bytearray(dump(self._good(path, rng)))
        for _ in range(rng.choice((1, 2, 5))):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return self._post("", path, bytes(body))

    def headers(self, rng: random.Random) -> Case:
        path = self._path(rng)
        body = dump(self._good(path, rng))
        name, value, sent = rng.choice(
            (
                ("content-type", "text/plain", body), ("content-type", "application/json; charset=utf-16", body), ("content-type", "", body),
                ("content-type", "application/json; charset=nonsense", body), ("content-type", "x" * 30_000, body),
                ("content-type", "application/json; charset=utf-16", body.decode().encode("utf-16")),
                ("content-type", "multipart/form-data; boundary=x", body), ("content-encoding", "gzip", gzip.compress(body)),
                ("content-encoding", "gzip", _bomb()), ("content-encoding", "deflate", zlib.compress(body)),
                ("content-encoding", "br", body), ("content-encoding", "gzip", body), ("content-encoding", "identity, gzip", gzip.compress(body)),
                ("authorization", "Bearer " + "x" * 10_000, body), ("authorization", "Basic !!!", body), ("authorization", "\xff\xfe", body),
                ("x-request-id", "\xe9" * 300, body), ("x-request-id", "a" * 5000, body), ("x-request-id", "../../x", body),
                ("accept", "image/png", body), ("accept-encoding", "gzip;q=nan", body), ("expect", "200-maybe", body),
                ("origin", "null", body), ("range", "bytes=0-", body), ("upgrade", "websocket", body), ("upgrade", "h2c", body),
                ("connection", "upgrade, close", body), ("x-forwarded-for", "1.2.3.4" * 1000, body), ("te", "trailers" * 100, body),
                ("cookie", "a=b; " * 5000, body), ("transfer-encoding", "gzip", body), ("transfer-encoding", "identity", body),
            )
        )  # fmt: skip
        return Case(f"{path} {name}: {value[:30]!a}", "POST", path, {**JSON, name: value}, sent)

    def route(self, rng: random.Random) -> Case:
        path = rng.choice(
            (
                "/v1/models/" + "x" * rng.choice((1, 3000, 60_000)), "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..%2fetc", "/v1/models/a/b",
                "/v1/models?" + "a=b&" * 5000, "//v1/models", "/v1//completions", "/v1/completions/", "/../../etc/passwd", "/%2e%2e/", "/v1/models/%ed%a0%80",
                "*", "/", "/v1", "/admin/plugins", "/openapi.json?x", "/metrics?name[]=x", "/v1/completions#x", "/v1/models/%", "/health%20", "/v1/models/\x7f",
                "/" + "a/" * 10_000, "/v1/models/{name}", "/tokenize;x=1", "http://127.0.0.1:1/v1/models", "/v1/models/%F0%9F%A7%A8",
            )
        )  # fmt: skip
        method = rng.choice(
            ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY", "get", "BREW", "PROPFIND")
        )
        return Case(
            f"{method} {path[:40]}", method, path, JSON if method == "POST" else {}, b"{}" if method == "POST" else b""
        )

    def admin(self, rng: random.Random) -> Case:
        path = rng.choice(
            ("/admin/scheduling", "/admin/scheduling", "/admin/role", "/admin/plugins", "/admin/explain/")
        )
        if path == "/admin/explain/":
            name = rng.choice(("x", "%ff", "../x", "x" * 5000, "%00", "a/b/c", "%ed%a0%80", ""))
            return Case(f"explain {name[:20]}", "GET", path + name, is_admin=True)
        value = rng.choice(
            (
                "\ud800",
                10**30,
                "fcfs",
                "nonsense",
                "os:system",
                "no.such.module:X",
                "x" * 50_000,
                5,
                None,
                [],
                {},
                deep(1000),
                "\x00",
            )
        )
        body: Json = {rng.choice(("name", "shadow", "role", "options", "nonsense", "\ud800")): value}
        if rng.random() < 0.4:
            body = {
                "name": "fcfs",
                "options": rng.choice(
                    ({"a": 10**30}, {"\ud800": 1}, {"x": "\ud800"}, [1], {"aging_s": Raw("NaN")}, deep(40, kind="dict"))
                ),
            }
        if rng.random() < 0.1:
            body = rng.choice(([], 5, None, "x", {}, [[]] * 5000))
        more = (
            {"host": rng.choice(("example.com", "127.0.0.1.example.com", "[::1", "x" * 500))}
            if rng.random() < 0.15
            else {}
        )
        return Case(f"{path}", "POST", path, {**JSON, **more}, dump(body), is_admin=True)

    def storm(self, rng: random.Random) -> Case:
        """Requests that may be served, but ask for as much as they can; the client leaves after some seconds."""
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        fields = rng.choice(
            (
                {
                    "n": 128,
                    "max_tokens": 1,
                    "logprobs": 50 if path == "/v1/completions" else True,
                    **({} if path == "/v1/completions" else {"top_logprobs": 50}),
                },
                {"prompt_logprobs": 50, "max_tokens": 1},
                {"n": 64, "max_tokens": 20},
                {"max_tokens": 2000, "ignore_eos": True, "stream": True},
                {"max_tokens": 500, "stream": True, "logprobs": 20 if path == "/v1/completions" else True},
                {"use_beam_search": True, "n": 16, "max_tokens": 20},
                {"bad_words": [f"word{i}" for i in range(1000)], "max_tokens": 4},
                {"logit_bias": {str(i): -100 for i in range(500)}, "max_tokens": 4},
                {"no_repeat_ngram_size": 2, "dry_multiplier": 1, "max_tokens": 100},
                {"stop": ["x" * 1000 + str(i) for i in range(16)], "max_tokens": 100},
                {"repetition_penalty": 1e-320, "max_tokens": 4},
                {"allowed_token_ids": [0], "min_tokens": 4, "max_tokens": 4},
                {"guided_regex": "a{1000000}", "max_tokens": 4},
                {"prompt": [[5, 6, 7]] * 200, "max_tokens": 4} if path == "/v1/completions" else {"n": 100},
                {"prompt": "word " * 400, "prompt_logprobs": 50, "max_tokens": 1}
                if path == "/v1/completions"
                else {"n": 20},
            )
        )
        return self._post("+".join(fields), path, self._good(path, rng) | fields)


@functools.cache
def _bomb() -> bytes:
    """Return 30 MB of spaces in 30 KB."""
    return gzip.compress(b" " * 30_000_000)


def _kept(schema: Json, document: Json, rng: random.Random) -> Json:
    """Return a value that mostly keeps to its schema: the parts are sound, the whole may not be."""
    one = rng.choice(alternatives(schema, document) or [{}])
    if "enum" in one:
        return rng.choice(one["enum"])
    if one.get("type") in {"integer", "number"}:
        low = one.get("minimum", one.get("exclusiveMinimum", 0) + (0 if "minimum" in one else 1e-3))
        high = min(one.get("maximum", one.get("exclusiveMaximum", 1e6)), 1e6)
        value = rng.choice((low, high, (low + high) / 2, 1, 0))
        return int(value) if one["type"] == "integer" else float(value)
    return edge_value(one, document, rng)


def _modest(body: dict[str, Json]) -> dict[str, Json]:
    """Keep a sound request from running for minutes: it is its fields that are tried."""
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int | float) and not isinstance(body.get(name), bool):
            body[name] = min(body[name], 20)
    return body


def _contradictions(rng: random.Random) -> list[tuple[str, dict[str, Json]]]:
    many = list(range(3, 500))
    return [
        ("min_tokens beyond max_tokens", {"min_tokens": 10, "max_tokens": 2}),
        ("min_tokens with the end alone allowed", {"allowed_token_ids": [rng.choice((0, 1, 2))], "min_tokens": 3}),
        ("everything forbidden", {"allowed_token_ids": [5], "logit_bias": {"5": -100}, "bad_words": ["a"]}),
        ("regex against allowed tokens", {"guided_regex": "[0-9]+", "allowed_token_ids": [5]}),
        ("regex against bad words", {"guided_regex": "a", "bad_words": ["a"]}),
        ("two structures", {"guided_regex": "a", "guided_json": {}}),
        ("structure and beams", {"guided_regex": "a+", "use_beam_search": True, "n": 4}),
        ("beams and stream", {"use_beam_search": True, "stream": True}),
        ("best_of below n", {"best_of": 1, "n": 4}),
        ("tiny penalty", {"repetition_penalty": rng.choice((1e-320, 5e-324, 1e-45))}),
        ("tiny temperature", {"temperature": rng.choice((1e-320, 5e-324, 1e-45, 1e-38))}),
        ("tiny top_p", {"top_p": rng.choice((1e-320, 5e-324, 1e-30))}),
        ("cutoffs of all", {"epsilon_cutoff": 0.999999, "eta_cutoff": 0.999999, "min_p": 1, "typical_p": 1e-9}),
        ("xtc of all", {"xtc_probability": 1, "xtc_threshold": 1e-9}),
        ("mirostat at its edges", {"mirostat_mode": 2, "mirostat_tau": rng.choice((1e-320, 100)), "mirostat_eta": 1}),
        ("dry at its edges", {"dry_multiplier": 100, "dry_base": 100, "dry_allowed_length": 1, "max_tokens": 30}),
        ("sigma at its edge", {"top_n_sigma": rng.choice((1e-320, 5e-324, 1e-30))}),
        ("ngrams of one", {"no_repeat_ngram_size": 1, "max_tokens": 600, "ignore_eos": True}),
        ("stop at every token", {"stop_token_ids": list(range(512)), "min_tokens": 5}),
        ("bias on every token", {"logit_bias": {str(i): -100 for i in range(512)}, "min_tokens": 2}),
        ("many allowed, all biased", {"allowed_token_ids": many, "logit_bias": {str(i): -100 for i in many}}),
        ("stream_options alone", {"stream_options": {"include_usage": True}}),
        ("prompt_logprobs and stream", {"prompt_logprobs": 5, "stream": True}),
        ("choice against min_tokens", {"guided_choice": ["a"], "min_tokens": 30, "max_tokens": 30}),
        (
            "length penalty at its edge",
            {"use_beam_search": True, "n": 4, "length_penalty": -10, "early_stopping": "never"},
        ),
        ("penalties at their edges", {"presence_penalty": -2, "frequency_penalty": -2, "temperature": 2, "top_k": 1}),
        ("truncated to nothing", {"truncate_prompt_tokens": 1, "max_tokens": 2}),
        ("truncated beyond", {"truncate_prompt_tokens": 2**31 - 1}),
        ("targets beyond reason", {"ttft_target_ms": 1e-320, "tpot_target_ms": 1e9, "priority": -(2**31) + 1}),
        ("weight", {"weight": rng.choice((1e-320, 1e6))}),
        ("more tokens than room", {"max_tokens": 2**31 - 1}),
    ]


KINDS: dict[str, tuple[Callable[[BadRequests, random.Random], Case], int]] = {
    "wrong_type": (BadRequests.wrong_type, 20),
    "edge": (BadRequests.edge, 20),
    "combination": (BadRequests.combination, 20),
    "special": (BadRequests.special, 20),
    "grammar": (BadRequests.grammar, 8),
    "impossible": (BadRequests.impossible, 12),
    "large": (BadRequests.large, 6),
    "unknown": (BadRequests.unknown, 6),
    "not_json": (BadRequests.not_json, 8),
    "flipped": (BadRequests.flipped, 8),
    "headers": (BadRequests.headers, 8),
    "route": (BadRequests.route, 8),
    "admin": (BadRequests.admin, 8),
    "storm": (BadRequests.storm, 4),
}
"""Kinds of cases with their weights in a series."""
