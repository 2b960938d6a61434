"""The prompts of one call and their texts, while they are generated."""

from collections.abc import Sequence
from dataclasses import dataclass

from eesd_dist.errors import EngineError, RequestError
from eesd_dist.llm.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    Statistics,
    logprobs_of,
    total_of,
)
from eesd_dist.llm.sampling_params import SamplingParams
from eesd_dist.text import TextAssembler, TextCodec, TextDelta
from eesd_dist.types import Emission, FinishReason, Request, TokenId, TokenLogprobs


class GrowingText:
    """A text of a prompt."""

    def __init__(self, request: Request, assembler: TextAssembler) -> None:
        self.request = request
        self.error: RequestError | None = None
        """Reason why it cannot be generated."""
        self.first_token_s = 0.0
        self.finished_s = 0.0
        self._assembler = assembler
        self._deltas: list[TextDelta] = []
        self._emissions: list[Emission] = []

    def is_over(self) -> bool:
        return self.error is not None or (
            bool(self._deltas) and self._deltas[-1].finish_reason is not None
        )

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(lp for e in self._emissions for lp in e.prompt_logprobs)

    @property
    def num_cached_prompt_tokens(self) -> int:
        return self._emissions[0].num_cached_prompt_tokens

    def take(self, emission: Emission, *, at_s: float) -> TextDelta | None:
        """Adds an emission; returns its text, None where it is the error that ends the text."""
        if emission.error is not None:
            self.error = RequestError(emission.error)
            return None
        if emission.finish_reason is FinishReason.ABORT:
            raise EngineError(f"request {self.request.request_id} was ended by the engine")
        delta = self._assembler.take(emission)
        if not self._emissions:
            self.first_token_s = at_s
        self.finished_s = at_s
        self._emissions.append(emission)
        self._deltas.append(delta)
        return delta

    def output(self, index: int, codec: TextCodec) -> CompletionOutput:
        last = self._deltas[-1] if self._deltas else None
        if last is None or last.finish_reason is None:
            raise EngineError(f"request {self.request.request_id} ended without a finish reason")
        tokens = tuple(token for delta in self._deltas for token in delta.tokens)
        logprobs = None
        if self.request.sampling.top_logprobs is not None:
            own = [logprob for delta in self._deltas for logprob in delta.logprobs]
            logprobs = logprobs_of(tokens, own, codec)
        return CompletionOutput(
            index=index,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tokens,
            cumulative_logprob=None if logprobs is None else total_of(logprobs, tokens),
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            statistics=Statistics(
                num_rounds=len(self._emissions),
                num_drafted=sum(e.num_drafted for e in self._emissions),
                num_accepted=sum(e.num_accepted for e in self._emissions),
            ),
        )


@dataclass(slots=True, kw_only=True)
class ParentRequest:
    """A prompt of a call, and its texts."""

    request_id: str
    params: SamplingParams
    seed: int
    prompt: str | None = None
    tokens: tuple[TokenId, ...] = ()
    texts: Sequence[GrowingText] = ()
    error: RequestError | None = None
    """Reason why there are no texts."""

    def output(self, codec: TextCodec) -> RequestOutput:
        error = self.error or next((text.error for text in self.texts if text.error), None)
        if error is not None:
            return RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.tokens,
                seed=self.seed,
                error=error,
            )
        first = min(self.texts, key=lambda text: text.first_token_s)
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [
                None,
                *logprobs_of(self.tokens[1:], self.texts[0].prompt_logprobs, codec),
            ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            outputs=[text.output(i, codec) for i, text in enumerate(self.texts)],
            prompt_logprobs=prompt_logprobs,
            seed=self.seed,
            metrics=RequestMetrics(
                first_token_s=first.first_token_s,
                finished_s=max(text.finished_s for text in self.texts),
                num_cached_prompt_tokens=first.num_cached_prompt_tokens,
            ),
        )
