"""Step times of devices that were not measured: from the sizes of the model and the data sheet of the device.

Every part of a step takes as long as the device needs at its peak for its operations or its bytes. There are three forms:

    roofline    the larger of the times for operations and for bytes, and the link's: no device is faster
    published   the sum of the parts, each times a factor that was fitted to runs of vLLM, and what does not depend on sizes
    bounded     the larger of both

The published factor of prefill operations is 0.15: beyond some hundred prompt tokens in a step its result is faster than the device can be.
The runs that it was fitted to had few. Hence the bound.

Source: inference-sim (BLIS), sim/latency/trained_physics_model.go and defaults.yaml, f90a1e3a, Apache-2.0: formula and factors, fitted
to 15 runs of six models on the H100, with an error of 12 % of end-to-end latency over 38 runs as its authors say. Roofline: Williams,
Waterman and Patterson, Roofline: an insightful visual performance model, 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import attrs
from attrs.validators import and_, ge, gt, in_, le

from trencadis.errors import ConfigError, ConfigValueError, UnknownKeyError, did_you_mean
from trencadis.files import parse_toml, read_text
from trencadis.records import StepShape
from trencadis_tools.simulation.step_times.model_sizes import ModelSizes

__all__ = [
    "FORMS",
    "DeviceSheet",
    "Factors",
    "SheetStepTimes",
    "StepParts",
    "parse_sheet",
    "read_sheet",
    "read_sheet_file",
    "sheet_names",
]

FORMS: Final = ("bounded", "published", "roofline")

_GATED: Final = 3
"""Matrices of a gated feed-forward network."""
_MAX_BYTES: Final = 1 << 20
"""Largest file of a sheet."""
_DTYPES: Final = ("bfloat16", "float16", "float32", "float8")

_FACTOR: Final = and_(ge(0.0), le(1000.0))
_OVERHEAD: Final = and_(ge(0.0), le(10.0))
_PEAK: Final = and_(gt(0.0), le(1e21))


@attrs.frozen(kw_only=True)
class Factors:
    """What parts of a step are multiplied by, and what they are added to.

    Attributes:
        prefill_compute: Factor of the operations of prefills.
        prefill_kv: Factor of writing their keys and values.
        decode_compute: Factor of the operations of decodes.
        decode_kv: Factor of reading and writing keys and values of decodes.
        weights: Factor of reading all weights once.
        link: Factor of sums over the ranks. Source: 0.752 times bytes over the memory's bandwidth of the H100; here over its link's.
        layer_s: Time of each layer, seconds.
        row_s: Time of each sequence, seconds.
        step_s: Time of each step, seconds.
        expert_layer_s: Time of each layer with experts, where others have none, seconds.
    """

    prefill_compute: float = attrs.field(default=0.152128, validator=_FACTOR)
    prefill_kv: float = attrs.field(default=0.0, validator=_FACTOR)
    decode_compute: float = attrs.field(default=0.0, validator=_FACTOR)
    decode_kv: float = attrs.field(default=1.94710771, validator=_FACTOR)
    weights: float = attrs.field(default=1.36252915, validator=_FACTOR)
    link: float = attrs.field(default=0.752037 * 450e9 / 3.35e12, validator=_FACTOR)
    layer_s: float = attrs.field(default=32.09546717e-6, validator=_OVERHEAD)
    row_s: float = attrs.field(default=4.41684444e-6, validator=_OVERHEAD)
    step_s: float = attrs.field(default=126.024825e-6, validator=_OVERHEAD)
    expert_layer_s: float = attrs.field(default=481.8613888e-6, validator=_OVERHEAD)


def _check_flops(sheet: Any, field: attrs.Attribute[Any], flops: Mapping[str, float]) -> None:
    if not flops:
        raise ValueError("flops must have the peak of a type of weights")
    for dtype, peak in flops.items():
        _PEAK(sheet, field.evolve(name=f"flops.{dtype}"), peak)


@attrs.frozen(kw_only=True)
class DeviceSheet:
    """What the maker of a device says of it.

    Attributes:
        name: In full.
        flops: Peak operations per second, dense, by type of weights.
        bandwidth_bytes_per_s: Bandwidth of the memory, in bytes per second.
        memory_bytes: Size of the memory, in bytes.
        link_bytes_per_s: Peak rate to the other devices of a node, one direction; a device without links computes alone.
        link_latency_s: Time that a sum over the ranks takes, however few bytes it sends.
        sources: Where the numbers are from.
        factors_from: Where the factors are from.
        factors: Those of its kernels.
    """

    name: str
    flops: Mapping[str, float] = attrs.field(validator=_check_flops)
    bandwidth_bytes_per_s: float = attrs.field(validator=_PEAK)
    memory_bytes: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1e18)))
    link_bytes_per_s: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1e21)))
    link_latency_s: float = attrs.field(default=0.0, validator=_OVERHEAD)
    sources: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    factors_from: str = "fitted on the H100"
    factors: Factors = attrs.field(factory=Factors)

    def peak_flops(self, dtype: str) -> float:
        """Return the peak for weights of a type: that of bfloat16 for narrower ones which the device widens. Pure.

        Raises:
            ConfigError: The sheet has no number for it.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype == "float8" and "bfloat16" in self.flops:
            return self.flops["bfloat16"]
        raise ConfigError(
            f"the sheet of {self.name} has no peak for {dtype}.", hint=f"It has {', '.join(sorted(self.flops))}."
        )


