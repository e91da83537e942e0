"""ik_llama.cpp as a library, by the C functions of the package ``ik-llama-cpp-python``, which has no server: greedy, step by step.

Its cache is always F16: without its flash attention it takes no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peers.drivers.protocol import Opened, Wanted, drive, versions_of

BATCH = 512
"""Tokens that are computed at once, at most."""

Row = tuple[int, int, int, bool]
"""Token, position, sequence, and whether its logits are wanted."""


def open_engine(wanted: Wanted) -> Opened:
    import ik_llama_cpp._ctypes_api as c

    c.llama_backend_init()
    model = c.llama_model_load_from_file(wanted.model.encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError(f"it cannot load {wanted.model}")
    params = c.llama_context_default_params()
    params.n_ctx = wanted.max_num_seqs * wanted.max_model_len
    params.n_batch = params.n_ubatch = BATCH
    params.n_seq_max = wanted.max_num_seqs
    params.n_threads = params.n_threads_batch = wanted.threads
    params.flash_attn = False  # with it this build of the package ends the process: GGML_ASSERT(S > 0)
    for name, value in wanted.options.items():
        setattr(params, name, value)
    context = c.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("it cannot make a context of this size")
    engine = _Steps(c, context, c.llama_vocab_n_tokens(c.llama_model_get_vocab(model)), wanted.max_num_seqs)
    return Opened(versions_of("ik-llama-cpp-python"), engine.generate, engine.score)


class _Steps:
    """Decodes batches and reads their logits."""

    def __init__(self, c: Any, context: int, vocab_size: int, max_num_seqs: int) -> None:
        self._c = c
        self._context = context
        self._vocab_size = vocab_size
        self._batch = c.llama_batch_init(BATCH, 0, max_num_seqs)

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        self._c.llama_kv_cache_clear(self._context)
        tokens: list[list[int]] = [[] for _ in prompts]
        rows = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        for (_, _, sequence, _), logits in self._logits(rows):
            tokens[sequence].append(int(logits.argmax()))
        for number in range(1, output_len):
            rows = [(row[-1], len(prompts[at]) + number - 1, at, True) for at, row in enumerate(tokens)]
            for (_, _, sequence, _), logits in self._logits(rows):
                tokens[sequence].append(int(logits.argmax()))
        return tokens

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        import numpy as np

        scores = []
        for text in texts:
            self._c.llama_kv_cache_clear(self._context)
            found = []
            for (_, at, _, _), logits in self._logits([(token, at, 0, True) for at, token in enumerate(text[:-1])]):
                values = logits.astype(np.float64)
                top = values.max()
                found.append(float(values[text[at + 1]] - top - np.log(np.exp(values - top).sum())))
            scores.append(found)
        return scores

    def _logits(self, rows: list[Row]) -> Iterable[tuple[Row, Any]]:
        """Yield rows whose logits are wanted, with these; an array is valid until the next one."""
        import numpy as np

        batch = self._batch
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            batch.n_tokens = len(part)
            for at, (token, position, sequence, is_wanted) in enumerate(part):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, is_wanted
            if code := self._c.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode ended with status {code}")
            for at, row in enumerate(part):
                if row[3]:
                    values = self._c.llama_get_logits_ith(self._context, at)
                    yield row, np.ctypeslib.as_array(values, (self._vocab_size,))


if __name__ == "__main__":
    drive(open_engine)
