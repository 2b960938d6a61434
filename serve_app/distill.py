"""From a target and prompts to a trained, calibrated exit head, in one command.

    eesd distill --model TARGET --prompts PROMPTS.jsonl --out HEADS --exits 2 3 4 --minutes 20

collect -> train (one head per exit layer, together) -> calibrate and evaluate each with the engine.
Every head lands in `HEADS/exit_N`; which one to take is a question of measured time, answered by
the table at the end.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from eesd_dist.control.calibrator import expected_calibration_error, judged_tokens
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.control.regret import position_rates
from eesd_dist.distill.collect import collect, read_sequences
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train import DistillOptions, frequent_tokens, train_heads
from eesd_dist.engine.llm import LLM
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import Outcome, Request, RequestId, SamplingParams, SpeculationParams, TokenId

logger = logging.getLogger(__name__)

_JUDGED_PROMPTS = 48


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="eesd distill", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--text", type=Path, help="JSON lines of {text}: read as it is, too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--exits", type=int, nargs="+", default=[2])
    parser.add_argument("--start", type=Path, help="heads of an earlier run, to train on")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--head", choices=("shared", "own", "truncated"), default="truncated")
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--limit", type=int, default=1500, help="prompts to generate from")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.load(options.model)
    spec = ModelSpec.from_folder(options.model)
    prompts = [prompt.tokens for prompt in load_prompts(tokenizer, options.prompts)]
    held_out, prompts = prompts[:_JUDGED_PROMPTS], prompts[_JUDGED_PROMPTS:][: options.limit]
    sequences = _collect(options, spec, prompts)
    if options.text is not None:
        with options.text.open(encoding="utf-8") as lines:
            sequences += [list(tokenizer.encode(json.loads(line)["text"])) for line in lines]

    target = FrozenTarget(options.model, spec, options.exits)
    heads = [_head(options, spec, exit_layer, sequences) for exit_layer in options.exits]
    figures = train_heads(
        target,
        heads,
        sequences,
        DistillOptions(seconds=options.minutes * 60, learning_rate=options.rate, seed=options.seed),
    )
    with (options.out / "train.jsonl").open("a", encoding="utf-8") as log:
        for figure in figures:
            row = {
                "step": figure.step,
                "minutes": round(figure.spent_s / 60, 2),
                "loss": figure.loss,
                "agreement": figure.agreement,
                "overlap": figure.overlap,
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
            logger.info("%s", json.dumps(row))
    for head in heads:
        folder = options.out / f"exit_{head.exit_layer}"
        if folder.exists():
            shutil.rmtree(folder)
        head.save(folder, provenance=collect_provenance(seed=options.seed).as_json())
        calibrate(
            options.model, folder, held_out, spec.eos_token_ids, max_tokens=options.max_tokens
        )
    return 0


def calibrate(
    model: Path,
    folder: Path,
    prompts: Sequence[Sequence[TokenId]],
    stop_token_ids: tuple[int, ...],
    *,
    max_tokens: int,
) -> None:
    """Fits the calibration map on rounds drafted to the full length.

    Half of the prompts (a greedy and a sampled one in turn) are fitted on; what is logged is
    measured on the other half.
    """
    config = EngineConfig(
        model=ModelConfig(path=model, head=folder),
        cache=CacheConfig(num_pages=256),
        speculation=SpeculationConfig(max_draft_tokens=8, fixed_length=8, log_evidence=True),
        parallel=ParallelConfig(num_threads=torch.get_num_threads()),
    )
    llm = LLM(config)
    fitted: list[Outcome] = []
    judged: list[Outcome] = []
    for number, prompt in enumerate(prompts):
        llm.engine.add(
            Request(
                request_id=RequestId(f"calibrate-{number}"),
                prompt=tuple(prompt),
                sampling=SamplingParams(
                    temperature=0.0 if number % 2 else 0.8,
                    seed=number,
                    max_tokens=max_tokens,
                    stop_token_ids=stop_token_ids,
                ),
                speculation=SpeculationParams(controller="fixed"),
            )
        )
        while llm.engine.has_work:
            outcomes = judged if number % 4 < 2 else fitted
            outcomes.extend(llm.engine.step(wait_s=0.0).outcomes)
    pairs = judged_tokens(judged)
    if not pairs or not judged_tokens(fitted):
        raise ConfigError(f"{folder}: no token was drafted on {len(prompts)} prompts: add prompts")
    calibrator = fit_calibrator(judged_tokens(fitted))
    calibrator.save(folder)
    logger.info(
        "%s: acceptance by position %s, ECE %.4f, judged %d",
        folder.name,
        [round(r, 3) for r in position_rates(judged, max_length=8)],
        expected_calibration_error(
            [(calibrator.probability(e), accepted) for e, accepted in pairs]
        ),
        len(pairs),
    )


def _head(
    options: argparse.Namespace, spec: ModelSpec, exit_layer: int, sequences: list[list[int]]
) -> TrainableExitHead:
    """A head of an earlier run, or a new one that begins as the target's last layer."""
    if options.start is not None:
        return TrainableExitHead.read(
            options.start / f"exit_{exit_layer}", target=spec, target_path=options.model
        )
    draft_vocab = None
    if options.head == "truncated":
        draft_vocab = frequent_tokens(
            sequences, count=options.draft_vocab, vocab_size=spec.vocab_size
        ).tolist()
    return TrainableExitHead.from_target(
        options.model, spec, exit_layer, head=options.head, draft_vocab=draft_vocab
    )


def _collect(
    options: argparse.Namespace, spec: ModelSpec, prompts: Sequence[Sequence[TokenId]]
) -> list[list[int]]:
    file = options.out / "sequences.jsonl"
    config = EngineConfig(
        model=ModelConfig(path=options.model, numerics="fast"),
        cache=CacheConfig(num_pages=512, prefix_caching=False),
        speculation=SpeculationConfig(max_draft_tokens=0),
        parallel=ParallelConfig(num_threads=options.threads),
    )
    llm = LLM(config)
    for done in collect(
        llm,
        prompts,
        file,
        max_tokens=options.max_tokens,
        stop_token_ids=spec.eos_token_ids,
    ):
        logger.info("collected %d of %d", done, len(prompts))
    return read_sequences(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
