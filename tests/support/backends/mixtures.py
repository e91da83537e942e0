"""Tiny mixtures of experts with the tokens of the demo model, and engines whose ranks, as threads, have sequences of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from support.backends import tiny_models
from trencadis.text import resolve_model_path
from trencadis_testing.driver import BackendDriver


class OwnBlocksDriver(BackendDriver):
    """Gives a row blocks of its own rank, of two."""

    num_ranks = 2

    def _grow(self, row_index: int, num_tokens: int) -> None:
        rank, size = row_index * self.num_ranks // self._plan.num_rows, self._plan.num_blocks // self.num_ranks
        self._free.sort(key=lambda block: block // size == rank)  # those that are taken from the end
        super()._grow(row_index, num_tokens)


def save_mixture(kind: str, path: Path) -> Path:
    """Save a random model, whose texts the demo model's tokeniser reads; returns its path."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model_path("demo")) / name, path / name)
    config = tiny_models._config(kind)
    config.vocab_size, config.eos_token_id = 4096, 0
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def ranks_in_threads(monkeypatch: Any, path: Path, size: int, **options: Any) -> dict[str, Any]:
    """Return the configuration of an engine whose ranks are threads of this process."""
    monkeypatch.setattr("trencadis.engine.build.check_layout", lambda *_: None)
    return {
        "model.path": str(path),
        "backend.name": "support.backends.rank_threads:ranked_backend",
        "backend.options": {"size": size, "expert": size, "attention": "data", **options},
        "executor.name": "inline",
        "parallel.tensor": size,
        "parallel.expert": size,
        "parallel.attention": "data",
    }


def idle_rank_leaves_out() -> Any:
    """Return a backend ``torch`` whose experts exchange nothing on a rank without tokens, for engines that name it by this path."""
    from trencadis.clock import SystemClock
    from trencadis_torch.backend import TorchBackend
    from trencadis_torch.config import TorchConfig
    from trencadis_torch.parallel.data_attention import SpreadExperts

    right = SpreadExperts.forward

    def forward(self: Any, hidden_states: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:
        gather = self._gather
        is_idle = gather.is_on and not len(gather._spread.sequences[gather.group.rank])
        return hidden_states if is_idle else right(self, hidden_states, *routes)

    SpreadExperts.forward = forward  # type: ignore[method-assign]  # of the process of a rank alone
    return TorchBackend(TorchConfig(device="cpu"), clock=SystemClock())
