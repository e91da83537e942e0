"""Sequences that a sampler writes in a grammar, from logits that depend on sequence and position alone."""

from __future__ import annotations

import torch

from trencadis.interfaces import SamplingContext

__all__ = ["PROMPT", "VOCAB_SIZE", "Scene", "random_schema"]

VOCAB_SIZE = 4096 + 37  # a model may have more logits than there are tokens
MAX_LEN = 512
PROMPT = (300, 301, 302)
CLOSING = {b"}": 95.0, b"]": 94.0, b'"': 93.0, b"0": 92.0, b":": 91.0, b")": 95.0}


class Scene:
    """Writes sequences with a sampler.

    Args:
        sampler: With room for the rows.
        vocabulary: Of the tokenizer.
        start: Makes the start of a row.
        num_rows: Sequences side by side at most.

    Attributes:
        tokens: Of all rows, ``[num_rows, MAX_LEN]``; -1 where nothing is known.
        num_steps: Taken so far.
    """

    def __init__(self, sampler, vocabulary, start, *, num_rows=8):
        self.sampler, self.vocabulary, self._start = sampler, vocabulary, start
        self.tokens = torch.full((num_rows, MAX_LEN), -1, dtype=torch.int32)
        self.lengths, self.names = {}, {}
        self.num_steps = 0

    def begin(self, row, name, params, output=()):
        """Have a sequence in a row; its logits go by its name, a whole number."""
        history = [*PROMPT, *output]
        self.tokens[row, : len(history)] = torch.tensor(history, dtype=torch.int32)
        self.lengths[row], self.names[row] = len(history), name
        self.sampler.start_row(self._start(row, PROMPT, output, row_seed=name, eos=(0,), **params))

    def logits(self, name, position, *, closes):
        """Return logits of a place; where the text closes, they favour what ends it. Pure."""
        generator = torch.Generator().manual_seed(1000 * name + position)
        logits = torch.randn(VOCAB_SIZE, generator=generator) * 5
        if closes:
            logits[:] = logits / 50
            for text, value in CLOSING.items():
                logits[self.vocabulary.encode(text.decode())[0]] = value
            logits[0] = 100.0
        return logits

    def step(self, rows, *, drafts=None, closes_at=40):
        """One step of some rows, each with drafts; returns what each emitted."""
        places, asked = [], []
        for row in rows:
            known = self.lengths[row]
            guesses = (drafts or {}).get(row, ())
            self.tokens[row, known : known + len(guesses)] = torch.tensor(list(guesses), dtype=torch.int32)
            asked.append((row, len(places), guesses))
            places += [(row, known - 1 + i) for i in range(len(guesses) + 1)]
        logits = torch.stack(
            [self.logits(self.names[row], place, closes=place >= closes_at + len(PROMPT)) for row, place in places]
        )
        context = SamplingContext(
            rows=tuple(row for row, _ in places), positions=tuple(place for _, place in places), tokens=self.tokens
        )
        sampled = self.sampler.sample(logits, context)
        self.row_errors, chosen = sampled.row_errors, sampled.token_ids.tolist()
        self.num_steps += 1
        emitted = {}
        for row, first, guesses in asked:
            run = []
            for i in range(len(guesses) + 1):
                run.append(chosen[first + i])
                if i == len(guesses) or guesses[i] != run[-1] or run[-1] == 0:
                    break
            known = self.lengths[row]
            self.tokens[row, known : known + len(run)] = torch.tensor(run, dtype=torch.int32)
            self.lengths[row] += len(run)
            emitted[row] = run
        return emitted

    def write(self, rows, *, draft=None, max_tokens=300):
        """Write until all have ended; returns outputs without their ends."""
        outputs = {row: [] for row in rows}
        left = list(rows)
        while left:
            drafts = {row: draft(row, outputs[row]) for row in left} if draft else None
            for row, run in self.step(left, drafts=drafts).items():
                outputs[row] += run
            left = [row for row in left if outputs[row][-1] != 0 and len(outputs[row]) < max_tokens]
        assert all(output[-1] == 0 for output in outputs.values()), "a text did not end"
        return {row: output[: output.index(0)] for row, output in outputs.items()}

    def text(self, output):
        """Return what tokens spell. Pure."""
        return b"".join(self.vocabulary.tokens[token] for token in output).decode()


def random_schema(rng, depth=0):
    """Return a JSON schema of any kind that a text can be of."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "array", "anyOf"])
    if kind == "object":
        names = [f"{rng.choice(['key', 'é', 'a b', 'x'])}{i}" for i in range(rng.integers(0, 4))]
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        least = int(rng.integers(0, 3))
        bounds = {"minItems": least, "maxItems": least + int(rng.integers(0, 3))}
        return {"type": "array", "items": random_schema(rng, depth + 1), **bounds}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "integer":
        low = int(rng.integers(-50, 50))
        return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 2000))}
    if kind == "string":
        least = int(rng.integers(0, 4))
        return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 20))}
    special = {
        "enum": {"enum": ["yes", 'a "b"', 5, None, True]},
        "const": {"const": {"a": [1, "x"]}},
        "pattern": {"type": "string", "pattern": "^(a|bc)+[0-9]{2,3}$"},
    }
    return special.get(kind, {"type": str(kind)})
