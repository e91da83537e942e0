"""Where torch.compile keeps what it compiled, and how much of it was there already."""

from __future__ import annotations

import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

import attrs
import torch

from trencadis.errors import BackendError
from trencadis_torch.native_build import INSTALL_HINT, cache_directory, find_compiler, writable_directory

__all__ = ["CompileCounts", "set_up"]

DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch looks for it: the only way to say it that all its caches listen to."""


def set_up(asked: str, environ: MutableMapping[str, str]) -> Path:
    """Let torch.compile of this process use our compiler and keep its results in a directory, which is returned.

    The keys are torch's own: source of the graph, settings, versions, compiler and CPU. Nothing of ours has to be added, for our kernels
    are called by name and never compiled into a graph.

    Args:
        asked: Directory; empty: what the environment says already, else ``~/.cache/trencadis/inductor``.
        environ: Changed.

    Raises:
        BackendError: Nothing can be compiled here.
    """
    compiler = _compiler()
    named = asked or environ.get(DIRECTORY, "")
    directory = writable_directory(Path(named).expanduser() if named else cache_directory("inductor"))
    environ[DIRECTORY] = str(directory)
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    inductor.cpp.cxx = (None, compiler)
    inductor.fx_graph_cache = True
    functorch.enable_autograd_cache = True
    return directory


def _compiler() -> str:
    """Return the compiler, if graphs can be compiled here."""
    where = '[backend.torch] compile = "buckets"'
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(
            f"{where}: graphs are compiled on this machine, and there is no C++ compiler in PATH and none in CXX.",
            hint=f'{INSTALL_HINT} Or set compile = "off".',
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise BackendError(
            f"{where}: graphs are compiled against the headers of Python, and {header} is not there.",
            hint='Install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel), or set compile = "off".',
        )
    if not hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):
        raise BackendError(
            f"{where}: torch {torch.__version__} cannot leave out guards.",
            hint='Install torch 2.8 or newer, or set compile = "off".',
        )
    return compiler


@attrs.frozen
class CompileCounts:
    """What torch.compile has done in this process so far, whoever asked for it.

    Attributes:
        num_graphs: Functions that it made graphs of.
        num_from_disk: Of these, graphs whose code lay on disk.
    """

    num_graphs: int
    num_from_disk: int

    @classmethod
    def now(cls) -> CompileCounts:
        """Return the counts as they are; about a microsecond."""
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"])

    def since(self, before: CompileCounts) -> CompileCounts:
        """Return what came on top. Pure."""
        return CompileCounts(self.num_graphs - before.num_graphs, self.num_from_disk - before.num_from_disk)
