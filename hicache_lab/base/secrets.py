"""Which flags, fields and variables hold a credential, and texts without them: one list for the whole package."""

from __future__ import annotations

import re
from functools import lru_cache

_CREDENTIAL = re.compile(
    r"""passw(?:or)?d|passphrase|secret|credential|watermark_?key
    |(?:^|_)authorization$
    |key$(?<!public_key) |(?:api|access|secret|private)_?keys$
    |(?:^|_)(?:access|api|auth|bearer|hf|hub|refresh|session)_?tokens?(?:_|$)(?!(?:id|file|path|env)$)
    |(?:^|_)token$ | (?<=[a-z])token$""",
    re.VERBOSE,
)
# a token of text and not of access: what counts or names one
_OF_TEXT = re.compile(
    r"(?:^|_)(?:first|next|last|new|per|each|inter|input|output|prompt|draft|special|added|eos|bos|pad|unk|sep|cls|mask"
    r"|stop|start|begin|end|image|video|audio|think\w*|cached?|decode|prefill|device|host|max|min|num|bonus|generated"
    r"|accept\w*)_?token$"
)
_HINT = re.compile(r"passw|passphrase|secret|credential|key|token|authorization|://", re.IGNORECASE)
_STARS = "***"
# a flag and what parts it from its value (in shell, in a list of words, in YAML), or a field or variable with = or :
_HEAD = re.compile(
    r"""(?P<quote>\\{0,15}["'])?(?<![\w#.-])(?:
    (?P<flag>--?[A-Za-z][\w.-]*)(?P=quote)?(?:\s*[=,]\s*|(?:\s|\\\n)+(?:-\s+)?)
    |(?P<name>[A-Za-z_][\w.-]*)(?P=quote)?\s*[:=]\s*)""",
    re.VERBOSE,
)
_STRING = r""""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?"""
_PLAIN_STRING = re.compile(rf"""(?P<text>{_STRING})""", re.DOTALL)
# a string within a string: its quotes have backslashes before them
_ESCAPED_STRING = re.compile(r"""(?P<quote>\\{1,15}["']).*?(?:(?<!\\)(?P=quote)|\Z)""", re.DOTALL)
_BRACKETS = re.compile(rf"{_STRING}|[\[{{(]|[\]}})]", re.DOTALL)
_BARE = re.compile(r"""(?:(?:Bearer|Basic)\s+)?[^\s,;&()\[\]{}'"\\]+""", re.IGNORECASE)
# not a value but its absence, or the name of the variable that has it
_NOT_KEPT = re.compile(r"""["']?(?:None|null|True|true|False|false|\$\w+|\$\{\w+\}|)["']?""")
_IN_URL = re.compile(r"""(://[^\s/:@'"]*:)[^\s/@'"]+(?=@)""")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a flag (``--api-key``), a field (``hf_token``, ``accessToken``) or a variable holds a credential.

    A name that ends in "token" does unless it speaks of tokens of text (``eos_token``); counts, paths and the names of
    variables (``max_total_tokens``, ``tokenizer_path``, ``api_key_env``) do not.
    """
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip().lstrip("-$"))
    plain = re.sub(r"[-.\s]", "_", plain).lower()
    return _CREDENTIAL.search(plain) is not None and _OF_TEXT.search(plain) is None


def redact(text: str) -> str:
    """``text`` with stars for the values of secret flags, fields and variables, also those inside a JSON text in it.

    Passwords in URLs are starred too. A value that is only a reference (``$HF_TOKEN``) or absent (None) stays.
    """
    if _HINT.search(text) is None:
        return text
    pieces: list[str] = []
    done = 0
    for head in _HEAD.finditer(text):
        if head.start() < done or not is_secret(head["flag"] or head["name"]):
            continue
        end, replacement = _value(text, head.end(), head["quote"] or "")
        if head["flag"] and text.startswith("--", head.end()):
            continue
        if _NOT_KEPT.fullmatch(text, head.end(), end):
            continue
        pieces += [text[done : head.end()], replacement]
        done = end
    return _IN_URL.sub(rf"\1{_STARS}", "".join([*pieces, text[done:]]))


def _value(text: str, at: int, quote: str) -> tuple[int, str]:
    """Where the value at ``at`` ends, and what is written for it; ``quote`` is the mark around its name."""
    if match := _PLAIN_STRING.match(text, at):
        return match.end(), f"{text[at]}{_STARS}{text[at]}"
    if match := _ESCAPED_STRING.match(text, at):
        return match.end(), f"{match['quote']}{_STARS}{match['quote']}"
    if text[at : at + 1] in ("[", "{", "("):
        depth, end = 0, len(text)
        for bracket in _BRACKETS.finditer(text, at):
            depth += (bracket[0] in "[{(") - (bracket[0] in ")}]")
            if depth == 0:
                end = bracket.end()
                break
        return end, f"{quote}{_STARS}{quote}"
    match = _BARE.match(text, at)
    return (match.end(), f"{quote}{_STARS}{quote}") if match else (at, "")
