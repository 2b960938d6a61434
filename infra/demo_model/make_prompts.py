"""Writes prompts and text for distilling the exit head of the demo model.

    python infra/demo_model/make_prompts.py --gsm8k gsm8k_train.jsonl --out build/prompts

Arithmetic is chat, code is raw text, passages and instructions are chat about documentation of the
standard library (PSF licence). The target answers `prompts.jsonl`; `text.jsonl` is used without
generation. The problems held out from pre-training are in neither, and no line of either shares 13
words in a row with a prompt that heads are judged by.
"""

import argparse
import ast
import inspect
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pretrain import HELD_OUT, gsm8k_documents, stdlib_documents

JUDGED = Path(__file__).parents[2] / "eesd_dist" / "bench" / "prompts.jsonl"
SHARES = {"arithmetic": 0.5, "code": 0.2, "passage": 0.15, "instruction": 0.15}
ABOUT_PASSAGES = (
    "Summarize the following text in two sentences.\n\n{}",
    "{}\n\nWhat is the main point of this text?",
    "Read this text and answer: what can go wrong, and why?\n\n{}",
    "{}\n\nList the most important facts of the text above.",
    "Translate the following text into German.\n\n{}",
    "Answer from this text only. How is it used?\n\n{}",
)
INSTRUCTIONS = (
    "Write a short poem about {}.",
    "Explain {} to a child.",
    "What are three facts about {}?",
    "Write an e-mail in which you invite a friend to talk about {}.",
    "Was sollte man über {} wissen?",
    "Why is {} important?",
    "Give me advice about {}.",
    "Compare {} with {}.",
)
TOPICS = [
    "the moon",
    "a long journey by train",
    "bread",
    "rain in spring",
    "music",
    "honesty",
    "the history of paper",
    "sleep",
    "gravity",
    "money",
    "learning a language",
    "the stars",
    "a garden",
    "old maps",
    "coffee",
    "friendship",
    "winter",
    "clocks",
    "bicycles",
    "the desert",
    "a good teacher",
    "volcanoes",
    "chess",
    "glass",
    "river boats",
    "whales",
    "cities at night",
    "electricity",
    "the colour blue",
    "dreams",
    "bees",
    "running",
    "libraries",
    "the number zero",
    "mountains",
    "tea",
    "wind",
    "telephones",
    "snow",
    "cooking for many people",
    "salt",
    "bridges",
    "birds",
    "the heart",
    "forests",
    "silk",
    "light",
]
SHORTEST_PASSAGE, LONGEST_PASSAGE = 40, 220
"""Words."""
NGRAM = 13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--without", type=Path, nargs="*", default=[], help="files of prompts not to draw again"
    )
    parser.add_argument(
        "--judged", type=Path, nargs="*", default=[], help="more JSON lines that judge heads"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)

    lines = options.gsm8k.read_text(encoding="utf-8").splitlines()[:-HELD_OUT]
    problems = [json.loads(line)["question"] for line in lines]
    modules = stdlib_documents()
    passages = [passage for module in modules for passage in _passages(module)]
    kinds, weights = list(SHARES), list(SHARES.values())
    prompts = [
        _prompt(kind, rng, problems=problems, modules=modules, passages=passages)
        for kind in rng.choices(kinds, weights, k=options.count)
    ]
    drawn = {line for file in options.without for line in file.read_text().splitlines()}
    prompts = [prompt for prompt in prompts if json.dumps(prompt) not in drawn]
    documents = gsm8k_documents(options.gsm8k)[:-HELD_OUT]
    documents += rng.sample(modules, len(modules) // 5)
    rng.shuffle(documents)

    judged = {
        ngram
        for file in [JUDGED, *options.judged]
        for line in file.read_text(encoding="utf-8").splitlines()
        for text in _texts(json.loads(line))
        for ngram in _ngrams(text)
    }
    _write(options.out / "prompts.jsonl", prompts, judged)
    _write(options.out / "text.jsonl", [{"text": document} for document in documents], judged)


def _prompt(
    kind: str,
    rng: random.Random,
    *,
    problems: list[str],
    modules: list[str],
    passages: list[str],
) -> dict[str, object]:
    if kind == "code":
        text = rng.choice(modules)
        start = text.find("\n", rng.randrange(max(1, len(text) - 600))) + 1
        return {"class": kind, "prompt": "<|bos|>" + text[start : start + 300]}
    if kind == "arithmetic":
        content = rng.choice(problems)
    elif kind == "passage":
        content = rng.choice(ABOUT_PASSAGES).format(rng.choice(passages))
    else:
        content = rng.choice(INSTRUCTIONS).format(*rng.sample(TOPICS, 2))
    return {"class": kind, "messages": [{"role": "user", "content": content}]}


def _passages(module: str) -> Iterator[str]:
    """Yields paragraphs of the documentation of a module's parts."""
    try:
        tree = ast.parse(module.removeprefix("<|bos|>").removesuffix("<|end|>\n"))
    except SyntaxError:
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) or "") if isinstance(node, documented) else ""
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            words = paragraph.split()
            if SHORTEST_PASSAGE <= len(words) <= LONGEST_PASSAGE and ">>>" not in paragraph:
                yield " ".join(words)


def _texts(value: object) -> Iterator[str]:
    """Yields all strings in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _texts(member)


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    for at in range(len(words) - NGRAM + 1):
        yield tuple(words[at : at + NGRAM])


def _write(file: Path, rows: Iterable[dict[str, object]], judged: set[tuple[str, ...]]) -> None:
    lines: list[str] = []
    num_removed = 0
    for row in rows:
        if any(ngram in judged for text in _texts(row) for ngram in _ngrams(text)):
            num_removed += 1
        else:
            lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{file}: {len(lines)} lines, {num_removed} removed that share {NGRAM} words in a row")


if __name__ == "__main__":
    main()
