"""What went wrong with a server, in words that say what to do about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from hicache_lab.errors import UsageError
from hicache_lab.server.stream import error_text


@dataclass(frozen=True)
class Response:
    """A complete answer: status, body, and the ``Server`` header."""

    status: int
    body: bytes
    server: str


@dataclass(frozen=True)
class Failure:
    """No answer: why, and whether asking again may help."""

    text: str
    transient: bool


def unreachable(error: Exception, base_url: str, limit_s: float) -> Failure:
    """Read an exception of aiohttp, asyncio or the operating system."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return Failure(
            f"TLS failed ({error.__cause__ or error}); verification is always on: give the certificate "
            f"authority with ca_file, or use http:// if the server has no TLS",
            False,
        )
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        host = urlsplit(base_url).hostname
        return Failure(f"the name {host!r} does not resolve; check base_url", False)
    if isinstance(error, TimeoutError):
        return Failure(f"no answer within {limit_s:g} s; it hangs, or is too busy", True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure("nothing listens there; start one with 'hicache-lab server start', or check base_url", False)
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure("the answer was cut off (connection lost in the middle)", True)
    return Failure(f"the connection broke ({type(error).__name__}: {error or 'no details'})", True)


def refused(response: Response, api_key_env: str) -> str:
    """What a status other than 200 means."""
    status, said = response.status, _said(response)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        if api_key_env:
            return f"the key in ${api_key_env} was refused ({status})"
        return f"it wants an API key ({status}); export it and give the variable's name as api_key_env"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return f"it is still loading or overloaded (503): {said}"
    if "context length" in said or "maximum allowed length" in said:
        return f"the prompt is too long for the server: {said}"
    if status == HTTPStatus.NOT_FOUND and "model" in said.lower():
        return f"wrong model: {said}"
    if status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}:
        who = f" (it says it is {response.server!r})" if response.server else ""
        return f"no such endpoint ({status}): not an SGLang server{who}, or a router in front of one"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"it redirects ({status}); give the final address as base_url"
    return f"status {status}: {said or 'no details'}"


def _said(response: Response) -> str:
    text = response.body.decode(errors="replace")
    try:
        return error_text(json.loads(text))
    except ValueError:
        return error_text(text)


def checked_url(base_url: str) -> str:
    """A base URL without a trailing slash.

    Raises:
        UsageError: not http(s), no host, or credentials in it.
    """
    text = base_url.strip()
    wanted = "expected http://HOST:PORT or https://HOST[:PORT]"
    try:
        parts = urlsplit(text)
        known = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.query
    except ValueError as error:  # a port that is no number, a broken IPv6 address
        raise UsageError(f"base_url: {wanted}, got one with a bad address ({error})") from None
    if parts.username or parts.password:
        raise UsageError(
            "base_url: credentials in the URL are refused; export the key and give the variable's name as api_key_env"
        )
    if not known:
        raise UsageError(f"base_url: {wanted}, got {base_url!r}")
    return text.rstrip("/")
