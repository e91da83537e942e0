"""``compile = "buckets"``: the model's forward compiled by torch.compile, one graph per shape, all made during the warm-up.

    warm-up    a shape without a graph ─▶ trace ▶ compile, or load from disk ▶ compare with the plain forward
    serving    a shape with a graph ─▶ its graph;  any other ─▶ the plain forward, counted; nothing is compiled

A graph is found by the sizes that determine all its shapes. The checks that torch.compile makes before every call (guards) are therefore
left out: model, cache and threads do not change after the warm-up, and every graph has a code object of its own, so that two graphs cannot
be confused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sysconfig
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from trencadis.caches import cache_directory
from trencadis.clock import Clock
from trencadis.errors import BackendError
from trencadis.records import Bucket, WarmUpReport
from trencadis_torch.attention.adapter import AttentionPass
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs import operators as graph_ops
from trencadis_torch.graphs.counts import GraphWatch
from trencadis_torch.graphs.mode import BucketMode, LogitsCheck, StepCounts
from trencadis_torch.linear import native as native_linear
from trencadis_torch.linear.native import Native
from trencadis_torch.native_build import INSTALL_HINT, find_compiler, writable_directory
from trencadis_torch.rows import Rows
from trencadis_torch.runner import Forward, PassRunner

__all__ = ["CompiledMode", "Graphs", "CompileCounts", "set_up"]

logger = logging.getLogger("trencadis.torch")


class CompiledMode(BucketMode):
    """Compiled graphs of one backend.

    Args:
        config: Configuration of the backend.
        device: Device of the backend.
        clock: For the duration of the warm-up.

    Attributes:
        directory: Where graphs are kept between starts.
        watch: Counts.

    Raises:
        BackendError: Nothing can be compiled here.
    """

    compiles = True
    layerwise_kv = False  # a graph does not stop between its layers

    def __init__(self, config: TorchConfig, *, device: torch.device, clock: Clock) -> None:
        super().__init__(config)
        if device.type != "cpu":
            raise BackendError(
                f'[backend.torch] compile = "buckets": only on the CPU, and the device is {device}.',
                hint='Set compile = "off", or device = "cpu".',
            )
        self.directory = set_up(config.compile_cache, os.environ)
        self._clock = clock
        self._graphs: Graphs | None = None
        self._counts_blocks = True
        self.watch = GraphWatch()

    def native(self) -> Native | None:
        """Return the library of linear layers that graphs can call."""
        return None if native_linear.native() is None else graph_ops.graph_native()

    def make_runner(self, model: Any, *, rows: Rows, cache: PagedKVCache, check: LogitsCheck | None) -> PassRunner:
        """Return a runner that makes and uses graphs; see :class:`Graphs`."""
        if native_linear.native() is not None:
            graph_ops.define()
        # Gathered blocks are a shape; where a kernel reads them, buckets that differ in their number alone are one graph.
        self._counts_blocks = cache.kernel is None
        cache.kernels += "+inductor"
        return PassRunner(
            model,
            rows=rows,
            cache=cache,
            layout="padded",
            workspace=Workspace(),
            wrap=functools.partial(self._wrap, check=check),
        )

    def _wrap(self, plain: Forward, *, check: LogitsCheck | None) -> Graphs:
        self._graphs = Graphs(plain, check=check)
        return self._graphs

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        run: Callable[[Bucket], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUpReport:
        """Make the graphs of some buckets, the largest first; see :class:`~trencadis_torch.graphs.mode.BucketMode`.

        Raises:
            BackendError: The model cannot be compiled, or a graph computes something else.
        """
        graphs, before, start_s = self._made(), CompileCounts.now(), self._clock.now_s()
        num_before = len(graphs)
        with graphs.preparing():
            seen: set[Bucket] = set()
            for done, bucket in enumerate(sorted(buckets, reverse=True), start=1):
                shape = bucket if self._counts_blocks else attrs.evolve(bucket, num_blocks=0)
                if shape not in seen:
                    run(bucket)
                seen.add(shape)
                if progress is not None:
                    progress(done, len(buckets))
        num_graphs, took_s = len(graphs) - num_before, self._clock.now_s() - start_s
        num_cached = min(num_graphs, CompileCounts.now().since(before).num_from_disk)
        logger.info(
            "%d buckets are %d graphs, made in %.1f s; the code of %d came from %s.",
            len(buckets),
            num_graphs,
            took_s,
            num_cached,
            self.directory,
        )
        self.watch.warmed_up(num_graphs=num_graphs, num_cached=num_cached, took_s=took_s)
        return WarmUpReport(
            prepared=tuple(buckets),
            num_graphs=num_graphs,
            num_compilations=num_graphs - num_cached,
            num_cached=num_cached,
        )

    @contextlib.contextmanager
    def step(self) -> Iterator[StepCounts]:
        """Count compilations within a ``with`` block, which should not occur, and passes without a graph."""
        found, graphs = StepCounts(), self._made()
        before, num_eager = CompileCounts.now(), graphs.num_eager
        yield found
        found.num_compilations = CompileCounts.now().since(before).num_graphs
        self.watch.stepped(num_compilations=found.num_compilations, num_eager=graphs.num_eager - num_eager)

    def metrics(self) -> str:
        """Return the counters."""
        return self.watch.metrics()

    def close(self) -> None:
        """Free the graphs; counters stay."""
        self._graphs = None

    def _made(self) -> Graphs:
        if self._graphs is None:
            raise BackendError("backend torch: graphs come after allocate.")
        return self._graphs


NUM_TRIED: Final = 7
"""Different tokens and positions that a new graph is compared on."""


class Graphs:
    """A forward that runs as a graph where there is one. Thread of the backend.

    Args:
        plain: The forward as it is.
        check: Raises if logits of a graph, second, are not those of the plain forward, first; None: not compared.
        compiler: Backend of torch.compile.

    Attributes:
        num_eager: Passes that ran without a graph.
    """

    def __init__(
        self,
        plain: Forward,
        *,
        check: Callable[[torch.Tensor, torch.Tensor], None] | None,
        compiler: str = "inductor",
    ) -> None:
        self.num_eager = 0
        self._plain = plain
        self._check = check
        self._compiler = compiler
        self._graphs: dict[tuple[Any, ...], Forward] = {}
        self._missed: set[tuple[Any, ...]] = set()
        self._is_preparing = False

    def __len__(self) -> int:
        return len(self._graphs)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Make graphs of the shapes that run within a ``with`` block."""
        self._is_preparing = True
        try:
            yield
        finally:
            self._is_preparing = False

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        """Return logits ``[L, V]``, and write keys and values.

        Raises:
            BackendError: While preparing: the model cannot be compiled, or the graph computes something else.
        """
        key = (getattr(attention, "signature", None), len(keep))
        graph = self._graphs.get(key)
        if graph is not None:
            return graph(token_ids, positions, keep, attention)
        if not self._is_preparing:
            self._note(key)
            return self._plain(token_ids, positions, keep, attention)
        graph = _compiled(self._plain, len(self._graphs), self._compiler)
        logits = _first(graph, key, token_ids, positions, keep, attention)
        if self._check is not None:
            # Of padding all tokens are alike, and some models make nothing of them.
            tried = torch.arange(token_ids.numel()).view_as(token_ids) % NUM_TRIED
            others = (tried + 1, tried, keep, attention)
            self._check(self._plain(*others), graph(*others))
        self._graphs[key] = graph
        return logits

    def _note(self, key: tuple[Any, ...]) -> None:
        self.num_eager += 1
        if key not in self._missed:
            self._missed.add(key)
            logger.warning("No graph was prepared for passes of the shape %s: they run without.", key)


