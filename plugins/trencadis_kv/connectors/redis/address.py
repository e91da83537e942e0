"""Where a Redis server is: the parts of a URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import attrs

__all__ = ["RedisAddress", "without_password"]

_PORT = 6379


@attrs.frozen(kw_only=True)
class RedisAddress:
    """One database of one server.

    Attributes:
        host: Name or address; empty with ``path``.
        port: TCP.
        path: Of a unix socket; empty with ``host``.
        database: Number, 0 .. 15 unless the server says otherwise.
        user: Of the access control list; empty: the default user.
        tls: Speak TLS.
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
                ``valkey``, ``valkeys`` are other words for the first two.

        Raises:
            ValueError: It is none of these.
        """
        parts = urlsplit(url)
        user = unquote(parts.username or "")
        if parts.scheme == "unix":
            path = unquote(parts.path)
            if not path.startswith("/") or parts.hostname:
                raise ValueError("must have an absolute path behind unix://, such as unix:///run/redis/redis.sock")
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
