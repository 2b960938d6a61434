"""Writes the training and the evaluation prompts of SmolLM2's exit head from public data sets.

    python infra/smollm2/make_prompts.py --data DATA --out build/smollm2

DATA holds the files of these sets; the head's card (serve_app/heads/smollm2/README.md) names their
sources and licences. `prompts.jsonl` is what the head is trained on, `judged/*.jsonl` are the sets
by which it is judged, and `six.jsonl` has a sample of each for the benchmarks; no training prompt
shares 13 words in a row with one of those. Answers of the data sets are never read: the target
writes every text itself.
"""

import argparse
import ast
import gzip
import inspect
import json
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

NGRAM = 13
MAX_CHARACTERS = 2_400
"""Longest training prompt in characters, about 600 tokens."""
SAMPLE = 20
"""Prompts of each judged set in `six.jsonl`."""
PER_TEMPLATE = 100
"""Prompts of each template of P3, of about 188 there."""
ONE_WORD_ANSWERS = re.compile(
    r"^(adversarial_qa_.*question_context|amazon_polarity|commonsense_qa|cosmos_qa.*_id|dbpedia|"
    r"glue|imdb_(?!Reviewer_Expressed)|paws|quarel|rotten|trec|wiki_qa_Is|wiki_qa_Decide|yelp)"
)
"""Templates with labels for answers, which teach a head nothing about text."""
NUM_INSTRUCTIONS, NUM_FUNCTIONS = 6_000, 4_000
INSTRUCTIONS = (
    "Write a short poem about {}.",
    "Write a story about {} for children.",
    "Explain {} to a child.",
    "What are five facts about {}?",
    "Write an essay about {}.",
    "Write a blog post about {}.",
    "Write an e-mail in which you invite a colleague to a talk about {}.",
    "Why is {} important?",
    "Give me advice about {}.",
    "Compare {} with {}.",
    "What should a beginner know about {}?",
    "List the pros and cons of {}.",
    "Make a plan for a week about {}.",
    "What is the history of {}?",
    "Imagine that you are an expert on {}. Answer a question about it that people often ask.",
    "Write a dialogue between two friends about {} and {}.",
    "How does {} work?",
    "Summarize what is known about {} in three sentences.",
)
TOPICS = Path(__file__).with_name("topics.txt").read_text(encoding="utf-8").splitlines()
CODE_TASKS = (
    "Complete the following Python function.\n\n```python\n{}```",
    "Write the body of this function:\n\n{}",
    "{}",
    "Explain what this Python function is for.\n\n```python\n{}```",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data, rng = options.data, random.Random(options.seed)

    judged = judged_sets(data)
    (options.out / "judged").mkdir(parents=True, exist_ok=True)
    for name, prompts in judged.items():
        write(options.out / "judged" / f"{name}.jsonl", name, prompts)
    sample = [
        row(name, text)
        for name, prompts in judged.items()
        for text in random.Random(0).sample(prompts, SAMPLE)
    ]
    (options.out / "six.jsonl").write_text("".join(sample), encoding="utf-8")
    forbidden = {ngram for prompts in judged.values() for text in prompts for ngram in ngrams(text)}

    lines = []
    for name, prompts in training_sets(data, rng).items():
        unique = [text for text in dict.fromkeys(prompts) if len(text) <= MAX_CHARACTERS]
        clean = [text for text in unique if forbidden.isdisjoint(ngrams(text))]
        num_removed = len(unique) - len(clean)
        print(f"{name}: {len(clean)} prompts, {num_removed} removed as too like a judged one")
        lines += [row(name, text) for text in clean]
    rng.shuffle(lines)
    (options.out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{options.out / 'prompts.jsonl'}: {len(lines)} prompts")


def judged_sets(data: Path) -> dict[str, list[str]]:
    """Returns the first turn of every prompt of the evaluation sets."""
    spec_bench = [json.loads(line) for line in lines_of(data / "spec_bench.jsonl")]
    by_category = {
        name: [task["turns"][0] for task in spec_bench if task["category"] == name]
        for name in ("summarization", "qa", "rag")
    }
    with gzip.open(data / "humaneval.jsonl.gz", "rt", encoding="utf-8") as file:
        functions = [json.loads(line)["prompt"] for line in file]
    return {
        "gsm8k": [json.loads(line)["question"] for line in lines_of(data / "gsm8k_test.jsonl")],
        "humaneval": [CODE_TASKS[0].format(function) for function in functions],
        "mt_bench": [json.loads(line)["turns"][0] for line in lines_of(data / "mt_bench.jsonl")],
        **by_category,
    }


def training_sets(data: Path, rng: random.Random) -> dict[str, list[str]]:
    problems = [json.loads(line)["question"] for line in lines_of(data / "gsm8k_train.jsonl")]
    p3 = []
    for file in sorted((data / "t0" / "data_per_template").glob("*.jsonl")):
        if not ONE_WORD_ANSWERS.match(file.name):
            tasks = [json.loads(line)["prompt"].strip() for line in lines_of(file)]
            fitting = [text for text in tasks if len(text) <= MAX_CHARACTERS]
            p3 += rng.sample(fitting, min(PER_TEMPLATE, len(fitting)))
    roles = json.loads((data / "roleplay.json").read_text(encoding="utf-8"))
    programs = json.loads((data / "codegen.json").read_text(encoding="utf-8"))
    users = [json.loads(line) for line in lines_of(data / "user_oriented.jsonl")]
    users += [json.loads(line) for line in lines_of(data / "seed_tasks.jsonl")]
    basics = [json.loads(line)["text"] for line in lines_of(data / "mbpp.jsonl")]
    functions = sorted(set(documented_functions()))
    return {
        "gsm8k_train": problems,
        "p3": p3,
        "roleplay": [joined(task["instruction"], task["input"]) for task in roles],
        "codegen": [joined(task["instruction"], task["input"]) for task in programs],
        "self_instruct": [
            joined(task["instruction"], task["instances"][0]["input"]) for task in users
        ],
        "mbpp": basics,
        "functions": [
            rng.choice(CODE_TASKS).format(function)
            for function in rng.sample(functions, min(NUM_FUNCTIONS, len(functions)))
        ],
        "instructions": [
            rng.choice(INSTRUCTIONS).format(*rng.sample(TOPICS, 2)) for _ in range(NUM_INSTRUCTIONS)
        ],
    }


def documented_functions() -> Iterator[str]:
    """Yields signature and docstring of functions of the standard library of this Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    for file in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(file.relative_to(root).parts):
            try:
                tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                    body = inspect.cleandoc(text).replace("\n", "\n    ")
                    if 20 < len(body) < 700:
                        name = f"def {node.name}({ast.unparse(node.args)}):"
                        yield f'{name}\n    """{body}"""\n'


def joined(instruction: str, material: str) -> str:
    return f"{instruction}\n\n{material}".strip()


def ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    for at in range(len(words) - NGRAM + 1):
        yield tuple(words[at : at + NGRAM])


def lines_of(file: Path) -> Sequence[str]:
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def row(name: str, text: str) -> str:
    message = {"role": "user", "content": text}
    return json.dumps({"class": name, "messages": [message]}) + "\n"


def write(file: Path, name: str, prompts: Sequence[str]) -> None:
    file.write_text("".join(row(name, text) for text in prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
