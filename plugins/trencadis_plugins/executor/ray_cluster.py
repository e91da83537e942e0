"""Ranks in actors of a Ray cluster; the executor is :class:`RanksExecutor`.

    engine      a placement group: one bundle a rank, on as few machines as there are
                an actor in each bundle ── connects, and shows the secret it was made with ──▶ a link over TCP
    then        as with processes of one machine: Ray only places ranks, says how an actor ended, and ends it

Ray notices a machine that is gone after half a minute and more. So ranks send signs of life of their own while they have something to
answer. A library that is imported, a kernel that is compiled, may hold Python's lock for as long, and then no sign comes; so a rank that
starts is lost when Ray says so, or after the time that a start has. On several machines ranks sum over gloo, NCCL or HCCL; shared memory is for one.
"""

from __future__ import annotations

import faulthandler
import hmac
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from trencadis.clock import Clock
from trencadis.errors import BackendError
from trencadis.interfaces import Backend
from trencadis.link import Link, LinkClosedError
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import RayConfig
from trencadis_plugins.executor.ranks.executor import RanksExecutor
from trencadis_plugins.executor.ranks.rank import Rank
from trencadis_plugins.executor.ranks.server import RankServer

__all__ = ["RayExecutor", "RayRank"]

logger = logging.getLogger("trencadis.executor")

_BEAT_S: Final = 1.0
_SECRET_BYTES: Final = 32
_RANK_BYTES: Final = 4
_PATIENCE_S: Final = 5.0
_RELEASE_S: Final = 1.0
"""For which the places of lost ranks are waited for; those of other nodes are free by then."""
_NOTICE_S: Final = 60.0
"""After so long Ray has noticed that a node is gone."""
_OWN_NODE_S: Final = 10.0
"""For which a replica waits for room on the node that is its own."""


