"""The file of measured costs: what `eesd bench costs` writes and `eesd plan --costs` reads.

Imports no torch. Times are in seconds.
"""

from pathlib import Path

import msgspec

from eesd_dist.errors import ConfigError


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions that decide the costs, to recognise the model they belong to."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    exit_layer: int
    draft_vocab_size: int


class ProductCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one call of a packed product."""

    num_in: int
    num_out: int
    num_rows: int
    seconds: float


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The attention of one layer, with the storing of keys and values."""

    num_heads: int
    """Query heads."""
    num_requests: int
    rows_each: int
    context_tokens: int
    seconds: float


class RoundCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The usual round of some requests that all draft equally many tokens."""

    num_requests: int
    num_draft_tokens: int
    context_tokens: int
    """Mean known tokens of a request."""
    draft_s: float
    """The known rows and the draft, in the drafting process."""
    verify_s: float
    """Seconds on verify rank 0."""
    round_s: float
    """Seconds from one verdict to the next."""
    tokens_per_round: float
    """Emitted by all requests together, on average."""
    num_rounds: int

    @property
    def num_rows(self) -> int:
        """Rows of the verify pass: a request has its last token and its drafted ones."""
        return self.num_requests * (self.num_draft_tokens + 1)


class StageCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one pipeline on one machine."""

    model: MeasuredModel
    device: str
    bytes_per_weight: int
    """Bytes of a weight in a packed product: 2 for float16 weights."""
    draft_tensor_parallel_size: int
    verify_tensor_parallel_size: int
    num_threads: int
    """CPU threads of a rank."""
    products: tuple[ProductCost, ...]
    attention: tuple[AttentionCost, ...]
    rounds: tuple[RoundCost, ...]
    survival: tuple[float, ...] = ()
    """Entry i: share of drafts of which the first i + 1 tokens were accepted; only of drafts that
    long."""


class CostsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The key `costs` of a report; its other keys are ignored."""

    costs: StageCosts


def read_costs(path: Path) -> StageCosts:
    """Reads the report of `eesd bench costs`. Raises ConfigError for another file."""
    advice = "expected the JSON of `eesd bench costs`: measure again with it"
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=CostsFile).costs
    except OSError as error:
        raise ConfigError(f"{path}: found {error.strerror}, {advice}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path}: found {error}, {advice}") from error
    return costs


def write_costs(costs: StageCosts | RoundCost) -> object:
    """Returns the value of the key `costs` of a report, or of one round."""
    return msgspec.to_builtins(costs)
