"""The fuzz as a command.

`eesd bench exact --random SEED`; on a machine with torch and without Ray, `python -m
eesd_dist.bench.fuzz --model FOLDER --random SEED`.
"""

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from eesd_dist.bench.fuzz.campaign import Campaign, Limits
from eesd_dist.bench.fuzz.cases import load_case
from eesd_dist.bench.fuzz.check import check
from eesd_dist.bench.fuzz.drawing.cases import Source
from eesd_dist.bench.fuzz.drawing.requests import Prompt
from eesd_dist.bench.fuzz.models import KnownModel, ModelShelf
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.bench.fuzz.reference import PlainTexts
from eesd_dist.bench.fuzz.totals import StateFile
from eesd_dist.bench.options import DEFAULT_FUZZ_TOKENS, SHIPPED_PROMPTS, FuzzOptions
from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.errors import ConfigError, EesdError
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import DType


def main(options: FuzzOptions) -> int:
    """Compares the texts of random engines, requests and troubles with plain decoding.

    Exit status 1 when anything differs, 2 for every error.
    """
    torch.set_num_threads(1)
    try:
        with _few_warnings(), tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            shelf = ModelShelf(Path(scratch))
            if options.case is not None:
                return _replay(options, options.case, shelf)
            if options.random is None:
                raise ConfigError("give --random SEED, or --case FILE")
            return _run(options, options.random, shelf)
    except EesdError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _few_warnings() -> Iterator[None]:
    """Suppresses repeated warnings on rounded weights: every model is read in every type."""
    logger = logging.getLogger("eesd_dist.model")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _run(options: FuzzOptions, seed: int, shelf: ModelShelf) -> int:
    try:
        source = _source(options, seed, shelf)
    except KeyboardInterrupt:
        return 130
    state = StateFile(options.state, settings=_settings(source))
    tokens = options.tokens
    if tokens is None and options.minutes is None:
        tokens = DEFAULT_FUZZ_TOKENS
    campaign = Campaign(
        source,
        shelf,
        state,
        limits=Limits(
            tokens=tokens,
            seconds=None if options.minutes is None else 60.0 * options.minutes,
            failures=options.max_failures,
        ),
        case_folder=options.case_folder,
        say=say_unless(options.json),
    )
    was_stopped = False
    try:
        campaign.run()
    except KeyboardInterrupt:
        was_stopped = True
    totals = campaign.totals
    if totals.engines and not totals.counts.get("drafted"):
        sys.stderr.write("nothing was drafted: the models have no exit head (see --head)\n")
    report = {
        "seed": seed,
        "device": source.device,
        **totals.to_json(),
        "was_stopped": was_stopped,
    }
    print_report(report, seed=seed)
    if totals.mismatches:
        return 1
    return 130 if was_stopped else 0


def _source(options: FuzzOptions, seed: int, shelf: ModelShelf) -> Source:
    models = [
        shelf.named(folder, head=options.head if at == 0 else None)
        for at, folder in enumerate(options.model)
    ]
    models += [shelf.random(seed, number) for number in range(options.random_models)]
    if not models:
        raise ConfigError("found no model: use --model FOLDER or --random-models N")
    has_cuda = torch.cuda.is_available()
    is_on_cpu = options.device == "cpu" or (options.device == "auto" and not has_cuda)
    if options.processes and not is_on_cpu:
        raise ConfigError("ranks in processes compute on CPUs here: add --device cpu")
    return Source(
        seed=seed,
        models=tuple(models),
        prompts={model.name: _prompts(options, model, shelf) for model in models},
        dtypes=options.dtype or get_args(DType),
        device=options.device,
        is_on_cpu=is_on_cpu,
        min_verify_ranks=options.ranks,
        in_processes=options.processes,
    )


def _prompts(options: FuzzOptions, model: KnownModel, shelf: ModelShelf) -> tuple[Prompt, ...]:
    folder = shelf.folder(model.name)
    if not (folder / "tokenizer.json").exists():
        return ()
    file = options.prompts or SHIPPED_PROMPTS
    return tuple(prompt.tokens for prompt in load_prompts(Tokenizer.load(folder), file))


def _settings(source: Source) -> dict[str, object]:
    """Returns the settings that determine the cases."""
    return {
        "seed": source.seed,
        "models": [[model.name, *model.heads] for model in source.models],
        "num_prompts": {name: len(prompts) for name, prompts in source.prompts.items()},
        "dtypes": list(source.dtypes),
        "device": source.device,
        **({"processes": True} if source.in_processes else {}),
    }


def _replay(options: FuzzOptions, file: Path, shelf: ModelShelf) -> int:
    """Runs a case file."""
    say = say_unless(options.json)
    case = load_case(file)
    plain, processes = PlainTexts(shelf), RankProcesses()
    try:
        checked = check(case, shelf, plain, processes)
    finally:
        plain.close()
        processes.close()
    for failure in checked.failures:
        say(f"{failure.entry}: {failure.what.rstrip()}")
    report = {
        "seed": case.seed,
        "engine": case.number,
        "tokens": checked.num_tokens,
        "texts": checked.num_texts,
        "mismatches": len(checked.failures),
        "failures": [{"entry": f.entry, "what": f.what} for f in checked.failures],
        "counts": dict(checked.counts),
    }
    print_report(report, seed=case.seed)
    return 1 if checked.failures else 0
