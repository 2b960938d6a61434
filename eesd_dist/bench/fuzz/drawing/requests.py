"""Draws requests: prompts with shared beginnings, and every sampling parameter.

Requests are drawn for a group of engines that share a world, so that each plain text is generated
once and compared many times. Values are within the limits of the API.
"""

from collections.abc import Sequence
from random import Random
from typing import get_args

from eesd_dist.bench.fuzz.drawing.grammars import draw_grammar
from eesd_dist.bench.fuzz.models import KnownModel
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.sampling.row_rules import is_guessed_by_score
from eesd_dist.types import (
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TreeShape,
)

Prompt = tuple[TokenId, ...]

SHAPES: tuple[TreeShape, ...] = get_args(TreeShape)
_SEEDS = (0, 1, -1, 2**31, 2**32, 2**32 + 1, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))


def draw_pool(
    rng: Random,
    model: KnownModel,
    *,
    prompts: Sequence[Prompt],
    count: int,
    longest: int,
) -> list[Request]:
    """Draws `count` requests for one world. `prompts`: those of a file; if empty, tokens are drawn.
    `longest`: maximum of prompt plus answer in tokens."""
    vocab_size = model.spec.vocab_size
    beginnings = [_tokens(rng, vocab_size, rng.randint(3, longest // 3)) for _ in range(3)]
    return [
        Request(
            request_id=RequestId(f"r{at}"),
            prompt=(prompt := _prompt(rng, vocab_size, prompts, beginnings, longest=longest)),
            sampling=_sampling(rng, model, room=longest - len(prompt)),
        )
        for at in range(count)
    ]


def is_plain_choice(sampling: SamplingParams) -> bool:
    """Returns whether every drafter guesses by the scores alone."""
    return is_guessed_by_score(sampling, has_filters=False)


def draw_speculation(rng: Random, *, is_plain: bool) -> SpeculationParams:
    """Draws the speculation parameters of one request; `is_plain`: chains, and mostly the engine's
    controller."""
    if rng.random() < 0.1:
        return SpeculationParams(mode="off")
    if is_plain:
        return SpeculationParams(
            controller=rng.choice((*[None] * 9, *CONTROLLER_NAMES)),
            max_draft_tokens=rng.choice((None, None, None, 0, 1, 5)),
        )
    return SpeculationParams(
        controller=rng.choice((*[None] * 6, *CONTROLLER_NAMES)),
        max_draft_tokens=rng.choice((None, None, None, 0, 1, 2, 5, 64)),
        tree=rng.choice((None, None, *SHAPES)),
    )


def _prompt(
    rng: Random,
    vocab_size: int,
    prompts: Sequence[Prompt],
    beginnings: Sequence[Prompt],
    *,
    longest: int,
) -> Prompt:
    max_length = longest - 4
    if prompts and rng.random() < 0.7:
        prompt = rng.choice(prompts)
        first = rng.choice(prompts)[: rng.choice((0, 0, 10, 30))]
        return (*first, *prompt)[:max_length]
    kind = rng.random()
    if kind < 0.4:
        beginning = rng.choice(beginnings)
        cut = rng.choice((len(beginning), rng.randint(1, len(beginning))))
        return (*beginning[:cut], *_tokens(rng, vocab_size, rng.randint(0, 12)))[:max_length]
    if kind < 0.5:  # a few tokens, repeated, which prompt lookup finds
        few = _tokens(rng, vocab_size, rng.randint(1, 9))
        return (few * max_length)[: rng.randint(2, min(max_length, 40))]
    if kind < 0.6:
        return _tokens(rng, vocab_size, rng.randint(3, max_length))
    return _tokens(rng, vocab_size, rng.choice((1, 2, rng.randint(3, 20), rng.randint(3, 40))))


def _tokens(rng: Random, vocab_size: int, count: int) -> Prompt:
    return tuple(TokenId(rng.randrange(vocab_size)) for _ in range(max(1, count)))


def _sampling(rng: Random, model: KnownModel, *, room: int) -> SamplingParams:
    vocab_size = model.spec.vocab_size
    max_tokens = min(room, rng.choice((1, 3, 12, 24, 48, 48, 64, 64, 96, 128)))
    goes_past_the_end = rng.random() < 0.1  # the model's positions end the text
    stops: set[int] = set()
    if rng.random() < 0.6:
        stops |= set(model.spec.eos_token_ids)
    if rng.random() < 0.2:
        stops |= {rng.randrange(vocab_size) for _ in range(rng.randint(1, 2))}
    temperature = rng.choice((0.0, 0.0, 1e-6, 0.2, 0.7, 0.7, 1.0, 1.0, 1.5, rng.uniform(0, 2)))
    if rng.random() < 0.4:
        return SamplingParams(
            temperature=temperature,
            seed=rng.randrange(-(2**63), 2**64),
            max_tokens=max_tokens,
            stop_token_ids=tuple(sorted(stops)),
        )
    grammar = None
    if model.spec.eos_token_ids and rng.random() < 0.3:
        grammar = draw_grammar(rng)
        stops |= set(model.spec.eos_token_ids)
    has_filters, has_penalties = rng.random() < 0.5, rng.random() < 0.35
    return SamplingParams(
        temperature=temperature,
        top_p=rng.choice((1.0, 0.95, 0.9, 0.5, 0.05, rng.uniform(0.01, 1))) if has_filters else 1.0,
        top_k=rng.choice((0, 0, 1, 2, 5, 40, vocab_size + 7)) if has_filters else 0,
        min_p=rng.choice((0.0, 0.0, 0.02, 0.2, 1.0)) if has_filters else 0.0,
        repetition_penalty=rng.choice((1.0, 1.1, 1.5, 0.7, 10.0)) if has_penalties else 1.0,
        presence_penalty=rng.choice((0.0, 0.5, -0.5, 2.0, -2.0)) if has_penalties else 0.0,
        frequency_penalty=rng.choice((0.0, 0.3, -0.3, 2.0, -2.0)) if has_penalties else 0.0,
        logit_bias=_bias(rng, vocab_size) if rng.random() < 0.25 else (),
        seed=rng.choice(_SEEDS) if rng.random() < 0.3 else rng.randrange(-(2**63), 2**64),
        max_tokens=room + 9 if goes_past_the_end else max_tokens,
        min_tokens=rng.choice((1, 4, 10)) if rng.random() < 0.3 and grammar is None else 0,
        stop_token_ids=tuple(sorted(stops)),
        top_logprobs=rng.choice((0, 1, 5, 20)) if rng.random() < 0.5 else None,
        grammar=grammar,
        allowed_token_ids=(
            tuple(sorted(rng.sample(range(vocab_size), vocab_size // 2)))
            if rng.random() < 0.08
            else None
        ),
        bad_words=(
            tuple(_tokens(rng, vocab_size, rng.choice((1, 2, 2, 3))) for _ in range(40))
            if rng.random() < 0.08
            else ()
        ),
    )


def _bias(rng: Random, vocab_size: int) -> tuple[tuple[int, float], ...]:
    tokens = rng.sample(range(vocab_size), min(vocab_size, rng.randint(1, 5)))
    return tuple(
        (token, rng.choice((-100.0, 100.0, 3.0, -1.5, rng.uniform(-8, 8)))) for token in tokens
    )
