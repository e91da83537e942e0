"""Processes of a cluster, their addresses and their flags."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from trencadis.errors import ConfigError

__all__ = ["HOST", "Member", "plan_cluster"]

HOST: Final = "127.0.0.1"
_SECRET: Final = "TRENCADIS_KV_CONNECTOR__P2P__SECRET"
_SECRET_BYTES: Final = 32
_OURS: Final = (
    "engine.role",
    "kv_connector.name",
    "kv_connector.p2p.advertised_host",
    "kv_connector.p2p.host",
    "kv_connector.p2p.port",
    "kv_connector.p2p.prefill_engines",
    "server.host",
    "server.port",
)


@attrs.frozen(kw_only=True)
class Member:
    """One process of a cluster.

    Attributes:
        name: Role and number, such as ``prefill 0``.
        role: ``prefill``, ``decode`` or ``both``.
        port: Port of its HTTP server.
        flags: Flags of its ``trencadis serve`` command.
        environment: Environment variables added to those of this process.
    """

    name: str
    role: str
    port: int
    flags: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(factory=dict, repr=False)


def plan_cluster(*, num_prefill: int, num_decode: int, port: int, flags: Sequence[str] = ()) -> tuple[Member, ...]:
    """Return the members: prefill engines, then serving engines, with a newly made common secret.

    Args:
        num_prefill: Engines that compute prompts; with 0 the others do it themselves.
        num_decode: Engines that serve clients; at least 1. A single one listens on ``port`` itself.
        port: Port that clients connect to.
        flags: Configuration flags passed to every member.

    Raises:
        ConfigError: ``flags`` contains an option that the plan sets itself.
    """
    _check(flags)
    # The secret goes into the environment, since every user of the machine can read flags; a flag of the operator's
    # overrides it.
    environment = {_SECRET: secrets.token_hex(_SECRET_BYTES)}
    p2p_ports = _free_ports(num_prefill, but=port)
    http_ports = _free_ports(num_prefill + num_decode, but=port)
    addresses = ",".join(f"{HOST}:{one}" for one in p2p_ports)
    prefill = [
        _member("prefill", i, flags, environment, port=http_ports[i], p2p_port=one) for i, one in enumerate(p2p_ports)
    ]
    role = "decode" if num_prefill else "both"
    ports = http_ports[num_prefill:] if num_decode > 1 else [port]
    return (
        *prefill,
        *[_member(role, i, flags, environment, port=one, engines=addresses) for i, one in enumerate(ports)],
    )


def _member(
    role: str,
    number: int,
    flags: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    p2p_port: int = 0,
    engines: str = "",
) -> Member:
    # These flags override configuration file and environment: members are reachable from this machine only, each has
    # its own ports, and all prefill engines belong to the cluster.
    hosts = [
        f"--{name}={HOST}" for name in ("server.host", "kv-connector.p2p.host", "kv-connector.p2p.advertised-host")
    ]
    ports = (f"--server.port={port}", f"--kv-connector.p2p.port={p2p_port}")
    told = (f"--kv-connector.p2p.prefill-engines={engines}", f"--engine.role={role}")
    own = ("--kv-connector.name=p2p", *hosts, *ports, *told)
    return Member(name=f"{role} {number}", role=role, port=port, flags=(*flags, *own), environment=environment)


def _check(flags: Sequence[str]) -> None:
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in _OURS:
            raise ConfigError(
                f"trencadis cluster: {flag}: the cluster sets {name} itself, for each member.",
                hint="Leave it out; --port says where clients come.",
            )


def _free_ports(number: int, *, but: int) -> list[int]:
    """Return ports that are free at the moment."""
    listeners = [socket.create_server((HOST, 0)) for _ in range(number + 1)]
    try:
        ports = [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
    return [one for one in ports if one != but][:number]