def sheet_names() -> list[str]:
    """Return the names of the sheets, in order."""
    folder = resources.files(__package__).joinpath("sheets")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_sheet(name: str) -> DeviceSheet:
    """Return a sheet.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in sheet_names():
        raise ConfigError(f"there is no device sheet {name!r}.", hint=f"There are {', '.join(sheet_names())}.")
    return parse_sheet(
        resources.files(__package__).joinpath("sheets", f"{name}.toml").read_text(encoding="utf-8"), name
    )


def read_sheet_file(file: Path) -> DeviceSheet:
    """Return the sheet of a file.

    Raises:
        ConfigError: It cannot be read, or is none; names the key.
    """
    try:
        text = read_text(file, max_bytes=_MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"device sheet {file}: cannot be read: {error}.", hint="Correct the path.") from error
    return parse_sheet(text, str(file))


def parse_sheet(text: str, source: str) -> DeviceSheet:
    """Return the sheet that a TOML text says. Pure.

    Args:
        text: Keys as the attributes of :class:`DeviceSheet`.
        source: Named in errors.

    Raises:
        ConfigError: It is no TOML.
        UnknownKeyError: A key has no meaning.
        ConfigValueError: A value is missing, of another type, or out of its range.
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"device sheet {source}: is no TOML: {error}.", hint="Write key = value in each line."
        ) from error
    factors = _made(Factors, _mapping(table.get("factors", {}), "factors", source), "factors", source)
    sheet: DeviceSheet = _made(DeviceSheet, {**table, "factors": factors}, "", source)
    return sheet


def _made(kind: type[Any], table: Mapping[str, Any], where: str, source: str) -> Any:
    """Return an instance with the keys of a table."""
    fields = {field.name: field for field in attrs.fields(kind)}
    for key, value in table.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise UnknownKeyError(
                f"{path} (from {source}): no such key of a device sheet.{did_you_mean(key, list(fields))}",
                hint=f"Known here: {', '.join(fields)}.",
            )
        _check_type(key, value, path, source)
    missing = [name for name, field in fields.items() if field.default is attrs.NOTHING and name not in table]
    if missing:
        raise ConfigValueError(
            f"device sheet {source}: {', '.join(missing)} is missing.", hint="The data sheet says it."
        )
    try:
        return kind(**table)
    except ValueError as error:
        raise ConfigValueError(f"device sheet {source}: {error.args[0] if error.args else error}.") from error


def _check_type(key: str, value: Any, path: str, source: str) -> None:
    """Raise if a value is not of the type that its key has; what is neither text, list nor table is a number."""
    if key == "factors":
        return
    if key == "flops":
        for dtype, peak in _mapping(value, path, source).items():
            if dtype not in _DTYPES:
                raise UnknownKeyError(
                    f"{path}.{dtype} (from {source}): no such type of weights.{did_you_mean(dtype, _DTYPES)}",
                    hint=f"Types are {', '.join(_DTYPES)}.",
                )
            _check_type(dtype, peak, f"{path}.{dtype}", source)
        return
    if key in ("name", "factors_from"):
        fits, kind = isinstance(value, str), "text"
    elif key == "sources":
        fits, kind = isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        kind = "a number"
    if not fits:
        raise ConfigValueError(f"{path} = {value!r} (from {source}) must be {kind}.")


