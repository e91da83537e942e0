"""One rank among others, as the backend sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import attrs
import torch

from trencadis.errors import BackendError, ConfigValueError, ModelLoadError
from trencadis.interfaces import AllocationPlan, Collective, RankGroups
from trencadis.records import LayoutFeature, MemoryReport, Pass
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.loader import ModelFiles
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.parallel.data_attention import OwnBlocks, Spread, TokenGather, gather_tokens
from trencadis_torch.parallel.experts import ExpertLoads, real_tokens
from trencadis_torch.parallel.loading import divide, load_share, run_experts_one_by_one
from trencadis_torch.parallel.parts import ShareWeights
from trencadis_torch.parallel.placement import ExpertPlacement, read_loads
from trencadis_torch.parallel.plan import read_plan_file
from trencadis_torch.parallel.sharding import Sharding
from trencadis_torch.parallel.support import FEATURES
from trencadis_torch.parallel.tokens import TokenExchange

__all__ = ["Share", "check_groups", "check_settings"]

T = TypeVar("T")


def check_groups(groups: RankGroups, config: TorchConfig) -> None:
    """Check that the backend ``torch`` serves the layout with its settings.

    Raises:
        BackendError: It has none of that kind.
        ConfigValueError: A key of ``[backend.torch]`` goes with one rank only.
    """
    check_settings(groups, config, FEATURES, table="backend.torch")
    layout = groups.layout
    if config.expert_placement != "linear" and layout.tensor > 1 and layout.expert == 1:
        raise ConfigValueError(
            f'[backend.torch] expert_placement = "{config.expert_placement}" with [parallel] expert = 1: every rank has a share of each '
            "expert, and all have as much to do.",
            hint=f'Set [parallel] expert = {layout.tensor}, or [backend.torch] expert_placement = "linear".',
        )


def check_settings(groups: RankGroups, config: object, features: Iterable[LayoutFeature], *, table: str) -> None:
    """Check that a backend's settings go with its layout.

    Args:
        groups: Where the rank stands.
        config: Configuration of the backend.
        features: Settings, and the layouts that each goes with.
        table: Name of the config's table.

    Raises:
        BackendError: Experts are to be divided over some of the ranks of a stage.
        ConfigValueError: A setting goes with one rank only.
    """
    layout = groups.layout
    if layout.expert not in (1, layout.tensor):
        raise BackendError(
            f"[parallel] expert = {layout.expert} with tensor = {layout.tensor}: experts are divided over all ranks that share a layer.",
            hint=f"Set [parallel] expert = {layout.tensor}, or 1 for a share of every expert on each rank.",
        )
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    for feature in (one for one in features if one.setting):
        key = feature.setting.rpartition(".")[2]
        value = getattr(config, key)
        refusing = [name for name, size in sizes.items() if size > 1 and name in feature.refused]
        if refusing and feature.is_asked(value):
            name = refusing[0]
            raise ConfigValueError(
                f'[{table}] {key} = "{value}" with [parallel] {name} = {sizes[name]}: {feature.refused[name]}.',
                hint=feature.remedy,
            )
    if layout.attention == "data" and layout.expert == 1:
        raise BackendError(
            f'[parallel] attention = "data" with expert = 1 and tensor = {layout.tensor}: it goes with whole experts.',
            hint='Set [parallel] expert to as many as tensor, or attention = "tensor".',
        )


def _placement(groups: RankGroups, config: TorchConfig) -> ExpertPlacement | None:
    """Return where whole experts are; None: each rank has a share of every expert."""
    if groups.layout.expert == 1:
        return None
    if config.expert_placement == "linear":
        return ExpertPlacement(num_ranks=groups.layout.expert, source='[backend.torch] expert_placement = "linear"')
    loads, source = read_loads(config.expert_loads)
    return ExpertPlacement(
        num_ranks=groups.layout.expert, loads=loads, num_redundant=config.redundant_experts, source=source
    )


class Share:
    """This rank, and its exchange with the others. Used by one thread, in the same order on every rank.

    Args:
        groups: Where it stands.
        config: Settings of plans and experts; another backend has the same ones.
        table: Whose settings they are, for messages.

    Attributes:
        size: Ranks of all stages.
        is_output: This rank samples.
        exchange: Exchange of sampled tokens.
        gather: Exchange of tokens, where ranks have different ones; set when the model is loaded.
    """

    def __init__(self, groups: RankGroups, config: TorchConfig, *, table: str = "backend.torch") -> None:
        self._groups = groups
        # One stage exchanges all by one group.
        self._everyone = groups.world if groups.layout.pipeline > 1 else groups.tensor
        self._plan = read_plan_file(config.tensor_plan, table)
        self._experts = _placement(groups, config)
        self._loads: ExpertLoads | None = None
        self._sharding: Sharding | None = None
        self._all_refuse = False
        self._device = torch.device("cpu")
        self._num_threads = max(1, torch.get_num_threads() // groups.layout.num_ranks)
        self.gather: TokenGather | None = None
        self.size = groups.layout.num_ranks
        self.is_output = groups.is_output
        self.exchange = TokenExchange(
            self._everyone, source=groups.layout.output_rank, is_staged=groups.layout.pipeline > 1
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do something with the other ranks: whatever this rank alone raises ends what they wait for."""
        try:
            yield
        except BaseException as error:
            if not self._all_refuse and error is not self.exchange.told:
                self._groups.tensor.abort()
                self._groups.world.abort()
            raise

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank of the stage; every one asks."""
        return self._all_hold(self._groups.tensor, holds)

    @property
    def divides_layers(self) -> bool:
        """Whether several ranks have parts of the same layers."""
        return self._groups.tensor.size > 1

    def accept(self, holds: bool) -> bool:
        """Return whether something holds on every rank, without which all raise; every rank asks."""
        self._all_refuse = not self._all_hold(self._everyone, holds)
        return not self._all_refuse

    def agree_everywhere(self, holds: bool) -> bool:
        """Return whether something holds on every rank; every one asks."""
        return self._all_hold(self._everyone, holds)

    def _all_hold(self, group: Collective, holds: bool) -> bool:
        refused = torch.tensor([0 if holds else 1], dtype=torch.int32, device=self._device)
        group.all_reduce(refused)
        return not int(refused[0])

    def load(self, files: ModelFiles, device: torch.device) -> Any:
        """Return this rank's share of a model.

        Raises:
            ModelLoadError: It cannot be loaded here, or on another rank.
            OutOfMemoryError: No room for the weights.
        """
        self._device = device

        def load() -> Any:
            self._check_placements()
            model, self._sharding = load_share(files, device, self._groups, self._plan, experts=self._experts)
            self._spread(model)
            return model

        model = self.prepared(load)
        self._count(model)
        return model

    def prepared(self, prepare: Callable[[], T]) -> T:
        """Prepare something on every rank; if one cannot, all raise.

        Args:
            prepare: Called once; exchanges nothing, or the same on every rank.

        Raises:
            ModelLoadError: It cannot be done on another rank.
            TrencadisError: Anything that ``prepare`` raises here.
        """
        result, error = None, None
        try:
            result = prepare()
        except (ModelLoadError, ConfigValueError, BackendError) as reason:
            error = reason
        everywhere = self.accept(error is None)
        if error is not None:
            raise error
        if not everywhere:
            raise ModelLoadError("[parallel]: another rank could not load its share; it says why.")
        return cast("T", result)

    def cut(self, model: Any, weights: NamedWeights) -> ShareWeights:
        """Make a model this rank's share, in place; returns the share's weights by their names there.

        Args:
            model: Model as transformers builds it, its parameters without memory.
            weights: Those of the whole model.

        Raises:
            ConfigValueError: The configuration names what is not there.
            ModelLoadError: It cannot be divided so.
        """
        self._check_placements()
        sharding = self._sharding = divide(model, self._groups, self._plan, experts=self._experts)
        run_experts_one_by_one(model, sharding, torch.float32)
        return ShareWeights(model, sharding.pieces, weights)

    def adopt(self, model: Any) -> None:
        """Let the experts of a share that was loaded layer by layer take the tokens that they are to take, and count them.

        Raises:
            ModelLoadError: Ranks with different tokens would all have to gather logits of every token.
        """
        self.prepared(lambda: self._spread(model))
        self._count(model)

    def _spread(self, model: Any) -> None:
        if self._groups.layout.attention == "data":
            self.gather = gather_tokens(model, self._groups.tensor)

    def _count(self, model: Any) -> None:
        if self._experts is not None and self._groups.tensor.rank == 0:
            self._loads = ExpertLoads(model)

    def _check_placements(self) -> None:
        """See that every rank places experts alike.

        Raises:
            ConfigValueError: The first rank read other loads.
        """
        if self._experts is None:
            return
        digest = torch.tensor([self._experts.digest], dtype=torch.int64, device=self._device)
        self._everyone.broadcast(digest)
        if int(digest) != self._experts.digest:
            raise ConfigValueError(
                f"{self._experts.source}: it has other loads on rank {self._groups.rank} than on the first, so experts would be missing.",
                hint="Give every machine the same file.",
            )

    def counting(self, one: Pass, *, padded: bool, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tokens are counted that a pass routes to experts, where that is done.

        Args:
            one: The pass.
            padded: It is padded to its bucket.
            num_rows: Number of rows of all ranks.
        """
        if self._loads is None:
            return contextlib.nullcontext()
        if self.gather is None:
            return self._loads.counting(real_tokens(one, padded=padded))
        spread = Spread.of(one, num_ranks=self.size, num_rows=num_rows, padded=padded)
        return self._loads.counting(spread.counted())

    def own_blocks(self, plan: AllocationPlan) -> OwnBlocks | None:
        """Return the KV blocks of this rank, where each has those of its own sequences; None: every rank has a part of each. Pure."""
        if self.gather is None:
            return None
        return OwnBlocks(
            rank=self._groups.rank,
            num_blocks=plan.num_blocks // self.size,
            num_host_blocks=plan.num_host_blocks // self.size,
        )

    def metrics(self) -> str:
        """Return counts of experts' tokens in Prometheus' text format; empty where every rank has a share of each."""
        return "" if self._loads is None else self._loads.metrics()

    @property
    def num_heads(self) -> int:
        """Query heads of a layer here."""
        return self._loaded.num_heads

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self._loaded.num_parameters

    @property
    def summary(self) -> str:
        """Says what is on this rank, for the log."""
        parts = []
        if self._groups.layout.tensor > 1:
            parts.append(f"Ranks divide {100 * self.divided_ratio:.0f} % of the parameters.")
        if self.layers is not None:
            parts.append(f"Layers {self.layers.start} to {self.layers.stop - 1} are here.")
        return " ".join(parts)

    @property
    def divided_ratio(self) -> float:
        """Part of the model's parameters that the ranks divide."""
        return self._loaded.num_divided / max(1, self._loaded.num_parameters)

    @property
    def first_head(self) -> int:
        """First KV head here, counted over all ranks; 0 where layers differ."""
        return 0 if self._loaded.heads is None else self._loaded.heads[0]

    def check_heads(self, num_kv_heads: Iterable[int]) -> None:
        """Check that the KV heads here are one range, the same in every layer, by which KV connectors know blocks.

        Args:
            num_kv_heads: In the cache, of each layer.

        Raises:
            BackendError: They are not.
        """
        heads = self._loaded.heads
        is_range = heads is not None and all(number == heads[1] - heads[0] for number in num_kv_heads)
        if self._groups.layout.tensor > 1 and not is_range:
            raise BackendError(
                "[parallel] tensor: layers of this model differ in their KV heads, so that a rank holds no range of heads of a block, by which "
                "KV connectors know it.",
                hint='Set kv_connector.name to "none", or [parallel] tensor to 1.',
            )

    @property
    def sums(self) -> str:
        """Names the order in which this layout sums; empty if layers are whole."""
        layout = self._groups.layout
        if layout.tensor == 1:
            return ""
        if self._experts is None:
            return f"+tp{layout.tensor}"
        kind = "ep" if self.gather is None else "dpep"
        return f"+{kind}{layout.tensor}" + (f"-{self._experts.digest:08x}" if self._experts.digest else "")

    @property
    def layers(self) -> range | None:
        """Layers of this stage; None: all."""
        return self._loaded.layers

    @property
    def _loaded(self) -> Sharding:
        assert self._sharding is not None, "loaded before"
        return self._sharding

    def num_threads(self) -> int:
        """Return the threads of one operation on the CPU: the ranks share its cores."""
        return self._num_threads

    def measuring(self, *, padded: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a step is as large as can be: of padded ranks with different tokens each has as many as one may have.

        Args:
            padded: Passes are padded to their buckets.
        """
        return contextlib.nullcontext() if self.gather is None or not padded else self.gather.over()

    def settle(self) -> None:
        """Return when every rank is here."""
        self._everyone.barrier()

    def divide(self, report: MemoryReport, device: torch.device, *, gathered_bytes: int) -> MemoryReport:
        """Return this rank's part of the memory, where ranks have one in common. Pure.

        Args:
            report: Memory of the device.
            device: Device of the model.
            gathered_bytes: Hidden states of the largest step: if one rank has all its tokens, as many are gathered of each other.
        """
        if self.gather is not None:
            report = attrs.evolve(report, activation_bytes=report.activation_bytes + self.size * gathered_bytes)
        if device.type != "cpu":
            return report
        shared = report.shared_cache_bytes
        return attrs.evolve(
            report,
            total_bytes=report.total_bytes // self.size,
            free_bytes=report.free_bytes // self.size,
            shared_cache_bytes=None if shared is None else shared // self.size,
        )
