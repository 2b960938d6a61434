"""Random engines, requests and troubles; every text against plain decoding, bit for bit.

    eesd bench exact --random SEED [--minutes M | --tokens N]
    python -m eesd_dist.bench.fuzz --model FOLDER --random SEED [--device cuda]
    eesd bench exact --case FILE

Each engine is drawn from the seed and its number: controllers, trees, batch, pages, microbatches,
ranks, links; requests with every sampling parameter; arrivals, aborts, lost stages, migrations.
Each text, its end and its log-probabilities are compared with those of the same request alone,
with speculation off. A failure is made smaller and written to a case file that --case replays. The
last line of the output is one JSON object. Exit status 1 when anything differs.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from eesd_dist import config as configuration
from eesd_dist.bench.fuzz.campaign import Campaign, Limits, reduced
from eesd_dist.bench.fuzz.cases import load_case, save_case
from eesd_dist.bench.fuzz.check import check
from eesd_dist.bench.fuzz.draw_cases import Source
from eesd_dist.bench.fuzz.draw_requests import Prompt
from eesd_dist.bench.fuzz.models import KnownModel, ModelShelf
from eesd_dist.bench.fuzz.plants import PLANTS
from eesd_dist.bench.fuzz.reference import PlainTexts
from eesd_dist.bench.fuzz.totals import StateFile
from eesd_dist.bench.prompts import SHIPPED_PROMPTS
from eesd_dist.config import DType
from eesd_dist.errors import ConfigError, EesdError
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer

_DEFAULT_TOKENS = 20_000


def is_wanted(words: Sequence[str]) -> bool:
    """Whether these words of `eesd bench exact` ask for the fuzz."""
    return any(word.split("=")[0] in ("--random", "--case") for word in words)


def parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--random", type=int, metavar="SEED", help="what everything is drawn from")
    add("--model", type=Path, action="append", default=[], help="a model; may be repeated")
    add("--head", type=Path, help="exit head of the first model (MODEL/exit_head)")
    add("--random-models", type=int, default=0, metavar="N", help="also N of odd shapes")
    add("--prompts", type=Path, help="JSON lines, for models with a tokenizer (shipped ones)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    add("--dtype", choices=_dtypes(), action="append", help="only this type; may be repeated")
    add("--tokens", type=int, help=f"tokens to compare, about ({_DEFAULT_TOKENS})")
    add("--minutes", type=float, help="ends after so long, with --tokens whichever comes first")
    add("--state", type=Path, metavar="FILE", help="keeps what is done; the same command goes on")
    add("--case", type=Path, metavar="FILE", help="replays one case, and nothing else")
    add("--case-folder", type=Path, default=Path(), help="where failing cases are written (.)")
    add("--max-failures", type=int, default=3, metavar="N", help="ends at the Nth failing engine")
    add("--reduce-s", type=float, default=60.0, help="seconds for making a failure smaller")
    add("--json", action="store_true", help="only the last line")
    add("--plant", choices=PLANTS, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str], *, program: str = "python -m eesd_dist.bench.fuzz") -> int:
    found = parser(program)
    options = found.parse_args(list(argv))
    if options.random is None and options.case is None:
        found.error("give --random SEED, or --case FILE")
    torch.set_num_threads(1)
    try:
        with _few_warnings(), tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            shelf = ModelShelf(Path(scratch))
            return _replay(options, shelf) if options.case else _run(options, shelf)
    except EesdError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2


@contextmanager
def _few_warnings() -> Iterator[None]:
    """Every model is read in every type: that this rounds weights need not be said each time."""
    logger = logging.getLogger("eesd_dist.model")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _dtypes() -> tuple[DType, ...]:
    """Read when they are wanted, since a type may be added; `auto` is one of the others."""
    return tuple(name for name in get_args(configuration.DType) if name != "auto")


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _run(options: argparse.Namespace, shelf: ModelShelf) -> int:
    try:
        source = _source(options, shelf)
    except KeyboardInterrupt:
        return 130
    state = StateFile(options.state, asked=_asked(source))
    tokens: int | None = options.tokens
    if tokens is None and options.minutes is None:
        tokens = _DEFAULT_TOKENS
    campaign = Campaign(
        source,
        shelf,
        state,
        limits=Limits(
            tokens=tokens,
            seconds=None if options.minutes is None else 60.0 * options.minutes,
            failures=options.max_failures,
            reduction_s=options.reduce_s,
        ),
        case_folder=options.case_folder,
        say=lambda text: _say(options, text),
    )
    was_stopped = False
    try:
        campaign.run()
    except KeyboardInterrupt:
        was_stopped = True
    totals = campaign.totals
    if totals.engines and not totals.counts.get("drafted"):
        sys.stderr.write("nothing was drafted: the models have no exit head (--head)\n")
    report = {
        "seed": options.random,
        "device": source.device,
        **totals.to_json(),
        "was_stopped": was_stopped,
        "provenance": collect_provenance(seed=options.random).as_json(),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    if totals.mismatches:
        return 1
    return 130 if was_stopped else 0


def _source(options: argparse.Namespace, shelf: ModelShelf) -> Source:
    models = [
        shelf.named(folder, head=options.head if at == 0 else None)
        for at, folder in enumerate(options.model)
    ]
    models += [shelf.random(options.random, number) for number in range(options.random_models)]
    if not models:
        raise ConfigError("no model: give --model FOLDER or --random-models N")
    has_cuda = torch.cuda.is_available()
    return Source(
        seed=options.random,
        models=tuple(models),
        prompts={model.name: _prompts(options, model, shelf) for model in models},
        dtypes=tuple(options.dtype or _dtypes()),
        device=options.device,
        is_on_cpu=options.device == "cpu" or (options.device == "auto" and not has_cuda),
        plant=options.plant,
    )


def _prompts(
    options: argparse.Namespace, model: KnownModel, shelf: ModelShelf
) -> tuple[Prompt, ...]:
    folder = shelf.folder(model.name)
    if not (folder / "tokenizer.json").exists():
        return ()
    file = options.prompts or SHIPPED_PROMPTS
    return tuple(prompt.tokens for prompt in load_prompts(Tokenizer.load(folder), file))


def _asked(source: Source) -> dict[str, object]:
    """What decides which cases there are."""
    return {
        "seed": source.seed,
        "models": [[model.name, *model.heads] for model in source.models],
        "num_prompts": {name: len(found) for name, found in source.prompts.items()},
        "dtypes": list(source.dtypes),
        "device": source.device,
        "plant": source.plant,
    }


def _replay(options: argparse.Namespace, shelf: ModelShelf) -> int:
    """Plays a case file; where it fails, it is made smaller still."""
    case = load_case(options.case)
    plain = PlainTexts(shelf)
    checked = check(case, shelf, plain)
    for failure in checked.failures:
        _say(options, f"{failure.entry}: {failure.what.rstrip()}")
    if checked.failures and options.reduce_s > 0:
        smaller = reduced(case, checked, shelf, plain, limit_s=options.reduce_s)
        if smaller != case:
            file = options.case_folder / f"{options.case.stem}-smaller.json"
            save_case(smaller, file)
            _say(options, f"a smaller one: {file}")
    plain.close()
    report = {
        "seed": case.seed,
        "engine": case.number,
        "tokens": checked.num_tokens,
        "texts": checked.num_texts,
        "mismatches": len(checked.failures),
        "failures": [{"entry": f.entry, "what": f.what} for f in checked.failures],
        "counts": dict(checked.counts),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if checked.failures else 0
