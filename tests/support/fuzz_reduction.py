"""Reduces a failing case of the fuzz while it still fails and there is time.

    python -m tests.support.fuzz_reduction --case FILE [--limit-s SECONDS]

Delta debugging (Zeller and Hildebrandt 2002), coarse steps first: fewer requests, fewer troubles,
features off one by one, fewer tokens, shorter prompts, simpler sampling. The result need not be the
smallest failing case; every step was run and failed.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import structs

from eesd_dist.bench.fuzz.cases import (
    Abort,
    Case,
    EngineSetup,
    Entry,
    Migration,
    Trouble,
    load_case,
    save_case,
)
from eesd_dist.bench.fuzz.check import ENGINE, PLAIN, Checked, Failure, check
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.bench.fuzz.reference import PlainTexts
from eesd_dist.command_line import run_command
from eesd_dist.config import Section
from eesd_dist.types import SamplingParams, SpeculationParams

Item = TypeVar("Item")
Part = TypeVar("Part", bound=Section)

_ROOMY_PAGES = 200
_PLAIN = SamplingParams()


def reduce_case(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    culprit: str | None,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Case:
    """Returns a reduced case. `culprit`: the entry with a wrong text, if any, tried alone first."""
    deadline = clock() + limit_s
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for candidate in _smaller(case, culprit):
            if clock() > deadline:
                return case
            if fails(candidate):
                case, has_shrunk = candidate, True
                break
    return case


def _smaller(case: Case, culprit: str | None) -> Iterator[Case]:
    """Yields smaller candidates, the smallest first."""
    return chain(
        _fewer_entries(case, culprit),
        _fewer_troubles(case),
        _fewer_engines(case),
        _simpler_engines(case),
        _fewer_ranks(case),
        _shorter_texts(case),
        _plainer_requests(case),
    )


def _fewer_entries(case: Case, culprit: str | None) -> Iterator[Case]:
    names = [entry.name for entry in case.entries]
    if len(names) < 2:
        return
    if culprit is not None and culprit in names:
        yield _with_entries(case, [culprit])
    for subset in _subsets(names):
        yield _with_entries(case, subset)


def _fewer_troubles(case: Case) -> Iterator[Case]:
    if case.troubles:
        yield replace(case, troubles=())
        for subset in _subsets(case.troubles):
            yield replace(case, troubles=tuple(subset))


def _subsets(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yields halves, then quarters, ..., then all but one."""
    size = len(items) // 2
    while size > 0:
        for at in range(0, len(items), size):
            yield list(items[at : at + size])
        if size > 1:
            for at in range(0, len(items), size):
                yield [*items[:at], *items[at + size :]]
        size //= 2
    for at in range(len(items)):
        if len(items) > 1:
            yield [*items[:at], *items[at + 1 :]]


def _with_entries(case: Case, entry_names: Sequence[str]) -> Case:
    """Returns the case with only these entries and their troubles."""
    names = set(entry_names)
    return replace(
        case,
        entries=tuple(entry for entry in case.entries if entry.name in names),
        troubles=tuple(
            limited
            for trouble in case.troubles
            if (limited := _limited(trouble, names)) is not None
        ),
    )


def _limited(trouble: Trouble, names: set[str]) -> Trouble | None:
    if isinstance(trouble, Migration):
        entries = tuple(name for name in trouble.entries if name in names)
        return replace(trouble, entries=entries) if entries or not trouble.entries else None
    if isinstance(trouble, Abort):
        if trouble.entry not in names:
            return None
        return trouble if trouble.successor in names else replace(trouble, successor=None)
    return trouble if getattr(trouble, "entry", None) in {None, *names} else None


def _fewer_engines(case: Case) -> Iterator[Case]:
    if len(case.engines) == 1 or any(isinstance(t, Migration) for t in case.troubles):
        return
    for engine in case.engines:
        yield replace(
            case,
            engines=(engine,),
            entries=tuple(replace(entry, engine=0) for entry in case.entries),
            troubles=tuple(_in_first(trouble) for trouble in case.troubles),
        )


def _in_first(trouble: Trouble) -> Trouble:
    return trouble if isinstance(trouble, Abort | Migration) else replace(trouble, engine=0)


def _simpler_engines(case: Case) -> Iterator[Case]:
    for at, setup in enumerate(case.engines):
        for simpler in _simpler(setup):
            if simpler != setup:
                engines = (*case.engines[:at], simpler, *case.engines[at + 1 :])
                yield replace(case, engines=engines)


