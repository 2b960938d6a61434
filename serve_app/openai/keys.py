"""API keys: what opens the service, how much of it at a time, and which share.

A file lists them by the SHA-256 of each key, so that it holds no secret that opens anything. It is
read again when it changes.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from eesd_dist.config import Section
from eesd_dist.errors import ConfigError

logger = logging.getLogger(__name__)

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_KEYS = 1000
_MAX_FILE_BYTES = 2**20
MAX_PRIORITY = 100
_NONE_KNOWN = "only the operators' key is known, others are answered with 503 until this is mended"


class ApiKey(Section):
    """A key, and what its holder may use."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name in metrics, logs and traces; several keys may share a name, and with it its limits: an
    old key and its successor."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the key: `printf %s "$KEY" | sha256sum`. A key is a long random string; a word
    could be guessed from its sum."""

    max_concurrent_requests: PositiveInt | None = None
    """Requests that are answered at the same time, over all ingresses; None: no limit."""

    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts, answers and other work (docs/quotas.md), over all ingresses; None: no
    limit. A minute's worth may be used at once."""

    weight: PositiveFloat = Field(default=1.0, le=1000.0)
    """Share of the batch when callers compete: twice the weight is twice the share."""

    priority: int = Field(default=0, ge=0, le=MAX_PRIORITY)
    """Requests of a lower number come first, and take the place of running ones of a higher
    number."""

    operator: bool = False
    """Opens the paths under /debug."""

    @property
    def has_limits(self) -> bool:
        return self.max_concurrent_requests is not None or self.tokens_per_minute is not None


@dataclass(slots=True, kw_only=True)
class Permit:
    """A request of a caller; counts the tokens that it uses."""

    key: ApiKey
    name: str
    num_reserved: int = 0
    """Tokens charged in advance."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_work_tokens: int = 0
    """Tokens of work outside of an engine: texts that are tokenised for themselves, and
    grammars."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated_tokens + self.num_work_tokens


class _KeyList(Section):
    keys: Annotated[tuple[ApiKey, ...], Field(max_length=MAX_KEYS)]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        by_name: dict[str, ApiKey] = {}
        for key in self.keys:
            first = by_name.setdefault(key.name, key)
            if first.model_copy(update={"sha256": key.sha256}) != key:
                raise ValueError(f"keys named {key.name!r} differ in their limits: make them equal")
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("two entries have the same sha256: leave one out")
        return self


ANYONE = ApiKey(name="anyone", sha256="0" * 64, operator=True)
"""The key of every caller where no key is asked for."""


def operators_key(secret: str) -> ApiKey:
    """Returns the one key of a service without a file of keys, and the operators' with one."""
    return ApiKey(name="operator", sha256=_sum_of(secret.encode()), operator=True)


def find_key(keys: Iterable[ApiKey], secret: bytes) -> ApiKey | None:
    """Returns the key that was given. The time it takes depends on the number of keys alone."""
    digest = _sum_of(secret)
    match = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            match = key
    return match


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Reads a file of keys. Raises ConfigError, which quotes nothing of it but names."""
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{file}: more than {_MAX_FILE_BYTES} bytes: list fewer keys")
        tree = yaml.load(file.read_text(), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: name a file of keys") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not YAML: expected a list under `keys`") from error
    try:
        return _KeyList.model_validate(tree).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"])) or "file"
        raise ConfigError(f"{file}: {path}: {first['msg']}") from error


class KeyRing:
    """The keys that are valid now: the operators', and those of a file that is read again when it
    changes."""

    def __init__(
        self, operators: ApiKey, *, file: Path | None = None, must_be_right: bool = True
    ) -> None:
        """Raises ConfigError for a file that cannot be used; unless it `must_be_right`: then only
        the operators' key is known until it can be."""
        self._operators = operators
        self._file = file
        self._stamp: tuple[int, ...] = ()
        self.keys: Sequence[ApiKey] = (operators,)
        self.is_complete = file is None
        """True if a key that is not found is a wrong one: False before the file was ever read."""
        self.refused = ""
        """Reason why the file, as it is now, is not in use; empty if it is."""
        if must_be_right:
            self._read()
        else:
            self.reread()

    def find(self, secret: bytes) -> ApiKey | None:
        return find_key(self.keys, secret)

    def reread(self) -> None:
        """Reads the file if it has changed. A wrong one is reported, and the keys stay."""
        try:
            self._read()
            self.refused = ""
        except ConfigError as error:
            if self.refused != str(error):
                outcome = "keys stay as they were" if self.is_complete else _NONE_KNOWN
                logger.error("%s: %s", outcome, error)
            self.refused = str(error)

    def _read(self) -> None:
        if self._file is None or (stamp := _stamp_of(self._file)) == self._stamp:
            return
        keys = _without(self._operators, read_keys(self._file), self._file)
        self.keys = (self._operators, *keys)
        self._stamp, self.is_complete = stamp, True
        logger.info("keys read: file=%s num_keys=%d", self._file, len(keys))


def _without(operators: ApiKey, keys: tuple[ApiKey, ...], file: Path) -> tuple[ApiKey, ...]:
    """Raises ConfigError if one of the keys is, or is named like, the operators'."""
    if any(operators.sha256 == key.sha256 or operators.name == key.name for key in keys):
        raise ConfigError(
            f"{file}: found the operators' key, or a key named {operators.name!r}: it is in the "
            "environment and has no limits; leave it out"
        )
    return keys


def _stamp_of(file: Path) -> tuple[int, ...]:
    try:
        stat = os.stat(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: name a file of keys") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _sum_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
