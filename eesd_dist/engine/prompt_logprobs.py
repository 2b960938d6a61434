"""Log-probabilities of prompts: collected chunk by chunk, and emitted with the first token.

A request that wants them is computed without cached pages, so that every row of its prompt passes
through the verify stage; each row that precedes a token of the prompt reports that token, as if the
target had chosen it.
"""

from collections.abc import Sequence

from msgspec import structs

from eesd_dist.engine.acceptance import logprobs_at
from eesd_dist.engine.drafting.stage import DraftRun
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.types import Emission, Request, RequestId, TokenLogprobs


class PromptLogprobs:
    """Prompt log-probabilities of an engine's requests that have no token yet."""

    def __init__(self) -> None:
        self._collected: dict[RequestId, list[TokenLogprobs]] = {}

    def admit(self, request: Request) -> None:
        if request.wants_prompt_logprobs:
            self._collected[request.request_id] = []

    def end(self, request_id: RequestId) -> None:
        self._collected.pop(request_id, None)

    def take(self, runs: Sequence[DraftRun], header: RoundHeader, reply: VerifyReply) -> None:
        """Takes a round's rows; those computed again, after a preemption, are known already."""
        first = 0
        for run, segment in zip(runs, header.segments, strict=True):
            collected = self._collected.get(run.request_id)
            if collected is not None and segment.forced:
                num_top = run.item.live.request.sampling.prompt_logprobs or 0
                num_collected = len(collected) - run.item.start
                rows = range(first + num_collected, first + len(segment.forced))
                collected += logprobs_at(rows, reply, num_top=num_top)
            first += segment.num_reported

    def attached(self, emissions: Sequence[Emission]) -> list[Emission]:
        """Returns the emissions, the first one of each request with what was collected."""
        return [
            structs.replace(emission, prompt_logprobs=tuple(collected))
            if (collected := self._collected.pop(emission.request_id, None)) is not None
            else emission
            for emission in emissions
        ]
