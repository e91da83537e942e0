"""The backend ``torch``: one process, one device, eager PyTorch; a whole model, or one rank's share of it.

    submit:  row starts, table writes, drafts ─▶ rows
             pass by pass: rows ─▶ model ─▶ logits ─▶ sampler ─▶ rows
    wait:    tokens, on their way to the host since submit ─▶ StepOutput

On the CPU ``submit`` runs the batch before it returns (an executor gives it a thread of its own); on CUDA it only launches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trencadis.clock import Clock, Phases, SystemClock
from trencadis.errors import BackendError, ModelLoadError, OutOfMemoryError
from trencadis.interfaces import (
    AcceptanceRule,
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    GuessBatch,
    HeadBatch,
    HeadGuesses,
    HeadNodes,
    KVBlender,
    LayerGate,
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
    WarmUpReport,
)
from trencadis_torch.attention import adapter, triton_kernels
from trencadis_torch.attention import native as native_attention
from trencadis_torch.attention.choice import cache_dtypes, choose_kernel
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.blend.blender import make_blender
from trencadis_torch.cache.host_blocks import HostBlocks
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel, PagedKVCache, stored_layers
from trencadis_torch.cache.storage import STORED_DTYPES
from trencadis_torch.config import TorchConfig
from trencadis_torch.device import OwnThreads, choose_device, choose_dtype, numbered_device, to_device
from trencadis_torch.embedder import DecoderEmbedder, Embedder
from trencadis_torch.graphs.choice import choose_mode
from trencadis_torch.light_imports import import_transformers
from trencadis_torch.linear import native as native_linear
from trencadis_torch.linear import native_decoder
from trencadis_torch.linear.decoder import how_it_runs, original_of
from trencadis_torch.linear.formats.choose import open_source
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.holding import AS_STORED, BFLOAT16, FLOAT32, Holding
from trencadis_torch.linear.native import check_quantization
from trencadis_torch.linear.replacement import (
    Replacement,
    forms_of,
    fuse_decoder,
    fuse_modules,
    replace_modules,
    rounds_rows,
    rounds_to_bfloat16,
)
from trencadis_torch.loading.encoder import is_encoder, load_encoder
from trencadis_torch.loading.fingerprint import fingerprint, quantised_fingerprint
from trencadis_torch.loading.inspection import attention_layers, model_facts
from trencadis_torch.loading.layerwise import LoadedDecoder, NotLayerwiseError, load_layerwise
from trencadis_torch.loading.loader import ModelFiles, check_architecture, dtype_of, find_model, load_decoder, own_code
from trencadis_torch.loading.pooling_config import read_pooling_config
from trencadis_torch.loading.positions import fix_dynamic_frequencies
from trencadis_torch.loading.profile_run import measure_memory
from trencadis_torch.loading.self_check import ModelCheck, check_graph
from trencadis_torch.native_build import Source, limit_instructions, prepare
from trencadis_torch.parallel.support import ONLY_EMBEDS
from trencadis_torch.pending import StepTimer, TorchStep
from trencadis_torch.remembered.model import key_of, recall, remember
from trencadis_torch.remembered.store import ModelStore
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner
from trencadis_torch.verify import MatchingPrefix

if TYPE_CHECKING:
    from trencadis_torch.heads.contract import Head
    from trencadis_torch.heads.drafter import HeadDrafter
    from trencadis_torch.parallel.data_attention import OwnBlocks
    from trencadis_torch.parallel.share import Share

__all__ = ["TorchBackend"]

logger = logging.getLogger("trencadis.torch")

SINGLE_THREAD_PARAMETERS = 20_000_000
"""Parameters below which one CPU thread is used: waiting for the others then costs more than they save."""

BLOCK_SIZE = 16


class TorchBackend(Backend):
    """Runs a transformers model on a CPU or a CUDA device.

    Args:
        config: Table ``[backend.torch]``.
        clock: Times steps on the CPU.
        replica: Which engine of several this is; of CUDA devices that are not named it takes the one of that number.
        num_replicas: Engines that share the CPU: each takes its part of PyTorch's threads, unless ``num_threads`` says how many.
        owns_process: This engine is the only user of torch in its process, and has one rank: parts of transformers that it never
            calls are not imported.

    Raises:
        ConfigValueError: Two keys contradict each other.
        BackendError: The device is not there, the CPU lacks the instructions that are named, or graphs were asked for that it cannot make.
    """

    def __init__(
        self, config: TorchConfig, *, clock: Clock, replica: int = 0, num_replicas: int = 1, owns_process: bool = False
    ) -> None:
        self._config = config
        self._owns_process = owns_process
        self._clock = clock
        self._replica = replica
        self._num_replicas = num_replicas
        self._num_threads = 0
        config.check()
        limit_instructions(config.instructions)
        self._device = self._numbered(choose_device(config.device), replica)
        self._mode = choose_mode(config, device=self._device, clock=clock)
        self._model: Any = None
        self._held = ""
        self._layers: tuple[AttentionLayer, ...] = ()
        self._own_layers: tuple[AttentionLayer, ...] = ()
        self._kernel: PagedKernel | None = None
        self._replacement: Replacement | None = None
        self._may_replace = True
        self._runner: PassRunner | None = None
        self._embedder: Embedder | None = None
        self._share: Share | None = None
        self._own_blocks: OwnBlocks | None = None
        self._head: Head | None = None
        self._head_reads: tuple[int, ...] = ()
        self._drafter: HeadDrafter | None = None
        self._capabilities = BackendCapabilities(
            layout=config.layout,
            default_block_size=BLOCK_SIZE,
            max_prefill_batch_size=config.max_prefill_batch_size if config.layout == "padded" else 0,
            swaps_blocks=True,
            layerwise_kv=self._mode.layerwise_kv,
            provides=frozenset({"backend.tree_attention"} if config.layout == "ragged" else ()),
            collectives=("nccl", "gloo") if self._device.type == "cuda" else ("shared_memory", "gloo"),
        )

    @property
    def capabilities(self) -> BackendCapabilities:
        """The configured capabilities."""
        return self._capabilities

    @property
    def compiles(self) -> bool:
        """Whether something may be compiled by PyTorch, or runs on another device than the CPU."""
        return self._mode.compiles or self._device.type != "cpu"

    def join(self, groups: RankGroups) -> None:
        """Take a place among ranks that divide layers or share them out; on CUDA, with the device of that number unless one is named.

        Raises:
            BackendError: Experts are to be divided over some of the ranks of a stage.
            ConfigValueError: A key of the configuration goes with one rank only.
        """
        from trencadis_torch.parallel.share import Share, check_groups  # a rank that is alone needs none of it

        check_groups(groups, self._config)
        if groups.layout.num_ranks == 1:
            return
        self._share = Share(groups, self._config)
        device = self._numbered(self._device, self._replica * groups.layout.num_ranks + groups.rank)
        if device != self._device:
            self._device = device
            self._mode = choose_mode(self._config, device=device, clock=self._clock)

    def _numbered(self, device: torch.device, number: int) -> torch.device:
        return numbered_device(self._config.device, device, number, num_devices=torch.cuda.device_count())

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        """Load, inspect and check the model, or this rank's share of it.

        Raises:
            ModelLoadError: Files are missing, or the paged forward would not compute what the model computes.
            OutOfMemoryError: No room for the weights.
        """
        self._sampler = sampler
        if source.head:
            from trencadis_torch.heads.load import check_head_serves  # a start without a head needs none of it

            num_ranks = 1 if self._share is None else self._share.size
            check_head_serves(layout=self._config.layout, compiles=self._mode.compiles, num_ranks=num_ranks)
        phases = Phases(SystemClock(), "imports")
        with self._on_device(), self._together():
            if self._quantises:
                check_quantization(self._config.quantization, self._device, source.dtype)
            key = key_of(source, self._config) if self._may_remember else ""
            if not (key and self._recall(key, source, phases)):
                self._load(source, key, phases)
        logger.info("Loading took %s.", phases.end())
        logger.info(
            "%s: %.1f M parameters, %s, on %s.",
            self._facts.architecture,
            self._facts.num_parameters / 1e6,
            self._facts.dtype,
            self._device,
        )
        return self._facts

    def _load(self, source: ModelSource, key: str, phases: Phases) -> None:
        """Load a model from its files, and remember it under a key unless that is empty."""
        if self._owns_process and not self.compiles:
            import_transformers()
        files = find_model(source)
        if is_encoder(files.config):
            self._refuse_shares(files)
            self._embedder, self._facts = load_encoder(files, self._device, check=self._config.check_model)
            self._set_threads(self._facts.num_parameters)
            return
        self._load_decoder(files, phases)
        if source.head:
            self._load_head(files)
        if key:
            phases.begin("remembering")
            self._remember(key)

    @property
    def _may_remember(self) -> bool:
        return self._device.type == "cpu" and self._share is None and not self._mode.compiles

    def _recall(self, key: str, source: ModelSource, phases: Phases) -> bool:
        """Take a model that was proven before, with its packed weights; returns whether there is one."""
        self._prepare_kernels(
            [Source(native_linear.SOURCE), Source(native_decoder.SOURCE), *self._usual_attention()], phases
        )
        phases.begin("weights")
        model = recall(ModelStore(), key, source, self._config)
        phases.note_cache(found=model is not None)
        if model is None:
            return False
        self._model, self._replacement, self._facts = model, model.replacement, model.facts
        self._set_threads(self._facts.num_parameters)
        self._prepare_kernels(self._kernels_for(model.layers), phases)
        self._kernel = self._chosen_kernel(model.layers, model.num_heads)
        self._pooling_config = read_pooling_config(model.files, default_pooling="last", device=self._device)
        logger.info("%s: %s; remembered.", source.path, self._facts.description)
        return True

    def _remember(self, key: str) -> None:
        """Keep a model for later starts, if it is one that can be."""
        why = remember(
            ModelStore(),
            key,
            self._model,
            layers=self._own_layers,
            facts=self._facts,
            replacement=self._replacement,
            num_heads=_num_heads(self._model),
        )
        if why:
            logger.info("%s is not remembered: %s.", self._facts.architecture, why)

    def _load_decoder(self, files: ModelFiles, phases: Phases) -> None:
        """Load a decoder, packed if that is proven to compute the same; else once more, as transformers made it."""
        adapter.register()
        obstacle = self._load_checked(files, phases)
        if obstacle:
            logger.warning("%s It is loaded again without packed layers.", obstacle)
            self._model, self._embedder, self._replacement, self._may_replace = None, None, None, False
            self._load_checked(files, phases)

    def _load_head(self, files: ModelFiles) -> None:
        """Load a head beside the model; its keys and values are one more layer of the KV cache."""
        from trencadis_torch.heads.load import load_head

        self._head, self._head_reads, digest = load_head(
            files.source.head,
            files,
            self._model,
            native=self._mode.native(),
            cache_dtype=STORED_DTYPES.get(self._config.kv_dtype),
        )
        self._facts = attrs.evolve(
            self._facts,
            kv_bytes_per_token=self._facts.kv_bytes_per_token + self._head.layer.bytes_per_token,
            fingerprint=quantised_fingerprint(self._facts.fingerprint, f"head {digest}"),
        )
        provides = self._capabilities.provides | {"backend.head"}
        self._capabilities = attrs.evolve(self._capabilities, provides=provides)

    def _load_checked(self, files: ModelFiles, phases: Phases) -> str:
        """Load a decoder and check it; returns why it has to be loaded again without packed layers, or an empty string."""
        self._pooling_config = read_pooling_config(files, default_pooling="last", device=self._device)
        check_architecture(files.config)
        phases.begin("weights")
        loaded = self._load_layerwise(files, phases)
        if loaded is None:
            model, layers = self._load_whole(files, phases)
        else:
            model, layers = loaded.model, loaded.layers
            self._model, self._replacement = model, loaded.replacement
        self._prepare_kernels(self._kernels_for(layers), phases)
        self._learn(model, layers, files, None if loaded is None else loaded.num_parameters)
        phases.begin("check")
        check = self._make_check(model, layers, None if loaded is None else loaded.expected)
        try:
            phases.begin("packing")
            if loaded is None:
                self._replace_modules(model)
            self._note_replaced(model, layers)
            phases.begin("check")
            if check is not None:
                check.compare(
                    model,
                    quantised=rounds_rows(model),
                    rounded=rounds_to_bfloat16(model),
                    replaced=self._replacement is not None,
                )
        except ModelLoadError as error:
            if self._quantises or not (self._packs or self._fuses):
                raise
            return str(error)
        adapter.switch(model, adapter.PAGED)
        self._facts = attrs.evolve(self._facts, description=f"{self._held}; runs {how_it_runs(model)}")
        if model.base_model is not model:
            self._embedder = self._decoder_embedder()
            size = self._embedder.embed([np.zeros(1, np.int32)]).shape[1]
            self._facts = attrs.evolve(self._facts, embedding_size=size)
        return ""

    def _decoder_embedder(self) -> Embedder:
        return DecoderEmbedder(original_of(self._model).base_model, self._pooling_config, self._own_layers)

    def _load_layerwise(self, files: ModelFiles, phases: Phases) -> LoadedDecoder | None:
        """Load a decoder layer by layer; None: transformers has to load it whole, as the log says."""
        reason, share = self._obstacle_to_layers(files), self._share
        if share is not None and self._device.type == "cpu" and not share.agree_everywhere(not reason):
            reason = reason or "it is on another rank"
        if not reason:
            try:
                open_files = functools.partial(open_source, files.name, files.options, files.config)
                source = open_files() if share is None else share.prepared(open_files)
                return self._load_source(files, source, phases)
            except (NotLayerwiseError, OSError) as error:
                reason = str(error)
        self._held = f"loaded whole: {reason}"
        logger.info("%s is %s.", files.source.path, self._held)
        return None

    def _load_source(self, files: ModelFiles, source: WeightSource, phases: Phases) -> LoadedDecoder:
        """Load a decoder from its weights' source.

        Raises:
            NotLayerwiseError: It cannot be loaded layer by layer.
        """
        num_parameters = sum(math.prod(source.shape(name)) for name in source.names())
        holding = self._holding(files, source, num_parameters)
        decoder = [Source(native_decoder.SOURCE)] if self._share is None else []
        self._prepare_kernels([Source(native_linear.SOURCE), *decoder, *self._usual_attention()], phases)
        phases.begin("weights")
        self._set_threads(num_parameters)
        loaded = load_layerwise(
            files,
            source,
            holding=holding,
            native=self._mode.native(),
            prepare=fix_dynamic_frequencies,
            share=self._share,
        )
        if self._share is not None:
            self._share.adopt(loaded.model)
        self._held = f"{source.format}; held as {forms_of(loaded.model)}"
        logger.info("%s: %s.", files.source.path, self._held)
        return loaded

    def _holding(self, files: ModelFiles, source: WeightSource, num_parameters: int) -> Holding:
        """Return the form in which a checkpoint's matrices are held.

        Raises:
            NotLayerwiseError: A dtype was asked for, or is the files', in which no packed layer computes.
        """
        if self._quantises:
            return Holding(self._config.quantization)
        if files.source.is_draft and files.source.dtype == "auto" and self._mode.native() is not None:
            return Holding("int8")
        if files.source.dtype == "auto" and source.dtype is not torch.float16 and self._mode.native() is not None:
            return Holding(AS_STORED)
        if files.source.dtype == BFLOAT16 and self._mode.native() is not None:
            return Holding(BFLOAT16)
        dtype = choose_dtype(
            files.source.dtype,
            stored=dtype_of(files.config) or source.dtype,
            device=self._device,
            num_parameters=num_parameters,
        )
        if dtype is not torch.float32:
            raise NotLayerwiseError(f"it computes in {str(dtype).removeprefix('torch.')}")
        return Holding(FLOAT32)

    def _obstacle_to_layers(self, files: ModelFiles) -> str:
        """Return why a decoder is not to be loaded layer by layer; empty: nothing speaks against it."""
        if self._device.type != "cpu":
            return f"it goes to {self._device}"
        if self._config.pack != "auto" or not self._may_replace:
            return "its layers are not packed"
        if self._mode.compiles or not self._mode.packs:
            return "graphs are made of it"
        return "it brings code of its own" if own_code(files.config) and files.source.trust_remote_code else ""

    def _load_whole(self, files: ModelFiles, phases: Phases) -> tuple[Any, tuple[AttentionLayer, ...]]:
        """Load a decoder, or this rank's share of it, by transformers; returns it with its attention layers."""
        share = self._share
        model = self._model = load_decoder(files, self._device) if share is None else share.load(files, self._device)
        if self._quantises:
            model.float()
        fix_dynamic_frequencies(model)
        phases.begin("inspection")
        return model, attention_layers(model, own=None if share is None else share.layers)

    def _learn(
        self, model: Any, layers: tuple[AttentionLayer, ...], files: ModelFiles, num_parameters: int | None
    ) -> None:
        """Choose cache, kernel and threads for a model, and note the facts.

        Args:
            model: Loaded.
            layers: Attention layers of the model.
            files: Where it comes from.
            num_parameters: Before it was packed; None: it is not.
        """
        share = self._share
        self._kernel = self._chosen_kernel(layers, _num_heads(model) if share is None else share.num_heads)
        self._facts = attrs.evolve(model_facts(model, self._layers), fingerprint=fingerprint(files))
        if share is not None:
            self._facts = attrs.evolve(self._facts, num_parameters=share.num_parameters)
            logger.info("%s", share.summary)
        if num_parameters is None:
            self._set_threads(self._facts.num_parameters)
        else:
            self._facts = attrs.evolve(self._facts, num_parameters=num_parameters)

    def _chosen_kernel(self, layers: tuple[AttentionLayer, ...], num_heads: int) -> PagedKernel | None:
        return choose_kernel(
            self._config.attention,
            device=self._device,
            layout=self._config.layout,
            layers=layers,
            stored=self._layers,
            num_heads=num_heads,
            in_graphs=self._mode.compiles,
        )

    def _make_check(
        self, model: Any, layers: tuple[AttentionLayer, ...], expected: list[torch.Tensor] | None
    ) -> ModelCheck | None:
        """Return the check of the paged forward; None: it is not wanted.

        Args:
            model: Loaded.
            layers: Attention layers of the model.
            expected: Logits of its original modules; None: it still has them.
        """
        if not self._config.check_model:
            return None
        # Compared in the model's own dtype, for rounding by a narrower cache is no error.
        check = ModelCheck(
            model,
            layers,
            layout=self._config.layout,
            kernel=self._kernel,
            agree=None if self._share is None else self._share.accept,
            expected=expected,
        )
        if self._quantises and expected is None:
            check.compare(model)  # afterwards, errors of rounding would hide others
        return check

    def _prepare_kernels(self, sources: list[Source], phases: Phases) -> None:
        """Have kernels that the model needs compiled side by side, if they are not there."""
        if sources and self._device.type == "cpu":
            phases.begin("kernels")
            phases.note_cache(found=prepare(sources))

    def _usual_attention(self) -> list[Source]:
        """Return the attention kernel of most models, before the layers are known: while the others are compiled costs least."""
        if self._config.attention not in ("auto", "native"):
            return []
        stored = STORED_DTYPES.get(self._config.kv_dtype, torch.float32)
        return [native_attention.source_for(frozenset({torch.float32, stored}))]

    def _kernels_for(self, layers: tuple[AttentionLayer, ...]) -> list[Source]:
        """Return the kernels that a model needs; chooses what its cache holds."""
        self._own_layers = layers
        self._layers = stored_layers(layers, self._config.kv_dtype)
        sources = []
        layout = "ragged" if self._mode.compiles else self._config.layout
        attends = (
            self._config.attention in ("auto", "native")
            and native_attention.obstacle(self._device, layout, layers) is None
        )
        if attends:
            sources.append(native_attention.source_for(cache_dtypes(layers, self._layers)))
        if self._packs or self._quantises:
            sources.append(Source(native_linear.SOURCE))
            if attends and not self._mode.compiles and self._share is None:
                sources.append(Source(native_decoder.SOURCE))
        return sources

    @property
    def _packs(self) -> bool:
        packs = (
            self._may_replace
            and self._config.pack == "auto"
            and self._model.dtype == torch.float32
            and self._device.type == "cpu"
        )
        return packs and self._mode.packs

    @property
    def _fuses(self) -> bool:
        fuses = self._may_replace and self._config.pack == "auto" and self._device.type == "cuda"
        return fuses and triton_kernels.is_installed()

    @property
    def _quantises(self) -> bool:
        return self._config.quantization != "none"

    def _replace_modules(self, model: Any) -> None:
        """Pack linear layers and fuse modules where possible."""
        together = self._share.agree if self._share is not None and self._share.divides_layers else None
        if self._fuses:
            from trencadis_torch.linear.triton_kernels import TritonModules

            self._replacement = fuse_modules(model, kernels=TritonModules(), together=together)
        elif self._packs or self._quantises:
            self._replacement = replace_modules(
                model, quantization=self._config.quantization, native=self._mode.native(), together=together
            )

    def _note_replaced(self, model: Any, layers: tuple[AttentionLayer, ...]) -> None:
        """Let a model whose modules were replaced run in one call if it can; updates the facts."""
        if self._replacement is None:
            return
        self._facts = attrs.evolve(self._facts, weights_bytes=self._replacement.weights_bytes)
        if self._fuses:
            return
        if self._share is not None:
            logger.info("%s runs layer by layer: ranks exchange something between.", self._facts.architecture)
        elif not self._mode.compiles:
            fuse_decoder(model, layers=layers, kernel=self._kernel, native=self._mode.native())
        if rounds_to_bfloat16(model):
            self._facts = attrs.evolve(self._facts, dtype=BFLOAT16)
        if self._quantises:
            self._facts = attrs.evolve(self._facts, dtype=self._config.quantization)
        if self._quantises or rounds_rows(model):
            # The dtype as well, for where files cannot be read there is no fingerprint.
            self._facts = attrs.evolve(
                self._facts,
                fingerprint=quantised_fingerprint(self._facts.fingerprint, self._config.quantization),
            )

    def _set_threads(self, num_parameters: int) -> None:
        """Choose the threads of one operation: a small model's are over before a second thread has begun."""
        if self._device.type == "cpu":
            is_small = num_parameters < SINGLE_THREAD_PARAMETERS
            num_threads = self._config.num_threads or (1 if is_small else 0)
            if not num_threads and (self._share is not None or self._num_replicas > 1):
                available = torch.get_num_threads() if self._share is None else self._share.num_threads()
                num_threads = max(1, available // self._num_replicas)
            if num_threads:
                self._num_threads = num_threads
                torch.set_num_threads(num_threads)

    def _refuse_shares(self, files: ModelFiles) -> None:
        """Refuse to divide a model that only embeds.

        Raises:
            BackendError: There are several ranks.
        """
        if self._share is not None:
            raise BackendError(
                f"[parallel] {self._share.size} ranks: {files.source.path}: {ONLY_EMBEDS.refused['tensor']}.",
                hint="Set [parallel] tensor = 1 and pipeline = 1.",
            )

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error here ends what other ranks wait for."""
        return contextlib.nullcontext() if self._share is None else self._share.together()

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Run the largest step; on the CPU a smaller one of about a second, scaled up.

        Raises:
            OutOfMemoryError: The step alone does not fit.
        """
        with (
            self._on_device(),
            self._together(),
            _named_memory_errors(f"a step of {max_num_batched_tokens} tokens"),
        ):
            measuring: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._share is not None:
                self._share.settle()  # what is free is so after every rank's weights are there
                measuring = self._share.measuring(padded=self._config.layout == "padded")
            with measuring:
                report = measure_memory(
                    self._model,
                    self._layers,
                    self._facts,
                    layout=self._config.layout,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_num_seqs=max_num_seqs,
                    kernel=self._kernel,
                )
        if self._share is not None:
            hidden_size = int(self._model.config.get_text_config(decoder=True).hidden_size)
            gathered_bytes = max_num_batched_tokens * hidden_size * self._model.dtype.itemsize
            report = self._share.divide(report, self._device, gathered_bytes=gathered_bytes)
        return self._mode.reserve(
            report,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            logits_bytes=max_num_seqs * self._facts.vocab_size * self._model.dtype.itemsize,
        )

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate the KV cache, host memory for its blocks, the rows and the sampler's state.

        Raises:
            OutOfMemoryError: No room.
        """
        self._acceptance: AcceptanceRule = plan.acceptance or MatchingPrefix()
        self._connector, self._layer_wait_s = plan.connector, plan.layer_wait_s
        own = self._own_blocks = None if self._share is None else self._share.own_blocks(plan)
        head = self._head
        self._cache = PagedKVCache(
            self._layers if head is None else (*self._layers, head.layer),
            num_blocks=plan.num_blocks if own is None else own.num_blocks,
            block_size=plan.block_size,
            device=self._device,
            kernel=self._kernel,
        )
        if self._config.prefault_cache:
            self._cache.prefault()
        if self._replacement is not None:
            self._cache.kernels = f"{self._cache.kernels}+{self._replacement.kernels}"
        if head is not None:
            self._cache.make_blender = _refuse_to_blend
        elif self._share is None:
            self._cache.make_blender = functools.partial(make_blender, self._model)
        else:
            # Which tokens are blended again would be another choice on each rank.
            self._cache.first_head = self._share.first_head
            self._cache.sums = self._share.sums
        num_host_blocks = plan.num_host_blocks if own is None else own.num_host_blocks
        self._host_blocks = HostBlocks(self._cache, num_blocks=num_host_blocks)
        with self._on_device(), _named_memory_errors("the rows' state"):
            if self._samples:
                self._sampler.allocate(num_rows=plan.num_rows, vocab_size=self._facts.vocab_size, device=self._device)
            self._make_runner(plan)

    def _make_runner(self, plan: AllocationPlan) -> None:
        share, own = self._share, self._own_blocks
        if share is None or own is None or share.gather is None:
            self._rows = Rows(plan, self._device)
            check = functools.partial(check_graph, quantised=self._quantises) if self._config.check_model else None
            self._runner = self._mode.make_runner(self._model, rows=self._rows, cache=self._cache, check=check)
            if self._head is not None:
                from trencadis_torch.heads.drafter import HeadDrafter
                from trencadis_torch.heads.states import LayerInputs

                self._drafter = HeadDrafter(self._head, rows=self._rows, cache=self._cache)
                self._runner.follow_with(self._drafter, LayerInputs(self._model, self._head_reads))
            return
        from trencadis_torch.parallel.data_attention import DataRunner, OwnRows

        self._rows = OwnRows(plan, self._device, own, share.size)
        self._runner = DataRunner(
            self._model,
            gather=share.gather,
            num_rows=plan.num_rows,
            rows=self._rows,
            cache=self._cache,
            layout=self._config.layout,
            workspace=Workspace(),
        )

    @property
    def _samples(self) -> bool:
        """Whether this rank samples; without others it does."""
        return self._share is None or self._share.is_output

    @torch.inference_mode()
    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Run every bucket of the padded layout on padding, and make its graph if there shall be one.

        Raises:
            BackendError: The model does something that no graph can hold, or a graph computes something else.
            OutOfMemoryError: No room.
        """
        with self._on_device(), self._together(), _named_memory_errors("the buckets"):
            return self._mode.warm_up(buckets, run=self._run_bucket, progress=progress)

    def prepare(self, bucket: Bucket) -> None:
        """Prepare one bucket; see ``warm_up``."""
        self.warm_up([bucket])

    def _run_bucket(self, bucket: Bucket) -> None:
        if self._config.layout == "ragged":
            return  # nothing depends on buckets
        none = np.empty(0, np.int32)
        one = Pass(
            bucket=bucket,
            indices=none,
            rows=none,
            starts=none,
            query_lens=none,
            num_logits=none,
            num_prompt_logits=none,
        )
        with self._on_device():
            self._run(one, None)

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingStep:
        """Run a batch (CPU), or launch it (CUDA). Of several ranks the one that samples has the tokens."""
        with self._on_device(), self._together(), self._mode.step() as counts:
            timer = StepTimer(self._device, self._clock)
            self._rows.apply(batch, self._sampler if self._samples else None)
            if self._drafter is not None:
                self._drafter.begin_step()
            connector = self._connector
            gate = None if connector is None else LayerGate.of(connector, budget_s=self._layer_wait_s)
            results = [self._run(one, batch, gate) for one in batch.passes]
            if self._share is not None:
                self._share.exchange.check()
            pending = TorchStep(
                num_sequences=batch.num_sequences,
                emitted=[result.emitted for result in results if result.emitted is not None and self._samples],
                prompts=[result.prompt for result in results if result.prompt is not None],
                num_padded_tokens=sum(result.num_padded_tokens for result in results),
                timer=timer,
                step=batch.step,
                missed_layers=gate is not None and not gate.is_whole,
            )
        pending.num_compilations = counts.num_compilations
        return pending

    @torch.inference_mode()
    def guess(self, batch: GuessBatch) -> Int32Array | None:
        """Continue texts greedily, where the model runs in one call; see ``SupportsGuessing``."""
        if self._runner is None or self._share is not None:
            return None
        with self._on_device():
            return self._runner.guess(batch)

    def draft(self, batch: HeadBatch) -> Int32Array:
        """Draft with the head that was loaded with the model; see ``SupportsHead``.

        Raises:
            BackendError: There is none, or this came before allocate.
        """
        with self._on_device():
            return self._loaded_drafter().draft(batch)

    def rank(self, nodes: HeadNodes) -> HeadGuesses:
        """Look beyond nodes of draft trees with that head; see ``SupportsHead``.

        Raises:
            BackendError: There is none, or this came before allocate.
        """
        with self._on_device():
            return self._loaded_drafter().rank(nodes)

    def _loaded_drafter(self) -> HeadDrafter:
        if self._drafter is None:
            raise BackendError("backend torch: no head was loaded that could draft.", hint="Set model.head.")
        return self._drafter

    def _run(self, one: Pass, batch: Batch | None, gate: LayerGate | None = None) -> Any:
        if self._runner is None:
            raise BackendError("backend torch: a batch came before allocate, or after close.")
        share = self._share
        counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if share is not None:
            counting = share.counting(
                one, padded=self._config.layout == "padded", num_rows=len(self._rows.prompt_logprobs)
            )
        with counting:
            return self._runner.run(
                one,
                drafts=None if batch is None else batch.drafts,
                sampler=self._sampler,
                acceptance=self._acceptance,
                gate=gate,
                exchange=None if share is None else share.exchange,
            )

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed whole texts in one forward; a decoder's KV cache is not touched."""
        if self._embedder is None and self._own_layers and self._facts.embedding_size:
            self._embedder = self._decoder_embedder()
        if self._embedder is None:
            raise BackendError(f"{type(self).__name__} does not embed.")
        with self._on_device(), self._together():
            return self._embedder.embed(token_ids)

    @torch.inference_mode()
    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy whole KV blocks, all layers."""
        if self._own_blocks is not None:
            sources, targets = self._own_blocks.copies(sources, targets)
        if len(sources):
            with self._on_device():
                pairs = to_device(np.stack([sources, targets]).astype(np.int64), self._device)
                self._cache.copy_blocks(pairs[0], pairs[1])

    @torch.inference_mode()
    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy KV blocks to host memory and back, all layers; on CUDA in the stream of the steps, without waiting."""
        copies = {"outs": outs, "ins": ins} if self._own_blocks is None else self._own_blocks.swaps(outs=outs, ins=ins)
        with self._on_device():
            self._host_blocks.swap(**copies)

    def metrics(self) -> str:
        """Return counters of graphs and of experts; empty where there are none by configuration."""
        return self._mode.metrics() + ("" if self._share is None else self._share.metrics())

    def close(self) -> None:
        """Let go of model, graphs and cache; may be called twice."""
        self._mode.close()
        self._model = self._runner = self._embedder = self._head = self._drafter = None
        self._own_layers = ()
        for name in ("_cache", "_host_blocks", "_rows"):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def kv_cache(self) -> PagedKVCache:
        """Return the cache: per layer keys and values by block; see :class:`PagedKVCache`.

        Raises:
            BackendError: The ranks divide a layer, and layers differ in their KV heads: no range of heads names what this rank holds.
        """
        if self._share is not None:
            self._share.check_heads(layer.num_kv_heads for layer in self._layers)
        return self._cache

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else OwnThreads(self._num_threads)


def _refuse_to_blend(_: PagedKVCache) -> KVBlender:
    raise BackendError("model.head: what is blended would have to go through the head as well, which it does not.")


def _num_heads(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "num_attention_heads", 0) or 0)


@contextlib.contextmanager
def _named_memory_errors(what: str) -> Any:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"The device has no room for {what}: {error}") from error
