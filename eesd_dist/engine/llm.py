"""Offline generation in the caller's process: the library's public interface.

Both stages run in this process, without Ray and without a server. Used from one thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from eesd_dist.config import EngineConfig, ModelConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import EngineError, RequestError
from eesd_dist.model.checkpoint_folder import require_checkpoint, with_local_folder
from eesd_dist.text import TextAssembler, TextDelta, TextFinish, Tokenizer
from eesd_dist.types import (
    Emission,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TokenLogprobs,
)

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, object]]
"""Messages with `role` and `content`, as the model's chat template expects them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Speculation statistics of one text."""

    num_rounds: int
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens per drafted token; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generated text."""

    prompt_token_ids: tuple[TokenId, ...]
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token if `SamplingParams.top_logprobs` is set."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """One per token of the prompt but the first if `SamplingParams.prompt_logprobs` is set."""
    finish_reason: TextFinish
    stop_reason: str | int | None
    """The stop string or stop token that ended the text; None for an end-of-sequence token."""
    statistics: Statistics


class LLM:
    """Generates texts with early-exit speculation, the same as without.

    `model` is a checkpoint folder, a name of the Hugging Face hub, or an `EngineConfig` for
    settings other than the defaults. Raises ConfigError or CheckpointError if it cannot be loaded.
    """

    def __init__(self, model: str | Path | EngineConfig) -> None:
        if not isinstance(model, EngineConfig):
            model = EngineConfig(model=ModelConfig(path=Path(model)))
        config = with_local_folder(model)
        require_checkpoint(config.model.path)
        self._tokenizer = Tokenizer.load(config.model.path)
        self._engine = LocalEngine(config)
        self._numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams = SamplingParams(),
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> list[Completion]:
        """Continues each prompt; returns the texts in the order of the prompts.

        Raises RequestError for a prompt or parameters that cannot be served, and returns no text.
        """
        tokens = [self._encoded(prompt) for prompt in _several(prompts)]
        return self._completed(tokens, sampling, stop, ignore_eos, speculation)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: SamplingParams = SamplingParams(),
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> list[Completion]:
        """Answers each conversation; returns the answers in the order of the conversations."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        several = [conversations] if single else conversations
        tokens = [
            self._tokenizer.encode_chat(messages, add_generation_prompt=True)  # type: ignore[arg-type]
            for messages in several
        ]
        return self._completed(tokens, sampling, stop, ignore_eos, speculation)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling: SamplingParams = SamplingParams(),
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> Iterator[TextDelta]:
        """Yields one text round by round. Closing the iterator ends the request."""
        request = self._request(self._encoded(prompt), sampling, ignore_eos, speculation)
        text = TextAssembler(self._tokenizer, request.sampling, stops=stop)
        for emission in self._engine.stream([request]):
            _check(emission)
            delta = text.take(emission)
            yield delta
            if delta.finish_reason is not None:
                return

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encoded(self, prompt: Prompt | Conversation) -> tuple[TokenId, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self._tokenizer.encode_chat(prompt, add_generation_prompt=True)  # type: ignore[arg-type]
        return tuple(TokenId(token) for token in prompt)  # type: ignore[arg-type]

    def _completed(
        self,
        prompts: Sequence[tuple[TokenId, ...]],
        sampling: SamplingParams,
        stop: Sequence[str],
        ignore_eos: bool,
        speculation: SpeculationParams,
    ) -> list[Completion]:
        requests = [self._request(p, sampling, ignore_eos, speculation) for p in prompts]
        growing = {
            request.request_id: _Growing(
                request, TextAssembler(self._tokenizer, request.sampling, stops=stop)
            )
            for request in requests
        }
        for emission in self._engine.stream(requests):
            _check(emission)
            one = growing[emission.request_id]
            if not one.is_over and one.take(emission):
                self._engine.abort(emission.request_id)
        return [growing[request.request_id].completion() for request in requests]

    def _request(
        self,
        prompt: tuple[TokenId, ...],
        sampling: SamplingParams,
        ignore_eos: bool,
        speculation: SpeculationParams,
    ) -> Request:
        ends = () if ignore_eos else self._tokenizer.eos_token_ids
        return Request(
            request_id=RequestId(f"llm-{next(self._numbers)}"),
            prompt=prompt,
            sampling=replace(sampling, stop_token_ids=(*ends, *sampling.stop_token_ids)),
            speculation=speculation,
        )


class _Growing:
    """One text during its generation."""

    def __init__(self, request: Request, text: TextAssembler) -> None:
        self._request = request
        self._text = text
        self._deltas: list[TextDelta] = []
        self._emissions: list[Emission] = []

    @property
    def is_over(self) -> bool:
        return bool(self._deltas) and self._deltas[-1].finish_reason is not None

    def take(self, emission: Emission) -> bool:
        """Adds an emission; returns whether the text has ended and the engine has not."""
        self._emissions.append(emission)
        self._deltas.append(self._text.take(emission))
        return self.is_over and emission.finish_reason is None

    def completion(self) -> Completion:
        """Returns the text. Raises EngineError if it has no finish reason."""
        last = self._deltas[-1] if self._deltas else None
        if last is None or last.finish_reason is None:
            raise EngineError(f"request {self._request.request_id} ended without a finish reason")
        return Completion(
            prompt_token_ids=self._request.prompt,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(token for delta in self._deltas for token in delta.tokens),
            logprobs=tuple(each for delta in self._deltas for each in delta.logprobs),
            prompt_logprobs=tuple(lp for e in self._emissions for lp in e.prompt_logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            statistics=Statistics(
                num_rounds=len(self._emissions),
                num_drafted=sum(e.num_drafted for e in self._emissions),
                num_accepted=sum(e.num_accepted for e in self._emissions),
            ),
        )


def _check(emission: Emission) -> None:
    if emission.error is not None:
        raise RequestError(emission.error)


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Wraps a single prompt in a list."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
