"""Reference texts: the same request alone, with speculation off, on a plain engine.

A plain engine has the world of the case only: no prefix cache, one request at a time, no drafts.
Texts are cached by everything they depend on, so that a request to many engines is generated once;
with a lower limit the text is a prefix of the longer one.
"""

import itertools
from dataclasses import dataclass

from msgspec import structs

from eesd_dist.bench.fuzz.cases import EngineSetup, Link, World
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.pipeline import Pipeline
from eesd_dist.bench.fuzz.play import Stream
from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TokenLogprobs,
)

LONGEST = 2048
"""Maximum of prompt plus answer in tokens, for any model: the pages of a plain engine."""
_COST = CostModel(draft_step_s=1.0, verify_s=(1.0,))
"""Unused, since nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason

    def cut(self, count: int) -> "Text":
        """Returns the text with at most `count` tokens."""
        if len(self.tokens) <= count:
            return self
        return Text(
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            finish_reason=FinishReason.LENGTH,
        )


_Key = tuple[tuple[TokenId, ...], SamplingParams]


class PlainTexts:
    """Plain engine of one world at a time, with a cache of its texts."""

    def __init__(self, shelf: ModelShelf) -> None:
        self._shelf = shelf
        self._world: World | None = None
        self._pipeline: Pipeline | None = None
        self._positions = 0
        self._texts: dict[tuple[World, _Key], tuple[int, Text]] = {}
        """World and request -> token limit and text."""
        self._numbers = itertools.count()
        self.num_tokens = 0
        """Tokens generated so far."""

    def text(self, world: World, request: Request) -> Text:
        """Returns the text of this request in this world."""
        self._enter(world)
        sampling = request.sampling
        count = min(sampling.max_tokens, self._positions - len(request.prompt))
        key = world, (request.prompt, structs.replace(sampling, max_tokens=0))
        limit, text = self._texts.get(key, (0, None))
        if text is None or (limit < count and text.finish_reason is FinishReason.LENGTH):
            try:
                text = self._generate(request, count)
            except BaseException:
                self._abandon()
                raise
            self._texts[key] = count, text
        return text.cut(count)

    def forget(self) -> None:
        """Ends the plain engine and drops its texts."""
        self.close()
        self._texts.clear()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = self._world = None

    def _abandon(self) -> None:
        if self._pipeline is not None:
            self._pipeline.abandon()
        self._pipeline = self._world = None

    def _enter(self, world: World) -> None:
        if world == self._world:
            return
        self.close()
        folder = self._shelf.folder(world.model)
        self._positions = ModelSpec.from_folder(folder).max_position_embeddings
        self._pipeline = Pipeline(
            world,
            plain_setup(world, num_positions=self._positions),
            folder=folder,
        )
        self._world = world

    def _generate(self, request: Request, count: int) -> Text:
        assert self._pipeline is not None
        engine = self._pipeline.engine
        engine.add(
            Request(
                request_id=RequestId(f"plain-{next(self._numbers)}"),
                prompt=request.prompt,
                sampling=structs.replace(request.sampling, max_tokens=count),
                speculation=SpeculationParams(mode="off"),
            )
        )
        tokens: list[TokenId] = []
        logprobs: list[TokenLogprobs] = []
        finish_reason = None
        while engine.has_work:
            for emission in self._pipeline.step().emissions:
                tokens += emission.tokens
                logprobs += emission.logprobs
                finish_reason = emission.finish_reason
        assert finish_reason is not None, "a request that has ended has a finish reason"
        self.num_tokens += len(tokens)
        return Text(tokens=tuple(tokens), logprobs=tuple(logprobs), finish_reason=finish_reason)


def plain_setup(world: World, *, num_positions: int) -> EngineSetup:
    """Returns the setup of an engine without batches, drafts and caching."""
    return EngineSetup(
        num_pages=-(-min(num_positions, LONGEST) // world.page_size),
        prefix_caching=False,
        scheduler=SchedulerConfig(max_running=1, overlap=False),
        speculation=SpeculationConfig(max_draft_tokens=0),
        cost=_COST,
        link=Link(kind="inline", sums="messages"),
    )


def difference(stream: Stream, expected: Text) -> str | None:
    """Returns a description of how a stream differs from its text; None if it does not."""
    num_tokens = len(stream.tokens)
    if stream.is_whole and stream.finish_reason is not expected.finish_reason:
        ended = None if stream.finish_reason is None else stream.finish_reason.value
        reason = (
            f"ended by {ended} after {num_tokens} tokens, expected {expected.finish_reason.value}"
        )
        return _first_token(stream, expected) or f"{reason} after {len(expected.tokens)}"
    num_expected = len(expected.tokens) if stream.is_whole else num_tokens
    changed = _first_token(stream, expected)
    if changed is not None:
        return changed
    if num_tokens != num_expected or num_tokens > len(expected.tokens):
        return f"has {num_tokens} tokens, expected {len(expected.tokens)}"
    if len(stream.logprobs) not in (0, num_tokens) or bool(stream.logprobs) != (
        bool(expected.logprobs) and num_tokens > 0
    ):
        return f"has {len(stream.logprobs)} log-probabilities for {num_tokens} tokens"
    for at, (actual, meant) in enumerate(zip(stream.logprobs, expected.logprobs, strict=False)):
        if actual != meant:
            return f"log-probabilities of token {at} are {actual}, expected {meant}"
    return None


def _first_token(stream: Stream, expected: Text) -> str | None:
    for at, (actual, meant) in enumerate(zip(stream.tokens, expected.tokens, strict=False)):
        if actual != meant:
            return f"token {at} is {actual}, expected {meant}"
    return None
