"""Config table of the connector over a Redis or Valkey server."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, gt, le

from trencadis.interfaces import setting
from trencadis_kv.connectors.redis.address import RedisAddress
from trencadis_kv.store.settings import StoreSettings

__all__ = ["RedisConfig"]


def _is_url(_: object, attribute: attrs.Attribute[str], url: str) -> None:
    RedisAddress.parse(url)


@attrs.frozen(kw_only=True)
class RedisConfig(StoreSettings):
    """Table ``[kv_connector.redis]``.

    Attributes:
        url: Of the server and its database, with the user if it is not the default one, without the password.
        password: Of that user.
        ttl_s: The server forgets a block after so many seconds; 0: when it needs the memory.
        connect_timeout_s: A server that does not accept a connection within it cannot be reached.
        io_timeout_s: A server that keeps silent for so long has failed.
        tls_ca_path: Certificates of those whom we believe who a ``rediss://`` server is; empty: those of the system.
        tls_cert_path: Certificate that we show to a server which asks for one; empty: none.
        tls_key_path: Its key; empty: in the file of the certificate.
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