def _mapping(value: Any, path: str, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigValueError(f"{path} = {value!r} (from {source}) must be a table.")
    return value


@attrs.frozen(kw_only=True)
class StepParts:
    """Seconds that a rank needs for the parts of a step at its device's peaks.

    Attributes:
        prefill_compute_s: Operations of prefills.
        prefill_kv_s: Writing their keys and values.
        decode_compute_s: Operations of decodes.
        decode_kv_s: Reading and writing keys and values of decodes.
        weights_s: Reading the weights.
        link_s: Bytes of the sums over the ranks.
        link_latency_s: Latency of these sums, in addition to the time of their bytes; no factor applies to it.
    """

    prefill_compute_s: float
    prefill_kv_s: float
    decode_compute_s: float
    decode_kv_s: float
    weights_s: float
    link_s: float
    link_latency_s: float = 0.0


@attrs.frozen(kw_only=True)
class SheetStepTimes:
    """Step times of a model on a device, divided over ``tensor`` devices; the host's are part of the factors.

    Attributes:
        model: Sizes of the model.
        device: Sheet of the device.
        tensor: Ranks that divide every layer; divides the heads.
        form: Form of the sum, one of ``FORMS``; see the head of this module.
    """

    model: ModelSizes
    device: DeviceSheet
    tensor: int = attrs.field(default=1, validator=ge(1))
    form: str = attrs.field(default="bounded", validator=in_(FORMS))

    def __attrs_post_init__(self) -> None:
        """Check that heads go over the ranks, and that ranks have links.

        Raises:
            ConfigError: They do not.
        """
        if self.tensor > 1 and not self.device.link_bytes_per_s:
            raise ConfigError(
                f"the sheet of {self.device.name} has no link_bytes_per_s, and {self.tensor} ranks need links.",
                hint="Add it to the sheet, or leave :tpN out.",
            )
        if self.model.num_heads % self.tensor or self.model.num_kv_heads % self.tensor:
            heads = f"{self.model.num_heads} query and {self.model.num_kv_heads} KV heads"
            raise ConfigError(f"{heads} do not go over {self.tensor} ranks.", hint="Choose a size that divides both.")

    def device_s(self, shape: StepShape) -> float:
        """Return the time of the step, seconds; 0 for one without tokens."""
        if not shape.num_tokens:
            return 0.0
        parts = self.parts(shape)
        if self.form == "published":
            return self._published_s(shape, parts)
        compute_s = parts.prefill_compute_s + parts.decode_compute_s
        bound_s = max(compute_s, parts.weights_s + parts.prefill_kv_s + parts.decode_kv_s)
        bound_s += parts.link_s + parts.link_latency_s
        return bound_s if self.form == "roofline" else max(bound_s, self._published_s(shape, parts))

    def _published_s(self, shape: StepShape, parts: StepParts) -> float:
        """Return the sum of the parts with factors and overheads, seconds."""
        factors = self.device.factors
        num_expert_layers = self.model.num_expert_layers if self.model.is_mixed else 0
        return (
            factors.prefill_compute * parts.prefill_compute_s
            + factors.prefill_kv * parts.prefill_kv_s
            + factors.decode_compute * parts.decode_compute_s
            + factors.decode_kv * parts.decode_kv_s
            + factors.weights * parts.weights_s
            + factors.link * parts.link_s
            + parts.link_latency_s
            + factors.layer_s * self.model.num_layers
            + factors.row_s * shape.num_rows
            + factors.step_s
            + factors.expert_layer_s * num_expert_layers
        )

    def host_s(self, shape: StepShape) -> float:
        """Return 0: the factors hold what the host takes."""
        return 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of a token, of all ranks together."""
        model = self.model
        return int(2 * model.num_layers * model.num_kv_heads * model.head_size * model.activation_bytes)

    def parts(self, shape: StepShape) -> StepParts:
        """Return the parts of a step, without factors. Pure.

        A token is multiplied once with every weight of its rank, two operations each; attention multiplies and adds for query and key,
        and for weight and value: four operations for each number of a head. A sum over t ranks sends 2 (t - 1) / t of its bytes, twice
        a layer. Drafts of a sequence read its KV entries once for all, and are multiplied with them one by one; here each sequence has the
        mean number.
        """
        model, device = self.model, self.device
        peak = device.peak_flops(model.dtype)
        kv_bytes = self.kv_bytes_per_token / self.tensor
        pair_ops = 4 * model.num_layers * model.num_heads * model.head_size / self.tensor
        token_ops = 2 * self._weights_of_token()
        sent = 2 * (self.tensor - 1) / self.tensor * 2 * model.num_layers * model.hidden_size * model.activation_bytes
        pairs = shape.num_decode_context * shape.num_decode_tokens / max(1, shape.num_decodes)
        return StepParts(
            prefill_compute_s=(token_ops * shape.num_prefill_tokens + pair_ops * shape.prefill_products) / peak,
            prefill_kv_s=kv_bytes * shape.num_prefill_tokens / device.bandwidth_bytes_per_s,
            decode_compute_s=(token_ops * shape.num_decode_tokens + pair_ops * pairs) / peak,
            decode_kv_s=kv_bytes * shape.num_decode_context / device.bandwidth_bytes_per_s,
            weights_s=self._weights() * model.weight_bytes / device.bandwidth_bytes_per_s,
            link_s=sent * shape.num_tokens / device.link_bytes_per_s if self.tensor > 1 else 0.0,
            link_latency_s=2 * model.num_layers * device.link_latency_s if self.tensor > 1 else 0.0,
        )

    def _weights_of_token(self) -> float:
        """Return the weights of a rank that a token is multiplied with, embeddings left out."""
        model = self.model
        num_dense = model.num_layers - model.num_expert_layers
        experts = model.num_expert_layers * (model.num_routes * model.expert_size + model.shared_expert_size)
        ffn = _GATED * model.hidden_size * (num_dense * model.ffn_size + experts)
        return (model.num_layers * model.attention_weights + ffn) / self.tensor

    def _weights(self) -> float:
        """Return the weights of a rank, all of its experts included, embeddings left out."""
        model = self.model
        num_dense = model.num_layers - model.num_expert_layers
        experts = model.num_expert_layers * (model.num_experts * model.expert_size + model.shared_expert_size)
        ffn = _GATED * model.hidden_size * (num_dense * model.ffn_size + experts)
        return (model.num_layers * model.attention_weights + ffn) / self.tensor
