"""What went wrong with a server, in words that say what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from hicache_lab.base.errors import UsageError
from hicache_lab.serving.client.stream import error_text, prompt_too_long
from hicache_lab.serving.client.untrusted import read_json

# as shells write them; a key has lower-case letters, dashes or dots
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")


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
    status, body = response.status, response.body.decode(errors="replace")
    try:
        text = error_text(read_json(body))
    except ValueError:
        text = error_text(body)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        if api_key_env:
            return f"the key in ${api_key_env} was refused ({status})"
        return f"it wants an API key ({status}); export it and give the variable's name as api_key_env"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return f"it is still loading or overloaded (503): {text}"
    if (too_long := prompt_too_long(text)) is not None:
        return too_long
    if status == HTTPStatus.NOT_FOUND and "model" in text.lower():
        return f"wrong model: {text}"
    if status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}:
        who = f" (it says it is {response.server!r})" if response.server else ""
        return f"no such endpoint ({status}): not an SGLang server{who}, or a router in front of one"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"it redirects ({status}); give the final address as base_url"
    return f"status {status}: {text or 'no details'}"


def checked_url(base_url: str) -> str:
    """A base URL without a trailing slash.

    Raises:
        UsageError: not http(s), no host, or credentials in it.
    """
    text = base_url.strip()
    expected = "expected http://HOST:PORT or https://HOST[:PORT]"
    try:
        parts = urlsplit(text)
        known = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError as error:  # a port that is not a number, a broken IPv6 address
        raise UsageError(f"base_url: {expected}, got one with a bad address ({error})") from None
    if "@" in text or parts.query or parts.fragment:  # not repeated: this is where people put keys
        raise UsageError(
            f"base_url: {expected}; credentials, queries and fragments in the URL are refused: "
            f"export the key and give the variable's name as api_key_env"
        )
    if not known or not all(character.isprintable() and character != " " for character in text):
        raise UsageError(f"base_url: {expected}, got {base_url!r}")
    text = text.rstrip("/")
    if text.endswith("/v1"):
        raise UsageError(f"base_url: give the server's own address, without the /v1 of the OpenAI API: {text[:-3]}")
    return text


def checked_key(name: str, environ: Mapping[str, str]) -> str:
    """The key that the environment variable ``name`` holds; no name, no key.

    Raises:
        UsageError: no such variable, or what it holds cannot stand in a header. Neither a key nor what may be one
            (a name that is not one) is repeated.
    """
    if not name:
        return ""
    key = environ.get(name, "").strip()
    if not key and not _VARIABLE.fullmatch(name):
        raise UsageError(
            f"api_key_env: expected the NAME of an environment variable such as SGLANG_API_KEY, got {len(name)} "
            f"characters that are none; is it the key itself? Then export it, and give the variable's name"
        )
    if not key:
        raise UsageError(
            f"api_key_env: the environment variable {name!r} is not set; "
            f"export the key under that name (the name is recorded, the key never)"
        )
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"api_key_env: what ${name} holds is no key: it has control or other special characters in it")
    return key
