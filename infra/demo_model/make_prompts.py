"""Writes prompts and text for distilling the exit head of the demo model.

    python infra/demo_model/make_prompts.py --gsm8k gsm8k_train.jsonl --out build/prompts

Arithmetic is chat, code is raw text. The target answers `prompts.jsonl`; `text.jsonl` is used
without generation. The problems held out from pre-training are in neither.
"""

import argparse
import json
import random
from pathlib import Path

from pretrain import HELD_OUT, gsm8k_documents, stdlib_documents

CODE_SHARE = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)

    lines = options.gsm8k.read_text(encoding="utf-8").splitlines()[:-HELD_OUT]
    problems = [json.loads(line)["question"] for line in lines]
    modules = stdlib_documents()
    prompts: list[dict[str, object]] = []
    for _ in range(options.count):
        if rng.random() < CODE_SHARE:
            text = rng.choice(modules)
            start = text.find("\n", rng.randrange(max(1, len(text) - 600))) + 1
            prompts.append({"class": "code", "prompt": "<|bos|>" + text[start : start + 300]})
        else:
            messages = [{"role": "user", "content": rng.choice(problems)}]
            prompts.append({"class": "arithmetic", "messages": messages})
    _write(options.out / "prompts.jsonl", prompts)

    documents = gsm8k_documents(options.gsm8k)[:-HELD_OUT]
    documents += rng.sample(modules, len(modules) // 5)
    rng.shuffle(documents)
    _write(options.out / "text.jsonl", [{"text": document} for document in documents])


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