def _simpler(setup: EngineSetup) -> Iterator[EngineSetup]:
    """Yields the setup with one feature removed at a time."""
    spec, scheduler, link = setup.speculation, setup.scheduler, setup.link
    yield replace(setup, link=replace(link, kind="inline"))
    yield replace(setup, link=replace(link, encoded=False))
    yield replace(setup, link=replace(link, sums="messages"))
    yield replace(setup, link=replace(link, late_masks=0.0))
    yield replace(setup, speculation=_but(spec, max_draft_tokens=0))
    yield replace(setup, speculation=_but(spec, tree=_but(spec.tree, shape="none")))
    yield replace(setup, speculation=_but(spec, controller="fixed"))
    yield replace(setup, speculation=_but(spec, learn=False))
    if spec.max_draft_tokens > 1:
        yield replace(setup, speculation=_but(spec, max_draft_tokens=spec.max_draft_tokens - 1))
    yield replace(setup, scheduler=_but(scheduler, overlap=False))
    yield replace(setup, prefix_caching=False)
    yield replace(setup, num_pages=max(setup.num_pages, _ROOMY_PAGES))
    yield replace(setup, scheduler=_but(scheduler, max_running=1))
    yield replace(setup, scheduler=_but(scheduler, prefill_chunk=256))
    yield replace(setup, scheduler=_but(scheduler, token_budget=512))


def _but(section: Part, **changed: object) -> Part:
    return section.model_copy(update=changed)


def _fewer_ranks(case: Case) -> Iterator[Case]:
    world = case.world
    if world.draft_ranks > 1:
        yield replace(case, world=replace(world, draft_ranks=1))
    if world.verify_ranks > 1:
        yield replace(case, world=replace(world, verify_ranks=1))


def _shorter_texts(case: Case) -> Iterator[Case]:
    for entry in case.entries:
        request = entry.request
        max_tokens, prompt = request.sampling.max_tokens, request.prompt
        for count in (max_tokens // 2, max_tokens - 1):
            if count > 0:
                yield _with_sampling(
                    case, entry, structs.replace(request.sampling, max_tokens=count)
                )
        for cut in (len(prompt) // 2, 1):
            if 0 < cut < len(prompt):
                for shorter in (prompt[:-cut], prompt[cut:]):
                    yield _with_entry(
                        case, replace(entry, request=replace(request, prompt=shorter))
                    )
        if entry.turn:
            yield _with_entry(case, replace(entry, turn=0))


def _plainer_requests(case: Case) -> Iterator[Case]:
    for entry in case.entries:
        sampling = entry.request.sampling
        needed = {"max_tokens", "top_logprobs"}
        if sampling.grammar is not None:
            needed.add("stop_token_ids")  # a text with a grammar has to end
        for name in SamplingParams.__struct_fields__:
            plain = getattr(_PLAIN, name)
            if name not in needed and getattr(sampling, name) != plain:
                yield _with_sampling(case, entry, structs.replace(sampling, **{name: plain}))
        if entry.request.speculation != SpeculationParams():
            request = replace(entry.request, speculation=SpeculationParams())
            yield _with_entry(case, replace(entry, request=request))


def _with_sampling(case: Case, entry: Entry, sampling: SamplingParams) -> Case:
    request = replace(entry.request, sampling=sampling)
    return _with_entry(case, replace(entry, request=request))


def _with_entry(case: Case, changed: Entry) -> Case:
    return replace(
        case,
        entries=tuple(changed if entry.name == changed.name else entry for entry in case.entries),
    )


def reduced(
    case: Case,
    checked: Checked,
    shelf: ModelShelf,
    plain: PlainTexts,
    *,
    limit_s: float,
    processes: RankProcesses | None = None,
) -> Case:
    """Returns the smallest case found within the limit that fails in the same way: an engine that
    failed, or a text that differs."""
    first = checked.failures[0]

    def fails(candidate: Case) -> bool:
        try:
            failures = check(candidate, shelf, plain, processes).failures
        except Exception:  # a case that cannot be built is not a reduction
            return False
        return any(_is_of_a_text(failure) == _is_of_a_text(first) for failure in failures)

    culprit = first.entry if _is_of_a_text(first) else None
    return reduce_case(case, fails, culprit=culprit, limit_s=limit_s)


def _is_of_a_text(failure: Failure) -> bool:
    return failure.entry not in (ENGINE, PLAIN)


def main(
    case: Annotated[Path, "file of the case"], limit_s: Annotated[float, "seconds"] = 60.0
) -> int:
    """Reduces a case file; writes the result next to it, as NAME-smaller.json."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        shelf = ModelShelf(Path(scratch))
        plain, processes = PlainTexts(shelf), RankProcesses()
        drawn = load_case(case)
        checked = check(drawn, shelf, plain, processes)
        if checked.failures:
            smaller = reduced(drawn, checked, shelf, plain, limit_s=limit_s, processes=processes)
            save_case(smaller, case.with_name(f"{case.stem}-smaller.json"))
            sys.stdout.write(
                f"{len(drawn.entries)} requests and {len(drawn.troubles)} troubles became "
                f"{len(smaller.entries)} and {len(smaller.troubles)}\n"
            )
        else:
            sys.stdout.write(f"{case}: nothing fails\n")
        plain.close()
        processes.close()
    return 1 if checked.failures else 0


if __name__ == "__main__":
    raise SystemExit(
        run_command(main, sys.argv[1:], program="python -m tests.support.fuzz_reduction")
    )
