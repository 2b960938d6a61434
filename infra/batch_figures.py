"""Measures `eesd batch` against the engine's own batches and transformers, on the same rows.

    python infra/batch_figures.py MODEL PROMPTS.jsonl RECORD.json

Every variant runs in a process of its own, one after the other, and the whole list twice. Rows have
the same number of tokens, greedy; transformers gets the size of batch and the type that are fastest
in a shorter run. Texts of the variants on one engine are compared.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eesd_dist.provenance import collect_provenance

_NUM_ROWS = 200
_NUM_TOKENS = 128
_SIZES = (25, 50, 100, 200)
_DTYPES = ("float32", "bfloat16")
_MAX_CHARACTERS = 400
"""Longest prompt, of ASCII alone: transformers pads the others of a batch to it."""
_PROBE_TOKENS = 24


def main(model: str, prompts: Path, record: Path) -> None:
    """Writes the record, and prints a line for each run."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        _write_rows(prompts, rows)
        plain = ["--max-draft-tokens", "0"]
        best = max(
            (_run("transformers", model, size, dtype, _PROBE_TOKENS, str(rows)), size, dtype)
            for dtype in _DTYPES
            for size in _SIZES
        )
        _say("best of transformers", {"tokens_per_s": best[0], "size": best[1], "dtype": best[2]})
        runs: list[Mapping[str, Any]] = []
        for turn in range(2):
            run: dict[str, Any] = {
                "transformers": {
                    "tokens_per_s": _run("transformers", model, *best[1:], _NUM_TOKENS, str(rows))
                },
                "engine": _run("engine", model, "auto", str(rows)),
                "engine, plain": _run("engine", model, "off", str(rows)),
                "batch": _batch(model, rows, Path(folder) / f"{turn}-ray.jsonl"),
                "batch, plain": _batch(model, rows, Path(folder) / f"{turn}-plain.jsonl", *plain),
                "batch --in-process": _batch(
                    model, rows, Path(folder) / f"{turn}-one.jsonl", "--in-process"
                ),
            }
            for name, figures in run.items():
                _say(name, figures)
            runs.append(run)
        outputs = [_texts_of(path) for path in sorted(Path(folder).glob("*-*.jsonl"))]
        content = {
            "what": f"{_NUM_ROWS} rows of {_NUM_TOKENS} tokens, greedy",
            "model": model,
            "transformers": {"size": best[1], "dtype": best[2]},
            "runs": runs,
            "texts_unlike_the_first": sum(
                texts[name] != outputs[0][name] for texts in outputs for name in outputs[0]
            ),
            "provenance": asdict(collect_provenance()),
        }
        record.write_text(json.dumps(content, indent=1) + "\n")


def _say(name: str, figures: Mapping[str, Any]) -> None:
    shown = {k: v for k, v in figures.items() if not isinstance(v, list)}
    print(f"{name}: {shown}", flush=True)


def _write_rows(prompts: Path, rows: Path) -> None:
    """Writes the rows. Prompts are numbered, since there may be too few."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    texts = [line.get("prompt") or line["messages"][0]["content"] for line in lines]
    texts = [text for text in texts if text.isascii() and len(text) <= _MAX_CHARACTERS]
    texts = [f"{number // len(texts)}. {texts[number % len(texts)]}" for number in range(_NUM_ROWS)]
    fields = {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    rows.write_text("".join(json.dumps({"prompt": text, **fields}) + "\n" for text in texts))


def _prompts_of(rows: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(rows).read_text().splitlines()]


def _texts_of(output: Path) -> dict[str, str]:
    records = [json.loads(line) for line in output.read_text().splitlines()]
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}


def _run(variant: str, *arguments: Any) -> Any:
    command = [sys.executable, __file__, f"--{variant}", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _batch(model: str, rows: Path, output: Path, *options: str) -> Mapping[str, Any]:
    report = output.with_suffix(".report")
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", str(rows), str(output)]
    command += ["--model", model, "--quiet", "--report", str(report), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    figures: Mapping[str, Any] = json.loads(report.read_text())
    assert figures["num_completed"] == _NUM_ROWS, figures
    assert figures["num_tokens"] == _NUM_ROWS * _NUM_TOKENS, figures
    return figures


def _transformers(model: str, size: int, dtype: str, num_tokens: int, rows: str) -> float:
    """Returns tokens per second of transformers' batched generation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eesd_dist.model.checkpoint_folder import local_folder

    folder = local_folder(Path(model))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    ).eval()
    ordered = sorted(_prompts_of(rows), key=len, reverse=True)
    if num_tokens < _NUM_TOKENS:
        ordered = ordered[:: len(ordered) // size][:size]
    began_s = time.perf_counter()
    for at in range(0, len(ordered), size):
        batch = tokenizer(ordered[at : at + size], return_tensors="pt", padding=True)
        with torch.inference_mode():
            target.generate(
                **batch,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
    return len(ordered) * num_tokens / (time.perf_counter() - began_s)


def _engine(model: str, mode: str, rows: str) -> Mapping[str, float]:
    """Returns tokens per second of `LLM.generate`, without the start."""
    from eesd_dist import LLM, SamplingParams
    from eesd_dist.types import SpeculationParams

    llm = LLM(model=model, max_num_seqs=_NUM_ROWS // 4)
    parameters = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    began_s = time.perf_counter()
    outputs = llm.generate(
        _prompts_of(rows), parameters, use_tqdm=False, speculation=SpeculationParams(mode=mode)
    )
    seconds = time.perf_counter() - began_s
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens_per_s": num_tokens / seconds, "seconds": seconds}


if __name__ == "__main__":
    if sys.argv[1] == "--transformers":
        print(json.dumps(_transformers(*json.loads(sys.argv[2]))))
    elif sys.argv[1] == "--engine":
        print(json.dumps(_engine(*json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
