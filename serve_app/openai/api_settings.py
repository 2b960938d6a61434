"""Settings of the HTTP API of one model: those that stay, and limits that may change."""

import secrets
from dataclasses import dataclass, field, fields

from eesd_dist.text.sampling_defaults import SamplingDefaults
from serve_app.config import LimitsConfig
from serve_app.openai.event_ids import EVENT_KEY_BYTES
from serve_app.openai.pacing import Pace

_FIXED_BODY_BYTES = 2**20
"""Fields that are not prompts, and batches of short prompts."""
_BYTES_PER_TOKEN = 16
"""A token is 4 to 5 bytes of English, 8 of escaped Chinese, and 8 as a number in a JSON list."""
_CHOICES_PER_SLOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Values that do not change while the API runs."""

    model_name: str
    max_model_len: int
    """Longest text of the model, prompt and answer together; KV pages may hold less."""
    max_draft_tokens: int = 8
    controller: str = ""
    """Name of the default controller."""
    workloads_by_temperature: bool = True
    event_key: bytes = field(
        default_factory=lambda: secrets.token_bytes(EVENT_KEY_BYTES), repr=False
    )
    """Signs the ids of events; ids of another key are refused. No other process knows one that is
    drawn here."""
    cors_origins: tuple[str, ...] = ()
    created_unix_s: int = 0
    resume_window_s: float = 0.0
    share_prefix_cache: bool = False
    """True if callers find each other's prefixes."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Values of the checkpoint."""
    pace: Pace | None = None
    """Pace of streams; None sends the tokens of a round at once."""
    flush_interval_s: float | None = 0.0
    """Shortest time between two events of a stream; None: by the load."""
    names_answers: bool = True
    """True if answers get the header X-Request-Id here."""
    departures: tuple[type[Exception], ...] = ()
    """Errors of the server that mean that a client has left."""


@dataclass(slots=True, kw_only=True)
class Limits:
    """Limits of what one request may send and ask for: one object for all parts of an ingress.

    `update` changes it for the requests to come.
    """

    max_body_bytes: int
    max_json_depth: int
    read_timeout_s: float
    request_ttl_s: float
    max_choices: int
    max_choices_at_once: int
    """The others of a request wait in the ingress, so that it leaves room for other requests."""
    max_answer_extras: int
    strict_fields: bool
    """True if unknown fields are refused."""

    def update(self, other: "Limits") -> None:
        for limit in fields(self):
            setattr(self, limit.name, getattr(other, limit.name))


def limits_of(config: LimitsConfig, *, max_model_len: int, max_running: int) -> Limits:
    """A body has 1 MiB and 16 bytes for each token of the longest prompt, unless configured."""
    prompt_bytes = max_model_len * _BYTES_PER_TOKEN
    return Limits(
        max_body_bytes=config.max_body_bytes or _FIXED_BODY_BYTES + prompt_bytes,
        max_json_depth=config.max_json_depth,
        read_timeout_s=config.read_timeout_s,
        request_ttl_s=config.request_ttl_s,
        max_choices=config.max_choices or _CHOICES_PER_SLOT * max_running,
        max_choices_at_once=max(1, max_running // 2),
        max_answer_extras=config.max_answer_extras,
        strict_fields=config.strict_fields,
    )
