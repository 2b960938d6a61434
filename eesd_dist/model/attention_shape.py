"""Shape of one layer's attention: what is the same for every row."""

from dataclasses import dataclass

from eesd_dist.model.families.family import PLAIN_SCORES, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    num_kv_heads: int
    queries_per_kv: int
    head_dim: int
    page_size: int
    window: int | None = None
    """Number of the last positions that a row may see; None: all."""
    scores: Scores = PLAIN_SCORES

    @property
    def num_queries(self) -> int:
        return self.num_kv_heads * self.queries_per_kv

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scores.scale is None else self.scores.scale
