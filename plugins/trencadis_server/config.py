"""Table ``[server]``: the OpenAI-compatible HTTP server, its limits, and what happens when the engine ends."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, gt, le

from trencadis.api import Config
from trencadis.errors import ConfigValueError
from trencadis.interfaces import setting

__all__ = ["LOOPBACK", "ServerConfig", "server_of", "with_server"]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Addresses that only this machine reaches."""


@attrs.frozen(kw_only=True)
class ServerConfig:
    """Table ``[server]``. Read by ``trencadis serve`` and ``trencadis run-batch`` only.

    Raises:
        ConfigValueError: Both ports are the same, a client's key is that of the administration, or a key is required and there is none.
    """

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = setting(8000, "Port to listen on; 0: any free one, printed at start.", validator=[ge(0), le(65535)])
    admin_port: int = setting(
        0,
        "Port of the administration pages, always on 127.0.0.1; 0: there are none.",
        validator=[ge(0), le(65535)],
    )
    admin_key: str = setting(
        "",
        "Key that the administration pages ask for; empty: none, but if there are api_keys the pages refuse every request.",
        secret=True,
    )
    model_name: str = setting("", "Name that clients ask for; empty: model.path. A comma separates further names.")
    api_keys: tuple[str, ...] = setting(
        None,
        'Keys that clients may use, each "key" or "name:key"; none: no key is needed. In a flag a comma divides them; one that has a '
        'comma is written in brackets: ["name:a,b"].',
        factory=tuple,
        secret=True,
    )
    require_key: bool = setting(
        False,
        "Refuse to start where other machines can reach the server and there are no api_keys; off: only a warning. Images for containers "
        "set it.",
    )
    max_body_bytes: int = setting(16 * 2**20, "Largest request body.", unit="bytes", validator=ge(1024))
    max_body_values: int = setting(
        500_000,
        "Most values in a request body, each token id being one: parsing more would keep other clients "
        "waiting. More are answered 400.",
        validator=ge(1024),
    )
    body_timeout_s: float = setting(
        30.0,
        "The head of a request may take this long, and its body as long again, else it is answered 408; a connection on which no request begins is closed.",
        unit="s",
        validator=gt(0),
    )
    max_requests: int = setting(
        1024,
        "Most requests in the server at once, running and waiting; each prompt of a list and each of n choices is one. "
        "More are answered 429.",
        validator=ge(1),
    )
    max_waiting_tokens: int = setting(
        1_000_000,
        "Most prompt tokens of requests that have no token yet; more are answered 429.",
        unit="tokens",
        validator=ge(1),
    )
    key_share: float = setting(
        0.5,
        "Most of max_requests and of max_waiting_tokens that the requests of one API key may have, where there are keys of several "
        "names; more are answered 429. 1: all.",
        unit="ratio",
        validator=[gt(0), le(1)],
    )
    client_weights: bool = setting(
        False, "Clients may set weight, their share against other tenants; else a request that does is refused."
    )
    keep_alive_s: float = setting(5.0, "An idle connection is closed after this.", unit="s", validator=gt(0))
    send_timeout_s: float = setting(
        60.0, "A client that takes no byte for this long is gone; its request ends.", unit="s", validator=gt(0)
    )
    drain_timeout_s: float = setting(
        30.0, "After SIGTERM running requests have this long to end.", unit="s", validator=ge(0)
    )
    max_engine_restarts: int = setting(
        3,
        "How often an engine that died or hung is started again within restart_window_s; once more, and the server ends with exit "
        "code 69. 0: never.",
        validator=ge(0),
    )
    restart_window_s: float = setting(
        600.0,
        "The end of an engine counts for so many seconds of service after it; loading is not counted.",
        unit="s",
        validator=gt(0),
    )
    allowed_origins: tuple[str, ...] = setting(None, "Origins that browsers may call from (CORS).", factory=tuple)
    observer: str = setting(
        "prometheus", "Observer added to [observer] names so that /metrics has the engine's; empty: none."
    )

    def __attrs_post_init__(self) -> None:
        if self.admin_port and self.admin_port == self.port:
            raise ConfigValueError(
                f"[server] admin_port = {self.admin_port}: it is server.port as well, which must be another.",
                hint="Choose another server.admin_port; 0: no administration pages.",
            )
        if self.admin_key and any(self.admin_key.strip() == _key_of(entry) for entry in self.api_keys):
            raise ConfigValueError(
                "[server] admin_key = ***: it is one of server.api_keys as well, so that a client could administer the server.",
                hint="Choose another server.admin_key.",
            )

        if self.require_key and self.is_open_to_all:
            raise ConfigValueError(
                f'[server] host = "{self.host}" without api_keys, and server.require_key is set: every machine that reaches this one could '
                "use the server.",
                hint="Set server.api_keys, such as in the environment: TRENCADIS_SERVER__API_KEYS=name:key.",
            )

    @property
    def lacks_admin_key(self) -> bool:
        """Whether clients have keys and the administration has none of its own."""
        return bool(self.api_keys) and not self.admin_key

    @property
    def is_open_to_all(self) -> bool:
        """Whether the server is reachable from other machines without a key."""
        return self.host not in LOOPBACK and not self.api_keys


def _key_of(entry: str) -> str:
    name, colon, rest = entry.partition(":")
    return (rest if colon else name).strip()


def server_of(config: Config) -> ServerConfig:
    """Return the table ``[server]`` of a configuration. Pure."""
    return config.table("server", ServerConfig)


def with_server(config: Config, **values: Any) -> Config:
    """Return a configuration with other values in its table ``[server]``. Pure."""
    return attrs.evolve(config, tables={**config.tables, "server": attrs.evolve(server_of(config), **values)})
