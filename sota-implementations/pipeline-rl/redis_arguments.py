"""Check of the Redis arguments of a command line: an address without a password."""

from __future__ import annotations

from torchrl_llm._masking import masked
from torchrl_llm._redis import PASSWORD_VARIABLE
from torchrl_llm.errors import ConfigError

NO_PASSWORD = (
    "which would be saved with the run and shown in the list of processes; put it into the "
    f"environment variable {PASSWORD_VARIABLE}, or the whole URL into one of your own and write "
    "redis.url='${oc.env:MY_URL}'"
)


def check_scheme(url: str) -> None:
    """Reject an invalid address of a Redis.

    Raises:
        ConfigError: a different scheme; the error does not show the value, which may hold a
            password.
    """
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("redis.url must begin with redis://, rediss:// or unix://, and does not")


def check_passwords(arguments: list[str]) -> None:
    """Reject passwords on the command line, before Hydra would show them.

    Raises:
        ConfigError: a password, or an address that is not a Redis address.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        if masked(argument) != argument:
            raise ConfigError(f"{key} holds a password, {NO_PASSWORD}")
        if key.lstrip("+") == "redis.url" and not value.startswith(("$", "'$", '"$')):
            check_scheme(value.strip("'\""))
