"""The seeded plan of a chaos run: which fault comes when, and the requests of the run.

Knows the names of faults, but no processes and no streams.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from random import Random

from serve_app.bench.chaos.faults import FAULT_KINDS, PlannedFault, fault_named


def schedule(
    *,
    seed: int,
    kinds: Sequence[str] = tuple(FAULT_KINDS),
    mean_gap_s: float = 2.0,
    at_once: float = 0.25,
) -> Iterator[PlannedFault]:
    """Faults without end: all kinds in a random order, then all in another, and so on.

    Of the slow kinds, which take a deadline each, one comes in each turn. Gaps are exponential
    around `mean_gap_s`; a share `at_once` of the faults does not wait until the service is ready
    again, and comes within a second of the one before. Raises ConfigError for an unknown kind.
    """
    shares = {kind: fault_named(kind).share for kind in kinds if not fault_named(kind).is_slow}
    slow = [kind for kind in kinds if fault_named(kind).is_slow]
    return _endless(Random(seed), shares, slow, mean_gap_s=mean_gap_s, at_once=at_once)


def _endless(
    rng: Random,
    shares: Mapping[str, int],
    slow: Sequence[str],
    *,
    mean_gap_s: float,
    at_once: float,
) -> Iterator[PlannedFault]:
    number = 0
    slow_ones = _in_turns(rng, slow)
    while True:
        turn = [kind for kind, share in shares.items() for _ in range(share)]
        turn += islice(slow_ones, 1)
        rng.shuffle(turn)
        for kind in turn:
            when_ready = number == 0 or rng.random() >= at_once
            yield PlannedFault(
                number=number,
                kind=kind,
                when_ready=when_ready,
                gap_s=rng.expovariate(1.0 / mean_gap_s) if when_ready else rng.random(),
                choice=rng.getrandbits(30),
                comes_back=rng.random() < 0.5,
            )
            number += 1


def _in_turns(rng: Random, kinds: Sequence[str]) -> Iterator[str]:
    """All kinds in a random order, then all in another, and so on; nothing without kinds."""
    while kinds:
        yield from rng.sample(kinds, len(kinds))


def bodies_of(
    prompts: Sequence[Mapping[str, object]], *, model: str, num: int, seed: int, max_tokens: int
) -> list[dict[str, object]]:
    """Returns requests of every kind: greedy, sampled, short, long, some with an early end."""
    rng = Random(seed)
    return [
        {
            **prompts[rng.randrange(len(prompts))],
            **_SAMPLING[i % len(_SAMPLING)],
            "model": model,
            "request_id": name_of(i),
            "seed": rng.getrandbits(40),
            # Many short and some long, as people's requests are.
            "max_tokens": max(4, round(max_tokens * rng.random() ** 1.5)),
            "ignore_eos": rng.random() < 0.7,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i in range(num)
    ]


_SAMPLING: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "speculation": {"mode": "off"}},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
)


def name_of(index: int) -> str:
    return f"chaos-{index}"


def names_in(request_ids: Iterable[str]) -> frozenset[str]:
    """Returns the names of the run's requests among the service's request ids."""
    return frozenset(match[1] for text in request_ids if (match := _NAME.search(text)))


_NAME = re.compile(r"-(chaos-\d+)-")
