"""The backend ``gaudi``: one process, one device, buckets throughout.

submit:  row starts, table writes ─▶ rows and host tables
         pass by pass: host metadata ─▶ forward (graph) ─▶ sampler ─▶ rows
wait:    tokens, on their way to the host since submit ─▶ StepOutput
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trencadis.clock import Clock
from trencadis.errors import BackendError, ConfigValueError, OutOfMemoryError
from trencadis.interfaces import (
    AcceptanceRule,
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    PendingStep,
    RankGroups,
    Sampler,
)
from trencadis.records import (
    Batch,
    Bucket,
    Float32Array,
    Int32Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    Pass,
    Phase,
    RowStart,
    SamplingParams,
    WarmUpReport,
)
from trencadis_gaudi.block_swaps import THRESHOLDS, BlockSwaps
from trencadis_gaudi.config import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, GaudiConfig
from trencadis_gaudi.device_rows import DeviceRows, HostTables
from trencadis_gaudi.embedder import GaudiEmbedder, make_embedder, unallocated_embedder
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.graphs.capture import Capture
from trencadis_gaudi.graphs.counts import Watch
from trencadis_gaudi.graphs.model import ForwardAdapter, make_forward, prepare_layers
from trencadis_gaudi.graphs.sampler_warmup import dummy_drafts, sampler_sizes, warm_up_sampler
from trencadis_gaudi.graphs.warmup import WarmUp
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.memory import MemoryMeter, MemoryShares, format_bytes, share_memory
from trencadis_gaudi.model import LoadedModel, load_model
from trencadis_gaudi.parallel.agreement import ONE_RANK
from trencadis_gaudi.passes.tensors import GaudiPasses
from trencadis_gaudi.pool import GaudiPool
from trencadis_gaudi.profile_run import measure_activations
from trencadis_gaudi.runner import GaudiRunner, empty_pass
from trencadis_gaudi.timer import GaudiTimer
from trencadis_torch.parallel.tokens import TokenExchange
from trencadis_torch.pending import TorchStep
from trencadis_torch.runner import PassResult
from trencadis_torch.verify import MatchingPrefix, SamplePlan, emit

if TYPE_CHECKING:
    from trencadis_torch.parallel.share import Share

__all__ = ["GaudiBackend"]

logger = logging.getLogger("trencadis.gaudi")


class GaudiBackend(Backend):
    """Runs a transformers model on a Gaudi, or on the emulated device.

    Args:
        config: Table ``[backend.gaudi]``.
        clock: Clock for the warm-up, and for steps of the emulated device.

    Attributes:
        habana: Device and its software.
        watch: Counts of compilations and padding.

    Raises:
        ConfigValueError: Two keys contradict each other.
        BackendError: The Gaudi software, or a Gaudi, is missing.
    """

    def __init__(self, config: GaudiConfig, *, clock: Clock) -> None:
        config.check()
        self._clock = clock
        self.habana = load_habana(config, clock=clock)
        config = self._config = self.habana.config
        self.watch = Watch(self.habana, counts_compilations=config.watch_compilations, logs_passes=config.log_passes)
        self._loaded: LoadedModel | None = None
        self._runner: GaudiRunner | None = None
        self._embedder: GaudiEmbedder | None = None
        self._warm_up: WarmUp | None = None
        self._pool: GaudiPool | None = None
        self._paths: tuple[SamplingParams, ...] = ()
        self._share: Share | None = None
        self._agreement = ONE_RANK
        self._capabilities = BackendCapabilities(
            layout=config.layout,
            default_block_size=DEFAULT_BLOCK_SIZE,
            max_prefill_batch_size=config.max_prefill_batch_size,
            contiguous=config.contiguous,
            shares_blocks=not config.contiguous,
            merges_prefills=config.merged_prefill,
            swaps_blocks=True,
            copy_sizes=tuple(2 * threshold for threshold in THRESHOLDS),
            collectives=("hccl",) if self.habana.emulated is None else ("shared_memory", "gloo"),
        )

    @property
    def capabilities(self) -> BackendCapabilities:
        """Capabilities of the configuration."""
        return self._capabilities

    # ------------------------------------------------------------------------------------------------- start-up

    def join(self, groups: RankGroups) -> None:
        """Join the ranks that divide layers, and check that they reach each other.

        Raises:
            BackendError: The ranks form pipeline stages, or do not reach each other.
            ConfigValueError: A key of the configuration requires a single rank.
        """
        from trencadis_gaudi.parallel.join import join_ranks  # not needed by a single rank

        with self._on_device():
            self._share, self._agreement = join_ranks(groups, self._config, self.habana)

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        """Load, inspect and check the model on the CPU, then move it to the device.

        Raises:
            ModelLoadError: Files are missing, the model is no decoder, or the paged forward does not match the model's own.
            OutOfMemoryError: No room for the weights.
        """
        self._sampler = sampler
        meter = MemoryMeter(self.habana)
        with self._on_device(), self._together():
            self._paths = self._sampler_paths(sampler)
            loaded = self._loaded = load_model(
                source,
                self.habana,
                check=self._config.check_model,
                share=self._share,
                agreement=self._agreement,
            )
            self._embedder = unallocated_embedder(loaded, self.habana)
        logger.info("Loading model weights took in total %s", meter.summary())
        if self._config.contiguous:
            logger.info("Using Contiguous PA, disabling prefix caching")
        # Provisional, until a profile run measures a step.
        self._shares = self._share_memory(self.habana.free_bytes())
        return loaded.facts

    def _sampler_paths(self, sampler: Sampler) -> tuple[SamplingParams, ...]:
        """Return sampling parameters that exercise each of the sampler's paths; the same number on ranks that do not sample."""
        paths = sampler.use_static_shapes() if self._samples else ()
        if self._samples and not paths:
            logger.warning(
                "The sampler %s makes no promise about shapes: what it runs is compiled when it is first needed.",
                type(sampler).__name__,
            )
        number = self._agreement.most(len(paths))
        return paths if self._samples else (SamplingParams(),) * number

    @property
    def _samples(self) -> bool:
        """Whether this rank samples; a single rank does."""
        return self._share is None or self._share.is_output

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on this rank aborts collectives that other ranks wait for."""
        return contextlib.nullcontext() if self._share is None else self._share.together()

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Run the largest prefill, and divide the memory that it leaves free.

        Raises:
            OutOfMemoryError: The step does not fit, or the rest is smaller than one block.
        """
        loaded = self._model()
        with self._on_device(), self._together(), self.watch.compilations(warns=False):
            activations = measure_activations(
                loaded,
                self.habana,
                block_size=DEFAULT_BLOCK_SIZE,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=min(max_num_seqs, self._config.max_prefill_batch_size),
                scores_prompts=self._config.prompt_logprobs,
            )
        free, total = self.habana.hpu.mem_get_info()
        if activations >= free:
            raise OutOfMemoryError(
                f"A step of {max_num_batched_tokens} tokens takes {format_bytes(activations)}; {format_bytes(free)} are free.",
                hint="Lower engine.max_num_batched_tokens.",
            )
        shares = self._shares = self._share_memory(free - activations)
        logger.info("%s", shares)
        shares.num_blocks(self._block_bytes(DEFAULT_BLOCK_SIZE))
        return MemoryReport(
            total_bytes=total,
            free_bytes=free,
            activation_bytes=activations,
            cache_bytes=shares.cache_bytes,
            shared_cache_bytes=None if self.habana.emulated is None else 0,  # the emulated device uses host memory
        )

    def _share_memory(self, free_bytes: int) -> MemoryShares:
        config = self._config
        return share_memory(
            free_bytes,
            utilization=config.memory_utilization,
            graph_reserve=0.0 if config.mode == "eager" else config.graph_reserve,
            padding_bytes=self._block_bytes(DEFAULT_BLOCK_SIZE),
        )

    def _block_bytes(self, block_size: int) -> int:
        return self._model().facts.kv_bytes_per_token * block_size

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate the KV cache, the rows and the sampler's state, and make the forward.

        Raises:
            ConfigValueError: The kernels do not support the block size.
            OutOfMemoryError: No room.
        """
        if plan.block_size not in BLOCK_SIZES:
            raise ConfigValueError(
                f"[cache] block_size = {plan.block_size}: the attention kernels of a Gaudi know {', '.join(map(str, BLOCK_SIZES))}.",
                hint=f"Leave it at 0 for {DEFAULT_BLOCK_SIZE}.",
            )
        with self._on_device():
            self._allocate(plan)

    def _allocate(self, plan: AllocationPlan) -> None:
        loaded, habana, config = self._model(), self.habana, self._config
        logger.info("# HPU blocks: %d, # CPU blocks: %d", plan.num_blocks, plan.num_host_blocks)
        self._meter = MemoryMeter(habana)
        self._acceptance: AcceptanceRule = plan.acceptance or MatchingPrefix()
        habana.declare("KV cache", (plan.num_blocks + 1) * self._block_bytes(plan.block_size))
        self._cache = FlatKVCache(
            loaded.layers,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            device=habana.device,
            scales=loaded.cache_scales,
        )
        if self._share is not None:
            self._cache.first_head = self._share.first_head
            self._cache.sums = self._share.sums
        logger.info(
            "Usable num_blocks: %d, actual allocated num_blocks (max across layers): %d (_PAD_BLOCK_ID=%d, _PAD_SLOT_ID=%d)",
            plan.num_blocks,
            plan.num_blocks + 1,
            self._cache.padding_block,
            self._cache.padding_block * plan.block_size,
        )
        self._rows = DeviceRows(plan, habana)
        self._tables = HostTables(plan.num_rows, self._rows.tables.shape[1])
        if self._samples:
            self._sampler.allocate(num_rows=plan.num_rows + 1, vocab_size=loaded.facts.vocab_size, device=habana.device)
        self._swaps = BlockSwaps(self._cache, config, habana, num_host_blocks=plan.num_host_blocks)
        passes = GaudiPasses(
            self._cache,
            contiguous=config.contiguous,
            merged_prefill=config.merged_prefill,
            kernel=habana.kernels.attention,
        )
        self._adapter = ForwardAdapter(loaded.model, passes)
        prepare_layers(loaded.model, config, habana)
        self._embedder = make_embedder(loaded, plan, config, habana)
        self._runner = GaudiRunner(
            make_forward(self._adapter, config, habana),
            passes,
            rows=self._rows,
            tables=self._tables.blocks,
            habana=habana,
            max_merged=config.max_prefill_batch_size if config.merged_prefill else 0,
            max_num_seqs=plan.num_rows,
            max_steps=1 + plan.max_draft_tokens,
            exchange=self._exchange,
        )
        self._capture = Capture(
            config,
            habana,
            run=self.run_bucket,
            margin_bytes=self._shares.margin_bytes,
            clear=getattr(self._adapter, "clear_cache", lambda: None),
            agreement=self._agreement,
        )
        habana.mark_step()  # otherwise zeroing the cache would be part of the first step's recipe

    # -------------------------------------------------------------------------------------------------- warm-up

    @torch.inference_mode()
    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Compile or capture the buckets, the sampler and block swaps, as described in ``graphs/warmup.py``.

        Raises:
            OutOfMemoryError: Graphs do not fit, and ``on_memory_shortage`` is ``fail``.
        """
        self._warm_up = WarmUp(
            self._config,
            self.habana,
            capture=self._capture,
            watch=self.watch,
            clock=self._clock,
            steps=self,
            agreement=self._agreement,
        )
        with self._on_device(), self._together():
            report = self._warm_up.run(buckets, progress=progress)
        logger.info("Initializing cache engine took %s", self._meter.summary())
        if self._config.emulated_frozen:
            self.habana.freeze()
        return report

    @torch.inference_mode()
    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Prepare one more bucket, if the pace allows it."""
        if self._warm_up is None:
            return ()
        with self._on_device(), self._together(), self.habana.thawed():
            return self._warm_up.rest(is_idle=is_idle)

    @torch.inference_mode()
    def prepare(self, bucket: Bucket) -> None:
        """Compile or capture one bucket."""
        with self._on_device(), self._together(), self.watch.compilations(warns=False):
            self.run_bucket(bucket, self._config.captures)
        self.watch.warmed_up(bucket)

    def run_bucket(self, bucket: Bucket, graph: bool) -> None:
        """Run a bucket on padding only, which changes no state."""
        self._run(empty_pass(bucket), None, graph=graph)
        if self._config.prompt_logprobs:
            self._allocated().warm_scores(bucket)

    def warm_sampler(self, buckets: Sequence[Bucket]) -> None:
        """Start a row and sample in every size and path that passes in these buckets use."""
        runner = self._allocated()
        sizes = sampler_sizes(map(runner.sampling_bucket, buckets))
        line = RowStart(row=0, token_ids=np.zeros(1, np.int32), num_prompt_tokens=1, params=SamplingParams(), seed=0)
        self._rows.start(line, self._sampler if self._samples else None)
        if self._paths:
            warm_up_sampler(sizes, self._paths, sample=self._sample)

    def warm_swaps(self) -> None:
        """Warm up block swaps that the engine uses; within the device it swaps if blocks are read by range."""
        reads_ranges = self._config.contiguous or self._config.layout == "unified"
        if reads_ranges or self._config.defragmenter_graphs == "on":
            self._swaps.warm_up()
        self._swaps.warm_up_host()
        if self._pool is not None:
            self._pool.warm_up()

    @property
    def num_text_sizes(self) -> int:
        """Number of sizes in which texts are embedded, prepared or not."""
        return 0 if self._embedder is None else self._embedder.num_sizes

    def warm_embedder(self) -> None:
        """Embed texts of every size, if embeddings are configured and the model supports them."""
        if self._config.embeddings and self._embedder is not None:
            self._embedder.warm_up()

    def _sample(self, batch_size: int, steps: int, params: SamplingParams | None) -> None:
        """Sample logits of zeros for unused rows, whose tokens are overwritten at their start."""
        num_rows = len(self._tables.blocks)
        rows = np.arange(batch_size, dtype=np.int32) % num_rows
        if params is not None and self._samples:
            for row in range(min(batch_size, num_rows)):
                token_ids = np.zeros(1, np.int32)
                self._sampler.start_row(
                    RowStart(row=row, token_ids=token_ids, num_prompt_tokens=1, params=params, seed=row)
                )
        lengths = np.full(batch_size, steps, np.int32)
        one = attrs.evolve(
            empty_pass(Bucket(batch_size, steps, 0, Phase.DECODE)),
            indices=np.arange(batch_size, dtype=np.int32),
            rows=rows,
            starts=np.zeros(batch_size, np.int32),
            query_lens=lengths,
            num_logits=lengths,
        )
        plan = SamplePlan.of(one, np.arange(batch_size) * steps, self._rows.history, padded=True)
        assert plan is not None, "every sequence has logits"
        model = self._model()
        for drafts in dummy_drafts(batch_size, steps, vocab_size=model.facts.vocab_size, rule=self._acceptance):
            logits = torch.zeros(
                batch_size * steps, model.facts.vocab_size, dtype=model.dtype, device=self.habana.device
            )
            self.habana.mark_step()
            emit(
                logits,
                plan,
                one,
                drafts=drafts,
                rows=self._rows,
                sampler=self._sampler,
                acceptance=self._acceptance,
                exchange=self._exchange,
            )
            self.habana.mark_step()

    # ---------------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingStep:
        """Launch a batch; in eager mode on the emulated device it is complete on return."""
        with self._on_device(), self._together():
            timer = GaudiTimer(self.habana)
            # In eager mode each operation is compiled when it first runs.
            with self.watch.compilations(warns=self._config.mode != "eager") as compiled:
                for start in batch.row_starts:
                    self._rows.start(start, self._sampler if self._samples else None)
                self._tables.apply(batch.table_writes)
                results = [self._pass(one, batch) for one in batch.passes]
                pending = TorchStep(
                    num_sequences=batch.num_sequences,
                    emitted=[result.emitted for result in results if result.emitted is not None and self._samples],
                    prompts=[result.prompt for result in results if result.prompt is not None],
                    num_padded_tokens=sum(result.num_padded_tokens for result in results),
                    timer=timer,
                    step=batch.step,
                    backend="gaudi",
                )
            pending.num_compilations = compiled.number
            if self._warm_up is not None:
                self._warm_up.pace.stepped()
        return pending

    def _pass(self, one: Pass, batch: Batch) -> PassResult:
        self.watch.note(one)
        return self._run(one, batch, graph=self._capture.as_graph(one.bucket))

    def _run(self, one: Pass, batch: Batch | None, *, graph: bool) -> PassResult:
        return self._allocated().run(
            one,
            drafts=None if batch is None else batch.drafts,
            sampler=self._sampler,
            acceptance=self._acceptance,
            graph=graph,
        )

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed whole texts without the KV cache; compiles sizes that no warm-up prepared.

        Raises:
            BackendError: The model cannot embed.
        """
        if self._embedder is None:
            raise BackendError(f"{type(self).__name__} does not embed.")
        with self._on_device(), self._together(), self.watch.compilations(warns=self._config.mode != "eager"):
            return self._embedder.embed(token_ids)

    @torch.inference_mode()
    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy whole KV blocks in all layers, padded to one of a few sizes."""
        self._allocated()
        if len(sources):
            with self._on_device(), self.watch.compilations(warns=self._config.mode != "eager"):
                self._swaps.copy(sources, targets)

    @torch.inference_mode()
    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy KV blocks to pinned host memory and back; returns when the copies are complete."""
        self._allocated()
        with self._on_device(), self.watch.compilations(warns=self._config.mode != "eager"):
            self._swaps.swap(outs=outs, ins=ins)

    def metrics(self) -> str:
        """Return the counters."""
        return self.watch.metrics()

    def kv_cache(self) -> GaudiPool:
        """Return the blocks of the cache; a later warm-up includes their copies.

        Raises:
            BackendError: The ranks divide a layer, and layers differ in their KV heads.
        """
        if self._share is not None:
            self._share.check_heads(layer.num_kv_heads for layer in self._cache.layers)
        self._pool = GaudiPool(self._cache, self.habana)
        return self._pool

    def close(self) -> None:
        """Release model and cache; idempotent."""
        self._loaded = self._runner = self._embedder = self._warm_up = self._pool = None
        for name in ("_cache", "_rows", "_adapter", "_swaps", "_capture"):
            self.__dict__.pop(name, None)

    @property
    def _exchange(self) -> TokenExchange | None:
        return None if self._share is None else self._share.exchange

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return self.habana.active()

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise BackendError("backend gaudi: no model is loaded, or it was closed.")
        return self._loaded

    def _allocated(self) -> GaudiRunner:
        if self._runner is None:
            raise BackendError("backend gaudi: a batch came before allocate, or after close.")
        return self._runner
