"""The compiled calls of a draft stage."""

from typing import NamedTuple, Self

from eesd_dist.engine.compiled.draft_kernel import is_chain_kept
from eesd_dist.engine.compiled.drafter import ChainDrafter, fits_one_call
from eesd_dist.engine.compiled.level_pass import LevelPass
from eesd_dist.engine.compiled.pass_kernel import is_pass_kept
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan


class DraftCalls(NamedTuple):
    """Drafts of one rank on a CPU. One call at a time: they share memory."""

    chain: ChainDrafter
    """A whole chain of one request."""
    level: LevelPass
    """The next rows and guesses of several."""

    @classmethod
    def of(cls, span: LlamaSpan, head: ExitHead, *, most_given: int) -> Self | None:
        """Returns None for a stage without such calls. `most_given`: maximum tokens of a draft that
        is known already."""
        if not fits_one_call(span, head):
            return None
        return cls(ChainDrafter(span, head, most_given=most_given), LevelPass(span, head))


def are_calls_kept() -> bool:
    """Returns whether no kernel need be compiled."""
    return is_chain_kept() and is_pass_kept()