class RayExecutor(RanksExecutor):
    """Hosts every rank of a replica in an actor of a Ray cluster.

    Args:
        config: Table ``[executor.ray]``.
        layout: How many ranks, and which of them gives the output.
        replica: Which of the copies this is; each goes to a node of its own, as far as there are nodes with room for one.
        num_replicas: Copies.
        clock: Measures silence.

    Raises:
        BackendError: Ray is not installed, or no cluster runs.
    """

    def __init__(
        self,
        config: RayConfig,
        *,
        layout: ParallelLayout,
        replica: int = 0,
        num_replicas: int = 1,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(config, layout=layout, name="ray", clock=clock)
        self._replica = replica
        self._num_replicas = num_replicas
        self._ray_config = config
        self._group: Any = None
        self._avoided: set[str] = set()

    def _start_ranks(self, make_backend: Callable[[int], Backend]) -> Iterable[Rank]:
        ray = _connected(self._ray_config.address)
        self._release_places()
        self._group = self._places(ray)
        own = ray.util.get_node_ip_address()
        secret = secrets.token_bytes(_SECRET_BYTES)
        with socket.create_server((own, 0), backlog=self.num_ranks) as server:
            port = server.getsockname()[1]
            actors, ends = [], []
            for rank in range(self.num_ranks):
                actor = self._actor(ray, rank)
                actors.append(actor)
                ends.append(actor.serve.remote(own, port, secret, rank))
            links = self._accepted(ray, server, secret, ends)
        nodes = ray.get([actor.node.remote() for actor in actors])
        self._host = "" if set(nodes) == {ray.get_runtime_context().get_node_id()} else own
        self._avoided.clear()
        logger.info("%d ranks on %d nodes of the Ray cluster.", self.num_ranks, len(set(nodes)))
        return [
            RayRank(ray, rank, Link(links[rank]), actor, end, self._ray_config, node=node, silent_nodes=self._avoided)
            for rank, (actor, end, node) in enumerate(zip(actors, ends, nodes, strict=True))
        ]

    def _places(self, ray: Any) -> Any:
        """Reserve a bundle for each rank.

        Raises:
            BackendError: The cluster has no room for them in time.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        config = self._ray_config
        bundle = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
        bundle = {name: number for name, number in bundle.items() if number}
        for nodes, wait_s in self._choices(ray, bundle):
            selectors = [{"ray.io/node-id": nodes}] * self.num_ranks if nodes else None
            group = placement_group([bundle] * self.num_ranks, strategy="PACK", bundle_label_selector=selectors)
            if group.wait(min(wait_s, config.start_timeout_s)):
                return group
            remove_placement_group(group)
        raise BackendError(
            f"The Ray cluster has had no room for {self.num_ranks} ranks of {bundle} for {config.start_timeout_s:.0f} s; it has "
            f"{ {name: number for name, number in ray.available_resources().items() if not name.startswith(('node:', 'bundle_'))} }.",
            hint="Lower num_cpus, num_gpus or resources in [executor.ray], or add machines.",
        )

    def _choices(self, ray: Any, bundle: dict[str, float]) -> Iterable[tuple[str, float]]:
        """Yield on which nodes to look for room, as Ray selects labels, and for how long; the last is anywhere."""
        if self._num_replicas > 1:
            whole = {name: number * self.num_ranks for name, number in bundle.items()}
            roomy = sorted(
                node["NodeID"]
                for node in ray.nodes()
                if node["Alive"] and node["NodeID"] not in self._avoided
                if all(node["Resources"].get(name, 0) >= number for name, number in whole.items())
            )
            if roomy:
                yield roomy[self._replica % len(roomy)], _OWN_NODE_S
        if self._avoided:  # Ray would place ranks there until it notices itself; then there may be room nowhere else
            yield f"!in({','.join(sorted(self._avoided))})", _NOTICE_S
        yield "", self._ray_config.start_timeout_s

    def _actor(self, ray: Any, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._ray_config
        place = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=rank)
        made = ray.remote(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            resources=dict(config.resources),
            max_concurrency=3,
            scheduling_strategy=place,
        )(RankActor)
        return made.remote()

    def _accepted(self, ray: Any, server: socket.socket, secret: bytes, ends: list[Any]) -> dict[int, socket.socket]:
        """Return the connection of each rank; one that does not know the secret is closed.

        Raises:
            BackendError: An actor ended, or did not connect in time.
        """
        end_s = self._clock.now_s() + self._ray_config.start_timeout_s
        links: dict[int, socket.socket] = {}
        server.settimeout(1.0)
        while len(links) < self.num_ranks:
            failed, _ = ray.wait(ends, timeout=0)
            if failed or self._clock.now_s() > end_s:
                why = (
                    _told(ray, failed[0])
                    if failed
                    else f"it did not connect within {self._ray_config.start_timeout_s:.0f} s"
                )
                raise BackendError(f"A rank could not be started on the Ray cluster: {why}.")
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            rank = _shown_rank(connection, secret)
            if 0 <= rank < self.num_ranks and rank not in links:
                links[rank] = connection
            else:
                connection.close()
        return links

    def _release_places(self) -> None:
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            # Returns when every node has given its places back: of one that is gone, when Ray has noticed that.
            removal = threading.Thread(target=remove_placement_group, args=(group,), daemon=True)
            removal.start()
            removal.join(_RELEASE_S)

    def close(self) -> None:
        """End the ranks, and give their places back; may be called twice."""
        super().close()
        self._release_places()


class RankActor:
    """The actor of one rank."""

    def serve(self, host: str, port: int, secret: bytes, rank: int) -> None:
        """Connect to the executor, and run what it calls until it is gone."""
        connection = socket.create_connection((host, port))
        connection.sendall(secret + rank.to_bytes(_RANK_BYTES, "little"))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        was_closed = threading.Event()
        threading.Thread(target=_end_with, args=(connection.dup(), was_closed), daemon=True).start()
        try:
            RankServer(Link(connection), beat_s=_BEAT_S).run()
        except LinkClosedError:
            os._exit(1)
        was_closed.set()
        connection.shutdown(socket.SHUT_RDWR)  # so that the executor sees that nothing more comes
        connection.close()

    def node(self) -> str:
        """Return the id of the node it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to standard error, which Ray shows to the driver."""
        faulthandler.dump_traceback(all_threads=True)


class RayRank(Rank):
    """An actor.

    Args:
        ray: The module.
        rank: Which.
        link: To its server.
        actor: Handle of the actor.
        end: Becomes ready when it ends.
        config: How long it may be silent.
        node: On which it is.
        silent_nodes: That node is added if it falls silent.
    """

    def __init__(
        self,
        ray: Any,
        rank: int,
        link: Link,
        actor: Any,
        end: Any,
        config: RayConfig,
        *,
        node: str,
        silent_nodes: set[str],
    ) -> None:
        super().__init__(rank, link)
        self._ray = ray
        self._actor = actor
        self._end = end
        self._config = config
        self._node = node
        self._silent_nodes = silent_nodes

    def is_stopped(self, now_s: float, *, is_starting: bool) -> bool:
        """Return whether nothing was heard of it for long; while it starts, for as long as a start may take, or until Ray knows its end."""
        silent_s, config = now_s - self.heard_s, self._config
        if silent_s <= config.heartbeat_timeout_s:
            return False
        if is_starting and silent_s <= max(config.start_timeout_s, config.heartbeat_timeout_s):
            ended, _ = self._ray.wait([self._end], timeout=0)
            if not ended:
                return False
        self.how_stopped = f"sent no sign of life for {silent_s:.0f} s"
        self._silent_nodes.add(self._node)
        return True

    def dump_stacks(self) -> None:
        """Ask the actor for them."""
        self._actor.dump_stacks.remote()

    def describe_end(self) -> str:
        """Return what Ray knows of its end."""
        return f"ended: {_told(self._ray, self._end)}"

    def kill(self) -> None:
        """Have Ray end its process."""
        self.link.close()
        self._ray.kill(self._actor, no_restart=True)


def _connected(address: str) -> Any:
    """Return the module ``ray``, connected to the cluster.

    Raises:
        BackendError: It is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise BackendError(
            "[executor] name = ray: Ray is not installed.", hint='pip install "trencadis[ray]"'
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise BackendError(
                f'[executor.ray] address = "{address}": no Ray cluster could be joined: {said}.',
                hint="Start one with `ray start --head`, or name another address. One that asks for a token needs RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in the environment of this process.",
            ) from error
    return ray


def _told(ray: Any, end: Any) -> str:
    """Return in one line how an actor ended."""
    try:
        ray.get(end, timeout=_PATIENCE_S)
    except ray.exceptions.GetTimeoutError:
        return "Ray has not noticed it yet"
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())[:300]
    return "it returned"


def _shown_rank(connection: socket.socket, secret: bytes) -> int:
    """Return the rank that a connection belongs to; -1 if it does not know the secret."""
    connection.settimeout(_PATIENCE_S)
    shown = b""
    try:
        while len(shown) < _SECRET_BYTES + _RANK_BYTES:
            part = connection.recv(_SECRET_BYTES + _RANK_BYTES - len(shown))
            if not part:
                return -1
            shown += part
    except OSError:
        return -1
    is_known = hmac.compare_digest(shown[:_SECRET_BYTES], secret)
    return int.from_bytes(shown[_SECRET_BYTES:], "little") if is_known else -1


def _end_with(connection: socket.socket, was_closed: threading.Event) -> None:
    """End this process at once when the executor is gone without having closed the rank, whatever this process does."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.poll()
    connection.close()
    if not was_closed.is_set():
        os._exit(1)
