"""Structured output with tokenizers of every kind: the text that a client reads is of the kind, or the request is refused in words."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import numpy as np
import torch

from support.tokenizer_zoo import ZOO, over_the_zoo, zoo_tokenizer
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import SamplingContext
from trencadis.records import SamplingParams, StructuredOutput
from trencadis.text import Detokenizer, vocabulary_of
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "ﬁ É", "ab c"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["name", "age", "note"],
    "additionalProperties": False,
}
WANTED = {
    "choice": StructuredOutput.choice(["abc", "Abc def", "ABC ﬁ"]),
    "choice of one": StructuredOutput.choice(["abc"]),
    "choice after a space": StructuredOutput.choice([" abc", "\n abc"]),
    "upper case": StructuredOutput.choice(["ABC"]),
    "compatibility": StructuredOutput.choice(["ﬁ ①"]),
    "schema": StructuredOutput.json_schema(SCHEMA),
    "object": StructuredOutput.json_object(),
    "enum": StructuredOutput.json_schema({"enum": ["the sea", "é", "🇪🇸", 1]}),
    "regex": StructuredOutput.regex(r"It is [0-9]{1,3}, (she|he) said: [a-zé]{2,8}\."),
    "lark": StructuredOutput.grammar('start: "(" start ")" | "x"'),
    "gbnf": StructuredOutput.grammar('root ::= "caf\\u00e9 " ("a" | "b")'),
}
CLOSING = {b"}": 95.0, b"]": 94.0, b'"': 93.0, b"0": 92.0, b":": 91.0, b")": 95.0}
MAX_TOKENS, CLOSES_AT = 150, 30


def is_of_the_kind(wanted: StructuredOutput, text: str) -> bool:
    match wanted.kind:
        case "choice":
            return text in wanted.choices
        case "regex":
            return re.fullmatch(wanted.text, text) is not None
        case "json_schema":
            return bool(jsonschema_rs.is_valid(json.loads(wanted.text), json.loads(text, parse_float=lambda _: 0.5)))
        case "json_object":
            return isinstance(json.loads(text, parse_float=lambda _: 0.5), dict)
        case _:
            return re.fullmatch(r"\(*x\)*|café [ab]", text) is not None


class Writer:
    """Writes texts of several kinds beside each other, from random logits at a high temperature; after a while closing signs are likely.

    Attributes:
        texts: As clients read them, by title; of those that ended.
        refusals: Why the others did not run or did not go on.
    """

    def __init__(self, name: str, make_start: Any) -> None:
        self._tokenizer = zoo_tokenizer(name)
        self._known = vocabulary_of(self._tokenizer)
        self._sampler = StandardSampler(standard_chain("vllm", vocabulary=lambda: self._known))
        self._prompt = self._tokenizer.encode("the old man", add_special_tokens=False)
        self._vocab_size = len(self._known.tokens) + 5
        self._sampler.allocate(num_rows=len(WANTED), vocab_size=self._vocab_size, device=torch.device("cpu"))
        self._closing = np.array([CLOSING.get(data, 0.0) for data in self._known.tokens], np.float32)
        self.texts: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        self._running: dict[int, str] = {}
        for row, (title, wanted) in enumerate(WANTED.items()):
            self._begin(row, title, wanted, make_start)

    def _begin(self, row: int, title: str, wanted: StructuredOutput, make_start: Any) -> None:
        try:
            for prepared in self._sampler.prepare(SamplingParams(structured=wanted), tenant=""):
                prepared.result()
        except InvalidRequestError as refusal:
            self.refusals[title] = str(refusal)
            return
        end = self._known.eos_token_id
        self._sampler.start_row(
            make_start(row, self._prompt, row_seed=row, eos=(end,), structured=wanted, temperature=5.0)
        )
        self._running[row] = title

    def write(self) -> None:
        """Go on until nothing runs."""
        tokenizer, end, begin = self._tokenizer, self._known.eos_token_id, len(self._prompt)
        tokens = torch.zeros((len(WANTED), begin + MAX_TOKENS + 1), dtype=torch.int32)
        tokens[:, :begin] = torch.tensor(self._prompt)
        texts = dict.fromkeys(self._running, "")
        streams = {row: Detokenizer(tokenizer, prompt_token_ids=self._prompt) for row in self._running}
        rng = np.random.default_rng(0)
        for number in range(MAX_TOKENS):
            if not self._running:
                break
            logits = rng.normal(size=(len(self._running), self._vocab_size)).astype(np.float32) * 5
            if number > CLOSES_AT:
                logits /= 50
                logits[:, : len(self._closing)] += self._closing
                logits[:, end] = 100.0
            rows, position = tuple(self._running), begin + number - 1
            context = SamplingContext(rows=rows, positions=(position,) * len(rows), tokens=tokens)
            sampled = self._sampler.sample(torch.from_numpy(logits), context)
            for error in sampled.row_errors:
                self.refusals[self._running.pop(rows[error.index])] = error.message
            for row, token in zip(rows, sampled.token_ids.tolist(), strict=True):
                if row not in self._running:
                    continue
                tokens[row, position + 1] = token
                texts[row] += streams[row].flush() if token == end else streams[row].add([token])
                if token == end:
                    self.texts[self._running.pop(row)] = texts[row]
        assert not self._running, texts


@over_the_zoo
def test_what_is_written_is_of_the_kind_or_refused_in_words(name: str, start: Any) -> None:
    """With a token for every byte nothing is refused, whatever the tokenizer does to a prompt."""
    writer = Writer(name, start)
    writer.write()
    assert set(writer.texts) | set(writer.refusals) == set(WANTED)
    for title, text in writer.texts.items():
        assert is_of_the_kind(WANTED[title], text), (title, text)
    assert all("structured output" in refusal for refusal in writer.refusals.values())
    if ZOO[name].is_byte_level or ZOO[name].has_byte_fallback:
        assert not writer.refusals
