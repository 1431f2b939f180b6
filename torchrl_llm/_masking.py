"""Masks secrets in everything that is shown or saved: passwords, tokens, server keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
"""Replacement for a secret."""

# A reference in the place of a password, which only names its source.
_NO_SECRET = r"(?:\*\*\*|\$\{oc\.env:[^},]*\})"
# Names of secrets; names such as pad_token are vocabulary tokens, but GITHUB_TOKEN is a secret.
_NAME = (
    r"(?:(?i:(?:[\w-]{1,40}[_-])?(?:(?:api|access|private|secret|subscription)[_-]?key|"
    r"passw(?:or)?d|secret|authorization|cookie|"
    r"(?:access|api|auth|bearer|bot|github|hf|hub|refresh)[_-]token))|[A-Z\d_]{1,40}_TOKEN)"
)
_HIDDEN = [
    # In a Redis URL, "@" only follows a password, which may itself contain an unescaped "@".
    rf"((?:rediss?|unix)://[^\s:@/]*:)(?!{_NO_SECRET}@).{{1,200}}(?=@)",
    r"(rediss?://[^\s:@/\[]*:)(?!\d+(?:\W|$)|\*\*\*|\$\{)[^@]{1,200}$",
    # A path made from a URL keeps only one slash.
    rf"(\w://?[^\s:@/]*:)(?!{_NO_SECRET}@|\d+(?:/|$)).{{1,200}}(?=@)",
    rf"(https?://?)(?!{_NO_SECRET}@)[^\s:@/]+(?=@)",
    rf"([?&][\w-]*(?:password|token|secret|key|sig|signature)=)(?!{_NO_SECRET}(?:&|$))[^\s&'\"]+",
    # A configuration key as a user types it; "token" alone may be a word in a sentence.
    rf"(\b{_NAME}=)(?!{_NO_SECRET})[^\s,&]+",
    rf"((?:^[+~]*|\w\.|--)token=)(?!{_NO_SECRET})[^\s,'\"]+",
    # Values in braces, as headers are typed, and keys with the known prefixes of servers.
    rf"([{{,]\s*['\"]*(?:{_NAME}|token)['\"]*:\s*['\"]*(?:(?:Bearer|Basic)\s+)?+)"
    rf"(?!{_NO_SECRET})[^\s,'\"{{}}]+",
    rf"(\b(?:Bearer|Basic)\s+)(?!{_NO_SECRET})[\w.~+/=-]{{12,}}",
    r"(\b(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-))[\w-]{16,}",
]
_SECRET_KEY = re.compile(rf"(?:.*\.)?(?:{_NAME}|(?i:token))")


def masked(value: Any) -> Any:
    """Replace passwords in URLs, and values whose key names a secret, by ``***``.

    Everything that is shown or saved goes through it.

    Args:
        value: a text, or lists and mappings of texts. Other values are returned as they are.

    Example:
        >>> masked("redis://user:secret@host:6379/0")
        'redis://user:***@host:6379/0'
        >>> masked({"base_url": "http://host", "api_key": "sk-1", "pad_token": "<pad>"})
        {'base_url': 'http://host', 'api_key': '***', 'pad_token': '<pad>'}
    """
    if isinstance(value, str):
        for hidden in _HIDDEN:
            value = re.sub(hidden, rf"\1{MASK}", value, flags=re.DOTALL)
        return value
    if isinstance(value, Mapping):
        return {k: MASK if _is_secret(k, item) else masked(item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(masked, value))
    return value


def _is_secret(key: Any, value: Any) -> bool:
    """Whether to mask a value; a number may be a token id, but also a password."""
    hides = isinstance(value, str) and value != "" and not re.fullmatch(_NO_SECRET, value)
    hides |= type(value) is int and not str(key).lower().endswith("token")
    return hides and isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None
