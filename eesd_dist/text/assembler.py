"""Turns one request's emissions into text, and decides where the text ends.

A text ends at a stop string, at a stop token, or where the engine ended it. Text that might still
become part of a stop string is held back.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from eesd_dist.text.stop_strings import StopStrings
from eesd_dist.text.stream_decoder import StreamDecoder
from eesd_dist.text.tokenizer import TextCodec
from eesd_dist.types import Emission, FinishReason, SamplingParams, TokenId, TokenLogprobs

TextFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Addition of one emission to a text."""

    text: str
    """Text to show now. Text that might become a stop string is shown later than its tokens."""
    pieces: tuple[str, ...]
    """Per token, the text that it completed, shown or not."""
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Per token, if the request asked for them."""
    finish_reason: TextFinish | None
    stop_reason: str | int | None
    """The stop string or stop token that ended the text; None for the model's end token."""


class TextAssembler:
    """Assembles the text of one request from its emissions."""

    def __init__(
        self,
        codec: TextCodec,
        sampling: SamplingParams,
        *,
        stops: Sequence[str] = (),
        include_stop_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_special_tokens: Collection[TokenId] = (),
    ) -> None:
        self._sampling = sampling
        self._include_stop = include_stop_in_output
        self._eos_token_ids = codec.eos_token_ids
        self._decoder = StreamDecoder(
            codec, skip_special_tokens=skip_special_tokens, shown=shown_special_tokens
        )
        self._stops = StopStrings(
            stops,
            include_in_output=include_stop_in_output,
            min_tokens=sampling.min_tokens,
        )

    def take(self, emission: Emission) -> TextDelta:
        token_texts = self._token_texts(emission)
        checked = self._stops.push(token_texts)
        text = checked.text
        if checked.matched is None and emission.finish_reason is not None:
            text += self._stops.finish()
        finish_reason, stop_reason = self._end(emission, matched=checked.matched)
        return TextDelta(
            text=text,
            pieces=tuple(token_texts[: checked.num_tokens]),
            tokens=emission.tokens[: checked.num_tokens],
            logprobs=emission.logprobs[: checked.num_tokens],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _token_texts(self, emission: Emission) -> list[str]:
        has_hidden_end = self._ended_by_token(emission) and not self._include_stop
        tokens = emission.tokens[:-1] if has_hidden_end else emission.tokens
        token_texts = [self._decoder.feed_one(token) for token in tokens]
        if has_hidden_end:
            token_texts.append("")
        if emission.finish_reason is not None and (suffix := self._decoder.finish()):
            token_texts[-1:] = ["".join((*token_texts[-1:], suffix))]
        return token_texts

    def _ended_by_token(self, emission: Emission) -> bool:
        return (
            emission.finish_reason is FinishReason.STOP
            and bool(emission.tokens)
            and emission.tokens[-1] in self._sampling.stop_token_ids
        )

    def _end(
        self, emission: Emission, *, matched: str | None
    ) -> tuple[TextFinish | None, str | int | None]:
        if matched is not None:
            return "stop", matched
        if emission.finish_reason is None:
            return None, None
        if emission.finish_reason is FinishReason.LENGTH:
            return "length", None
        last = emission.tokens[-1] if self._ended_by_token(emission) else None
        return "stop", None if last in self._eos_token_ids else last