def _compiled(plain: Forward, number: int, compiler: str) -> Forward:
    """Return the forward as a graph to be, with code of its own: torch.compile keeps its graphs with the code."""
    assert isinstance(plain, types.FunctionType), "a function has code"
    name = f"{plain.__code__.co_name}_{number}"
    own = types.FunctionType(
        plain.__code__.replace(co_name=name), plain.__globals__, name, plain.__defaults__, plain.__closure__
    )
    # Sizes inside a graph follow from those of its inputs, which its key has: nothing to assert at every operation.
    options: dict[str, Any] = {"guard_filter_fn": _no_guards, "size_asserts": False}
    graph: Forward = torch.compile(own, backend=compiler, fullgraph=True, dynamic=False, options=options)
    return graph


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _first(graph: Forward, key: tuple[Any, ...], *arguments: Any) -> torch.Tensor:
    """Run a graph for the first time, which compiles it.

    Raises:
        BackendError: It cannot be compiled.
    """
    try:
        return graph(*arguments)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BackendError(
            f'[backend.torch] compile = "buckets": torch.compile failed for the shape {key}: {type(error).__name__}: '
            f"{' '.join(words[:3])[:500]}",
            hint='Set [backend.torch] compile = "off" to serve this model without graphs; TORCH_LOGS=+dynamo,inductor says more.',
        ) from error


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
    """Counters of torch.compile in this process so far, for all callers.

    Attributes:
        num_graphs: Functions that it made graphs of.
        num_from_disk: Number of these graphs whose code lay on disk.
    """

    num_graphs: int
    num_from_disk: int

    @classmethod
    def now(cls) -> CompileCounts:
        """Return the counts as they are; about a microsecond."""
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"])

    def since(self, before: CompileCounts) -> CompileCounts:
        """Return the difference. Pure."""
        return CompileCounts(self.num_graphs - before.num_graphs, self.num_from_disk - before.num_from_disk)
