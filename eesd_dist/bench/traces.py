"""Records traces: the draft from every position of a text, enough to replay every controller.

With coupled sampling a text is determined by its prompt, parameters and seed, and so are the exit
head's guesses from each of its positions. A `Guess` has, for one position, the evidence of a draft
of K tokens and how many of them the verifier accepts. A round of any length k <= K from there
yields min(k, accepted) + 1 tokens: nothing is estimated.

A chain of D tokens covers all positions along its accepted part: the tokens drafted after an
accepted token are those that a draft from there would start with. One run with drafts of 2K tokens
therefore records almost all positions; the few that are missing are recorded by resuming the
request there.

Also reads and writes trace files. Does not depend on controllers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from eesd_dist.control.cost import CostModel
from eesd_dist.engine.core import EngineCore
from eesd_dist.errors import CheckpointError, EngineError
from eesd_dist.types import (
    Evidence,
    Outcome,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

_VERSION = 1
_MEASURES = tuple(name for name in Evidence.__struct_fields__ if name != "depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Inputs of one text, which determine the target's tokens."""

    prompt: tuple[TokenId, ...]
    workload: str
    """The prompt's class and the temperature: acceptance depends on both."""
    temperature: float
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    def sampling(self, *, more_tokens: int = 0) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens + more_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A draft of K tokens from one position: its evidence, and how many tokens are accepted."""

    num_accepted: int
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A text, and the guess at each of its positions."""

    workload: str
    temperature: float
    seed: int
    num_prompt: int
    max_tokens: int
    tokens: tuple[TokenId, ...]
    guesses: tuple[Guess, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def room(self, at: int, *, ceiling: int) -> int:
        """Returns the maximum draft length from position `at`, as in the scheduler."""
        return max(0, min(ceiling, self.max_tokens - at - 1, len(self.guesses[at].evidence)))

    def num_known(self, at: int) -> int:
        """Returns the known rows of a round from `at`: the whole prompt at first, then one."""
        return self.num_prompt if at == 0 else 1

    def outcome(self, request_id: RequestId, at: int, length: int) -> Outcome:
        """Returns the outcome of a round of this length from this position."""
        guess = self.guesses[at]
        return Outcome(
            request_id=request_id,
            num_drafted=length,
            num_accepted=min(length, guess.num_accepted),
            evidence=guess.evidence[:length],
        )

    def after(self, at: int, length: int) -> int:
        """Returns the position after a round of this length, at most the end."""
        return min(len(self), at + 1 + min(length, self.guesses[at].num_accepted))


def joined(traces: Sequence[Trace]) -> Trace:
    """Joins traces to one; no accepted draft reaches from one into the next."""
    guesses = [
        replace(guess, num_accepted=min(guess.num_accepted, len(trace) - at - 1))
        for trace in traces
        for at, guess in enumerate(trace.guesses)
    ]
    tokens = tuple(token for trace in traces for token in trace.tokens)
    return Trace(
        workload="+".join(dict.fromkeys(trace.workload for trace in traces)),
        temperature=traces[0].temperature,
        seed=traces[0].seed,
        num_prompt=traces[0].num_prompt,
        max_tokens=len(tokens),
        tokens=tokens,
        guesses=tuple(guesses),
    )


def chain_length(max_draft_tokens: int) -> int:
    """Returns `speculation.max_draft_tokens` of an engine that records guesses of K tokens."""
    return 2 * max_draft_tokens


def record(engine: EngineCore, texts: Sequence[Text], *, max_draft_tokens: int) -> list[Trace]:
    """Records every text. The engine has to draft `chain_length` tokens and to log evidence."""
    recorders = {
        RequestId(f"record-{number}"): _Recorder(text, max_draft_tokens)
        for number, text in enumerate(texts)
    }
    for request_id, recorder in recorders.items():
        engine.add(recorder.request(request_id, at=0))
    _drive(engine, recorders, once=False)
    while missing := {i: r for i, r in recorders.items() if r.first_missing() is not None}:
        for request_id, recorder in missing.items():
            engine.add(recorder.request(request_id, at=recorder.go_to_first_missing()))
        _drive(engine, missing, once=True)
        for recorder in missing.values():
            recorder.check_progress()
    return [recorder.trace() for recorder in recorders.values()]


def _drive(engine: EngineCore, recorders: Mapping[RequestId, "_Recorder"], *, once: bool) -> None:
    """Runs the added requests to their end, or with `once` for one judged round each."""
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        outcomes = {outcome.request_id: outcome for outcome in result.outcomes}
        for emission in result.emissions:
            recorders[emission.request_id].take(emission.tokens, outcomes[emission.request_id])
            if once:
                engine.abort(emission.request_id)


class _Recorder:
    """Collects the guesses of one text."""

    def __init__(self, text: Text, max_draft_tokens: int) -> None:
        self._text = text
        self._length = max_draft_tokens
        self._tokens: list[TokenId] = []
        self._guesses: dict[int, Guess] = {}
        self.at = 0
        """Position of the next round."""
        self._missing_at = 0

    def request(self, request_id: RequestId, *, at: int) -> Request:
        return Request(
            request_id=request_id,
            prompt=self._text.prompt,
            # Room for a whole chain at the text's last position; the surplus is dropped.
            sampling=self._text.sampling(more_tokens=2 * self._length),
            speculation=SpeculationParams(controller="fixed"),
            generated=tuple(self._tokens[:at]),
            workload=self._text.workload,
        )

    def take(self, tokens: Sequence[TokenId], outcome: Outcome) -> None:
        recorded = self._tokens[self.at : self.at + len(tokens)]
        if recorded != list(tokens[: len(recorded)]):
            raise EngineError(
                f"recording: resumed at token {self.at}, the text continued with {list(tokens)}, "
                f"expected {recorded} as before: record with numerics invariant"
            )
        self._tokens[self.at : self.at + len(tokens)] = tokens
        for offset in range(len(tokens)):
            if offset + self._length <= outcome.num_drafted and offset <= outcome.num_accepted:
                self._guesses.setdefault(self.at + offset, self._guess(outcome, offset))
        self.at += len(tokens)

    @property
    def _length_of_text(self) -> int:
        """Length without the surplus for recording."""
        return min(len(self._tokens), self._text.max_tokens)

    def first_missing(self) -> int | None:
        return next((at for at in range(self._length_of_text) if at not in self._guesses), None)

    def go_to_first_missing(self) -> int:
        missing = self.first_missing()
        assert missing is not None
        self.at = self._missing_at = missing
        return missing

    def check_progress(self) -> None:
        if self._missing_at not in self._guesses:
            raise EngineError(
                f"recording: a draft of {self._length} tokens found no room at token "
                f"{self._missing_at}: raise cache.num_pages"
            )

    def trace(self) -> Trace:
        return Trace(
            workload=self._text.workload,
            temperature=self._text.temperature,
            seed=self._text.seed,
            num_prompt=len(self._text.prompt),
            max_tokens=self._text.max_tokens,
            tokens=tuple(self._tokens[: self._length_of_text]),
            guesses=tuple(self._guesses[at] for at in range(self._length_of_text)),
        )

    def _guess(self, outcome: Outcome, offset: int) -> Guess:
        chain = outcome.evidence[offset : offset + self._length]
        return Guess(
            num_accepted=min(self._length, outcome.num_accepted - offset),
            evidence=tuple(structs.replace(seen, depth=depth) for depth, seen in enumerate(chain)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """Traces, with the cost model of the machine that recorded them."""

    max_draft_tokens: int
    cost: CostModel
    traces: tuple[Trace, ...]

    def by_workload(self) -> dict[str, list[Trace]]:
        groups: dict[str, list[Trace]] = {}
        for trace in self.traces:
            groups.setdefault(trace.workload, []).append(trace)
        return groups

    def save(self, file: Path) -> None:
        content = {
            "version": _VERSION,
            "max_draft_tokens": self.max_draft_tokens,
            "cost": self.cost.to_json(),
            "measures": list(_MEASURES),
            "traces": [_trace_to_json(trace) for trace in self.traces],
        }
        file.write_text(json.dumps(content) + "\n")

    @staticmethod
    def load(file: Path) -> "TraceSet":
        """Reads a file from `save`. Raises CheckpointError for any other file."""
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(file, str(error)) from error
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise _unreadable(file, str(content)[:80])
        try:
            return TraceSet(
                max_draft_tokens=int(content["max_draft_tokens"]),
                cost=CostModel.from_json(content["cost"]),
                traces=tuple(
                    _trace_from_json(trace, content["measures"]) for trace in content["traces"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(file, f"{type(error).__name__}: {error}") from error


def _unreadable(file: Path, content: str) -> CheckpointError:
    return CheckpointError(
        file=file,
        found=content,
        expected=f"recorded traces, version {_VERSION}",
        advice="record them again with --record",
    )


def _trace_to_json(trace: Trace) -> dict[str, object]:
    return {
        "workload": trace.workload,
        "temperature": trace.temperature,
        "seed": trace.seed,
        "num_prompt": trace.num_prompt,
        "max_tokens": trace.max_tokens,
        "tokens": list(trace.tokens),
        "accepted": [guess.num_accepted for guess in trace.guesses],
        "evidence": [
            [[getattr(seen, name) for name in _MEASURES] for seen in guess.evidence]
            for guess in trace.guesses
        ],
    }


def _trace_from_json(data: Mapping[str, Any], measures: Sequence[str]) -> Trace:
    return Trace(
        workload=str(data["workload"]),
        temperature=float(data["temperature"]),
        seed=int(data["seed"]),
        num_prompt=int(data["num_prompt"]),
        max_tokens=int(data["max_tokens"]),
        tokens=tuple(TokenId(int(token)) for token in data["tokens"]),
        guesses=tuple(
            Guess(
                num_accepted=int(count),
                evidence=tuple(
                    Evidence(depth=depth, **dict(zip(measures, map(float, seen), strict=True)))
                    for depth, seen in enumerate(chain)
                ),
            )
            for count, chain in zip(data["accepted"], data["evidence"], strict=True)
        ),
    )
