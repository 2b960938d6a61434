"""Workloads of a comparison: its texts, and crowds of requests with arrival times.

Replay and live engine run the same crowds. Arrivals are in emitted tokens, not in seconds, so that
a faster variant has the same batch at the same point of its work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from eesd_dist.bench.traces import Text
from eesd_dist.text.prompts import Prompt

BURSTS = (1, 2, 16, 4, 1, 8)
"""Mixed traffic: requests per burst, in order."""
_TURNS = 4
"""Requests of a load, by its requests at a time."""
_OVERLAP = 0.8
"""A burst arrives when at most this share of the tokens of earlier bursts has been emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A request: its text, and the number of emitted tokens of the run at its arrival.

    An engine without work does not wait for that number.
    """

    text: int
    """Index into the texts, or the traces, of the comparison."""
    after_tokens: int = 0
    max_running: int | None = None
    """It waits until fewer requests than this run."""


Crowd = tuple[Guest, ...]


def all_at_once(num_texts: int) -> Crowd:
    """Returns one request of each text."""
    return tuple(Guest(text=text) for text in range(num_texts))


def texts_of(
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> list[Text]:
    """Returns every prompt at every temperature; a class is a prompt's class at one temperature."""
    return [
        Text(
            prompt=prompt.tokens,
            workload=f"{prompt.workload}/t{temperature:g}",
            temperature=temperature,
            seed=seed + number,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        for temperature in temperatures
        for number, prompt in enumerate(prompts)
    ]


def take_per_class(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns the first `count` prompts of each class."""
    by_class: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_class.setdefault(prompt.workload, []).append(prompt)
    return [prompt for group in by_class.values() for prompt in group[:count]]


def in_turn(num_texts: int, load: int, *, rng: Random) -> Crowd:
    """Returns a crowd of all classes of which `load` requests run at a time: a few times as many,
    so that what the last ones do alone counts little."""
    texts = _drawn(num_texts, _TURNS * load, rng=rng)
    return tuple(Guest(text=text, max_running=load) for text in texts)


def mixed(num_texts: int, *, max_tokens: int, rng: Random, bursts: Sequence[int] = BURSTS) -> Crowd:
    """Returns bursts of different sizes with interleaved classes: the batch size varies."""
    texts = iter(_drawn(num_texts, sum(bursts), rng=rng))
    guests: list[Guest] = []
    for size in bursts:
        after_tokens = int(_OVERLAP * max_tokens * len(guests))
        guests.extend(Guest(text=next(texts), after_tokens=after_tokens) for _ in range(size))
    return tuple(guests)


def _drawn(num_texts: int, size: int, *, rng: Random) -> list[int]:
    """Draws texts, without repetition until all have been drawn."""
    drawn: list[int] = []
    while len(drawn) < size:
        drawn.extend(rng.sample(range(num_texts), num_texts))
    return drawn[:size]
