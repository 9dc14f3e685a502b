"""Fetching a medium that a request names by its address, where the operator allows it.

A service that reads addresses on behalf of callers can be made to reach what the caller cannot (cloud
metadata, databases behind the firewall). So: http and https only; the name is resolved here, every address it
has must be public, and the connection goes to exactly the address that was checked, at each redirect anew.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

import httpx

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.tokenizers.base import Medium

MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


async def fetch(
    url: str, *, max_bytes: int, timeout_s: float, allow_private: bool = False, param: str | None = None
) -> Medium:
    """Read ``url`` within ``timeout_s`` seconds in all and ``max_bytes`` bytes.

    Raises:
        InvalidInputError: another scheme, an address that is not public, an unknown host.
        InvalidMediaError: the server refused, answered nothing or was too slow.
        MediaTooLargeError: more than ``max_bytes``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _follow(url, max_bytes, allow_private, param)
    except TimeoutError:
        raise InvalidMediaError(f"{url} did not answer within {timeout_s:g} s", param=param) from None
    except httpx.HTTPError as error:
        raise InvalidMediaError(
            f"{url} can't be read: {type(error).__name__}: {error}", param=param
        ) from None


async def _follow(url: str, max_bytes: int, allow_private: bool, param: str | None) -> Medium:
    async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None) as client:
        for _ in range(MAX_REDIRECTS + 1):
            request = await _checked_request(client, url, allow_private, param)
            response = await client.send(request, stream=True)
            try:
                if response.is_redirect:
                    url = urljoin(url, response.headers["location"])
                    continue
                if response.status_code != 200:
                    raise InvalidMediaError(f"{url} answered HTTP {response.status_code}", param=param)
                data = await _read(response, url, max_bytes, param)
                content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                return Medium(data, content_type or "application/octet-stream")
            finally:
                await response.aclose()
    raise InvalidMediaError(f"{url}: more than {MAX_REDIRECTS} redirects", param=param)


async def _read(response: httpx.Response, url: str, max_bytes: int, param: str | None) -> bytes:
    chunks: list[bytes] = []
    size = 0
    # Compressed answers are not asked for, so raw bytes are the medium and can't expand.
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > max_bytes:
            raise MediaTooLargeError(f"{url} is above the limit of {max_bytes} bytes", param=param)
        chunks.append(chunk)
    return b"".join(chunks)


async def _checked_request(
    client: httpx.AsyncClient, url: str, allow_private: bool, param: str | None
) -> httpx.Request:
    """A request that connects to an address of the host that was checked, under the host's own name."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidInputError(f"{url!r} is no address: {error}", param=param) from None
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        raise InvalidInputError(
            f"{url!r} is refused: http or https, a host and no user are needed", param=param
        )
    port = port or _PORTS[parts.scheme]
    address = await _public_address(parts.hostname, port, allow_private, param)
    shown = f"[{address}]" if ":" in address else address
    target = parts._replace(netloc=f"{shown}:{port}", fragment="").geturl()
    host = parts.netloc.rpartition("@")[2]
    return client.build_request(
        "GET",
        target,
        headers={"Host": host, "Accept-Encoding": "identity", "User-Agent": "ernie-multi"},
        extensions={"sni_hostname": parts.hostname},
    )


async def _public_address(host: str, port: int, allow_private: bool, param: str | None) -> str:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"host {host!r} can't be resolved: {error}", param=param) from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not allow_private and not is_public(address):
            raise InvalidInputError(
                f"host {host!r} is {address}, which is not public (see the setting fetch_private)",
                param=param,
            )
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also behind IPv6 forms of IPv4 addresses.

    >>> [is_public(a) for a in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "8.8.8.8")]
    [False, False, False, False, True]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast
