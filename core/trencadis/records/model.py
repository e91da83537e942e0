"""Facts about a model and a device that strategies and the engine need."""

from __future__ import annotations

import attrs

from trencadis.records.bucket import Bucket

__all__ = ["MemoryReport", "ModelFacts", "ModelSource", "WarmUp", "WarmUpReport"]


@attrs.frozen(kw_only=True)
class ModelSource:
    """Where a model comes from and how it is to be held.

    Attributes:
        path: A directory, a ``.gguf`` file, or a hub id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        revision: Commit or tag of a hub id; empty for the newest.
        trust_remote_code: Allow model code that the directory or the hub brings.
        pooling: How embeddings are made: ``auto``, ``last``, ``mean`` or ``cls``.
        normalize_embeddings: Scale embeddings to length 1.
        head: Directory of a head that drafts from the model's hidden states; ``mtp``: the one in the model's files; empty: none.
        remember: Keep what was proven of it, and use what was kept.
        is_draft: Another model checks all that it says: a backend may hold its weights in fewer bits than its files have.
    """

    path: str
    dtype: str = "auto"
    revision: str = ""
    trust_remote_code: bool = False
    pooling: str = "auto"
    normalize_embeddings: bool = True
    head: str = ""
    remember: bool = False
    is_draft: bool = False


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What a loaded model is.

    Attributes:
        architecture: Class name, such as ``LlamaForCausalLM``.
        dtype: Data type of weights and activations.
        vocab_size: Rows of the output projection: legal token ids are 0 .. vocab_size - 1.
        max_model_len: Longest sequence the model was made for, tokens.
        eos_token_ids: Tokens that end a text.
        num_parameters: Elements of all weights, shared ones once.
        weights_bytes: Memory of the weights on the device.
        kv_bytes_per_token: KV cache of one token over all layers; 0 for an encoder.
        generates: False for an encoder, which can only embed.
        embedding_size: Length of the vectors it embeds texts as; 0: it cannot.
        fingerprint: Digest of config and weights, equal wherever the same files lie; empty if the backend made none.
        description: The files' format, the form in which weights are held, and how the model runs, in words for people; may be empty.
    """

    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    generates: bool = True
    embedding_size: int = 0
    fingerprint: str = ""
    description: str = ""

    @property
    def identity(self) -> str:
        """What of the model decides the bytes of its KV; says nothing of the weights where there is no fingerprint."""
        return "\0".join((self.architecture, self.dtype, self.fingerprint))


@attrs.frozen(kw_only=True)
class MemoryReport:
    """Memory of one device after the model was loaded and the largest step was tried.

    Attributes:
        total_bytes: Memory that the device, or this process, may use in all.
        free_bytes: Memory that is free now.
        activation_bytes: The peak of temporaries in the largest step.
        cache_bytes: Memory of the KV cache, where the backend shares the memory out itself; None leaves it to
            ``cache.memory_fraction``.
        shared_cache_bytes: Most bytes of a cache that is larger than its sequences need, where other processes use the same memory and
            the cache takes it only as blocks are written; None: no such bound.
    """

    total_bytes: int
    free_bytes: int
    activation_bytes: int
    cache_bytes: int | None = None
    shared_cache_bytes: int | None = None


@attrs.frozen(kw_only=True)
class WarmUpReport:
    """What a backend did with the buckets it was asked to prepare.

    Attributes:
        prepared: Those that are ready; any other is compiled when it is first needed.
        num_graphs: Captured graphs, where there are such.
        graph_bytes: Memory that the preparation took.
        num_compilations: Number of programs that were compiled.
        num_deferred: Buckets that are put off; ``SupportsDeferredWarmUp.warm_up_rest`` prepares them.
        num_cached: Graphs that did not have to be compiled, for an earlier start left them on disk.
    """

    prepared: tuple[Bucket, ...]
    num_graphs: int = 0
    graph_bytes: int = 0
    num_compilations: int = 0
    num_deferred: int = 0
    num_cached: int = 0


@attrs.frozen(kw_only=True)
class WarmUp:
    """A warm-up that is over.

    Attributes:
        buckets: Those that the backend was asked to prepare.
        report: Says what the device did with them.
        took_s: Duration, seconds.
    """

    buckets: tuple[Bucket, ...] = ()
    report: WarmUpReport = WarmUpReport(prepared=())
    took_s: float = 0.0

    @property
    def skipped(self) -> tuple[Bucket, ...]:
        """Buckets that are not prepared, in the order of the table."""
        prepared = set(self.report.prepared)
        return tuple(bucket for bucket in self.buckets if bucket not in prepared)
