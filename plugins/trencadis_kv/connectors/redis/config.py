"""Configuration of the connector to a Redis or Valkey server, and the parts of its URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import attrs
from attrs.validators import and_, ge, gt, le

from trencadis.interfaces import setting
from trencadis_kv.store.settings import SharedStoreSettings

__all__ = ["RedisAddress", "RedisConfig", "without_password"]

_PORT = 6379


@attrs.frozen(kw_only=True)
class RedisAddress:
    """One database of one server.

    Attributes:
        host: Host name or address; empty with ``path``.
        port: TCP port.
        path: Path of a unix socket; empty with ``host``.
        database: Number of the database, 0 .. 15 unless the server is configured otherwise.
        user: User of the access control list; empty: the default user.
        tls: Whether to use TLS.
    """

    host: str = ""
    port: int = _PORT
    path: str = ""
    database: int = 0
    user: str = ""
    tls: bool = False

    def __str__(self) -> str:
        place = f"unix://{self.path}" if self.path else f"{'rediss' if self.tls else 'redis'}://{self._host_and_port}"
        return f"{place}/{self.database}" if self.database and not self.path else place

    @property
    def _host_and_port(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Return the address in a URL; a password in it is left out, see :func:`without_password`. Pure.

        Args:
            url: ``redis://[user@]host[:port][/database]``, ``rediss://`` for TLS, or ``unix://[user@]/path[?db=database]``;
                ``valkey`` and ``valkeys`` are aliases of the first two.

        Raises:
            ValueError: The URL has none of these forms.
        """
        parts = urlsplit(url)
        user = unquote(parts.username or "")
        if parts.scheme == "unix":
            path = unquote(parts.path)
            if not path.startswith("/") or parts.hostname:
                raise ValueError("must have an absolute path after unix://, such as unix:///run/redis/redis.sock")
            number = parts.query.removeprefix("db=")
            return cls(path=path, database=_database(number), user=user)
        if parts.scheme not in {"redis", "rediss", "valkey", "valkeys"}:
            raise ValueError("must begin with redis://, rediss:// or unix://")
        if not parts.hostname:
            raise ValueError("must name a host, such as redis://127.0.0.1:6379")
        return cls(
            host=parts.hostname,
            port=_port(parts.port),
            database=_database(parts.path.strip("/")),
            user=user,
            tls=parts.scheme in {"rediss", "valkeys"},
        )


def without_password(url: str) -> str:
    """Return a URL with stars in place of its password; the same URL if it has none. Pure."""
    password = urlsplit(url).password
    return url if not password else url.replace(f":{password}@", ":***@", 1)


def _port(port: int | None) -> int:
    if port == 0:
        raise ValueError("must name a port of 1 .. 65535")
    return _PORT if port is None else port


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"must end in the number of a database, not in {text!r}")
    return int(text or 0)


def _is_url(_: object, attribute: attrs.Attribute[str], url: str) -> None:
    RedisAddress.parse(url)


@attrs.frozen(kw_only=True)
class RedisConfig(SharedStoreSettings):
    """Table ``[kv_connector.redis]``.

    Attributes:
        url: URL of the server and its database, with the user if it is not the default one, without the password.
        password: Password of that user.
        ttl_s: Lifetime of a block on the server, seconds; 0: until the server needs the memory.
        connect_timeout_s: Longest time to connect, seconds; a server that takes longer counts as unreachable.
        io_timeout_s: Longest silence of the server within a call, seconds; the call fails after it.
        tls_ca_path: File of the certificate authorities trusted for a ``rediss://`` server; empty: those of the system.
        tls_cert_path: File of the client certificate, for a server that asks for one; empty: none.
        tls_key_path: File of the client certificate's key; empty: in the file of the certificate.
    """

    url: str = setting(
        "redis://127.0.0.1:6379",
        "Server and database, with the user but without the password: redis://, rediss:// or unix://.",
        validator=_is_url,
    )
    password: str = setting("", "Password of the server.", secret=True)
    ttl_s: int = setting(
        0, "The server forgets a block after so long; 0: when it needs the memory.", unit="s", validator=ge(0)
    )
    connect_timeout_s: float = setting(
        1.0,
        "A server that accepts no connection within it cannot be reached.",
        unit="s",
        validator=and_(gt(0), le(60)),
    )
    io_timeout_s: float = setting(
        2.0, "A server that is silent for so long has failed.", unit="s", validator=and_(gt(0), le(60))
    )
    tls_ca_path: str = setting("", "Whose signature on a rediss:// server's certificate counts; empty: the system's.")
    tls_cert_path: str = setting("", "Certificate for a server that asks for one; empty: none.")
    tls_key_path: str = setting("", "Key of that certificate; empty: it is in the same file.")
