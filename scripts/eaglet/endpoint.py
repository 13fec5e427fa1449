"""Where a consumer finds its server: behind an endpoint file, as a lease; or at an address, with a token from the environment.

A token is read from the environment variable that the config names, sent, and never written or printed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eaglet.errors import ConfigError
from eaglet.lease import Lease, attach, say, state_of_endpoint


@dataclass(frozen=True)
class Connection:
    """A server's address, the headers that each request must carry, and whether it is worth asking again."""

    url: str
    headers: Mapping[str, str] = field(repr=False)  # may hold a token
    lease: Lease | None = None

    def alive(self) -> bool:
        """False once the server has ended for good.  A server at an address is never known to have ended."""
        return self.lease is None or self.lease.alive()

    def describe(self) -> str:
        """For messages."""
        return f"the server at {self.url}" + (f" (log: {self.lease.log})" if self.lease else "")


@contextmanager
def connect(endpoint: Path | None = None, url: str | None = None, token_env: str | None = None) -> Iterator[Connection]:
    """A connection to the server of an endpoint file, once it is healthy, or to `url`, at once.

    Raises ServerError when the endpoint's server cannot be had, ConfigError when the token is missing.
    """
    if (endpoint is None) == (url is None):
        raise ConfigError("give either an endpoint file or a url")
    if url is not None:
        yield Connection(url.rstrip("/"), _bearer(_token(token_env)))
        return
    lease = attach(Path(endpoint), say)
    try:
        yield Connection(f"http://127.0.0.1:{lease.port}", _bearer(lease.api_key), lease)
    finally:
        lease.close()


def look(endpoint: Path) -> Connection | None:
    """A connection for an onlooker, which does not keep the server; None while it is not ready.  Raises ServerError."""
    state = state_of_endpoint(endpoint)
    if state is None or state["phase"] != "ready":
        return None
    return Connection(f"http://127.0.0.1:{state['port']}", _bearer(state["api_key"]))


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"server.token_env: the environment variable {variable} is not set; export the token in it")
    return os.environ[variable]


def _bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
