"""The address and the limits of a server. Imports no package that is slow to load."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from mtrain.errors import ConfigError

_MIN_KEY_LENGTH = 8  # characters; shorter keys are easily guessed


@dataclass(frozen=True)
class ServerSettings:
    """How a server listens, and the limits of its requests."""

    host: str = "127.0.0.1"  # the address to listen on
    port: int = 5000  # 0 is any free one
    url_prefix: str = ""  # the path below which all is served, such as `/translate`; empty is none
    max_chars: int = 10_000  # of all texts of a request
    max_texts: int = 100  # of a request
    max_requests: int = 128  # translations at the same time; more are answered 503 at once
    timeout_s: float = 60.0  # that a translation may take
    max_body: int = 262_144  # bytes of a request's body
    requests_per_minute: int = 0  # of one client; 0 is no limit
    api_keys: tuple[str, ...] = ()  # of which a request must have one; empty is no check
    # the addresses or networks of reverse proxies whose `X-Forwarded-For` names the client, with
    # commas between them; * is any, and the first name in the header counts
    trust_proxy: str | None = None
    with_page: bool = True
    log_text: bool = False  # log the texts too

    def __post_init__(self) -> None:
        if not self.host:  # it would listen on all addresses
            raise ConfigError("`--host` must be an address, but is empty.")
        prefix = self.url_prefix
        if prefix and (not prefix.startswith("/") or prefix.endswith("/") or "//" in prefix):
            raise ConfigError(
                f"`--url-prefix` must begin with a slash and end without one, but is {prefix!r} "
                "instead."
            )
        if set(prefix) & set("{}?#"):  # a path parameter of Starlette, or the end of a path
            raise ConfigError(
                f"`--url-prefix` must have none of `{{}}?#`, but is {prefix!r} instead."
            )
        if self.trust_proxy not in (None, "*"):
            _check_addresses(self.trust_proxy)

    def knows(self, api_key: str) -> bool:
        """Tell whether a key is one of the server's; the time taken does not depend on it."""
        encoded = api_key.encode("utf-8", "replace")
        return sum(hmac.compare_digest(encoded, key.encode("utf-8")) for key in self.api_keys) > 0


def _check_addresses(trust_proxy: str) -> None:
    for address in trust_proxy.split(","):
        try:
            ipaddress.ip_network(address.strip())
        except ValueError:
            raise ConfigError(
                "`--trust-proxy` must be IP addresses or networks with commas between them, or *, "
                f"but has {address!r} instead."
            ) from None


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read a file with a key on each line; blank lines and lines that begin with # are left out.

    Raises:
        ConfigError: if it is not UTF-8, or has no key, or one that is too short.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: must be UTF-8 text, but is not.") from None
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#") and len(line) < _MIN_KEY_LENGTH:
            raise ConfigError(
                f"{path}: line {number} must have at least {_MIN_KEY_LENGTH} characters, but has "
                f"{len(line)}."
            )
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path}: must have a key on a line, but has none.")
    return keys
