"""`eesd generate`: one text, streamed to a terminal, in this process.

Tokens that the draft stage guessed and the verify stage accepted are coloured; the others are the
verify stage's own. The text is the same whether anything was guessed or not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import PromptTooLong
from eesd_dist.text import StreamDecoder, Tokenizer
from eesd_dist.types import (
    Emission,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

_ACCEPTED = "\033[32m"
_PLAIN = "\033[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a person typed."""

    prompt: str
    is_raw: bool
    """Continue the prompt as it is, rather than answer it as a chat message."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    speculation: SpeculationParams


@dataclass(slots=True, kw_only=True)
class Tally:
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, emission: Emission) -> None:
        self.num_tokens += len(emission.tokens)
        self.num_rounds += 1
        self.num_drafted += emission.num_drafted
        self.num_accepted += emission.num_accepted

    def summary(self, *, took_s: float, seed: int) -> str:
        rate = self.num_tokens / took_s if took_s > 0 else 0.0
        per_round = self.num_tokens / self.num_rounds if self.num_rounds else 0.0
        drafts = "nothing drafted"
        if self.num_drafted:
            share = self.num_accepted / self.num_drafted
            drafts = f"{share:.0%} of {self.num_drafted} drafted tokens accepted"
        return (
            f"{self.num_tokens} tokens in {took_s:.2f} s ({rate:.1f} tokens/s), "
            f"{per_round:.2f} tokens per round, {drafts}, seed {seed}"
        )


def generate(
    config: EngineConfig,
    wish: Wish,
    *,
    write: Callable[[str], None],
    note: Callable[[str], None],
    in_colour: bool,
) -> None:
    """Raises ConfigError and RequestError; `note` gets the summary line."""
    tokenizer = Tokenizer.load(config.model.path)
    request = _request(tokenizer, wish, max_model_len=layout_of(config).max_model_len)
    llm = LocalEngine(config)
    decoder = StreamDecoder(tokenizer)
    tally = Tally()
    began_s = time.perf_counter()
    try:
        for emission in llm.stream([request]):
            tally.add(emission)
            write(_shown(emission, decoder, in_colour=in_colour))
    finally:
        llm.close()
    write("\n")
    note(tally.summary(took_s=time.perf_counter() - began_s, seed=wish.seed))


def _shown(emission: Emission, decoder: StreamDecoder, *, in_colour: bool) -> str:
    accepted = decoder.feed(emission.tokens[: emission.num_accepted])
    own = decoder.feed(emission.tokens[emission.num_accepted :])
    return f"{_ACCEPTED}{accepted}{_PLAIN}{own}" if in_colour and accepted else accepted + own


def _request(tokenizer: Tokenizer, wish: Wish, *, max_model_len: int) -> Request:
    prompt = _tokens(tokenizer, wish)
    room = max_model_len - len(prompt)
    if room < 1:
        raise PromptTooLong(num_tokens=len(prompt), limit=max_model_len - 1)
    return Request(
        request_id=RequestId("generate"),
        prompt=prompt,
        sampling=SamplingParams(
            temperature=wish.temperature,
            top_p=wish.top_p,
            seed=wish.seed,
            max_tokens=min(wish.max_tokens, room),
            stop_token_ids=tokenizer.eos_token_ids,
        ),
        speculation=wish.speculation,
    )


def _tokens(tokenizer: Tokenizer, wish: Wish) -> tuple[TokenId, ...]:
    if wish.is_raw:
        return tokenizer.encode(wish.prompt)
    return tokenizer.encode_chat(
        [{"role": "user", "content": wish.prompt}], add_generation_prompt=True
    )
