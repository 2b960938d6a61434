"""lm-evaluation-harness, in an environment of its own, evaluates the service: log-probabilities of
continuations, and generated texts. Downloads the harness, so it is slow."""

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import httpx
import pytest

from eesd_dist.text import Tokenizer
from tests.support.running import Running

VERSION = "0.4.13"
QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " cat", " dog and"], "answer": 0},
    {"question": "where did the", "choices": [" cat sit", " fox", " mat"], "answer": 1},
    {"question": "the dog sat on the", "choices": [" mat", " quick fox"], "answer": 0},
    {"question": "a cat and a", "choices": [" dog", " brown fox", " mat", " the"], "answer": 2},
]
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXTS = """
task: local_texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with the harness."""
    folder = tmp_path_factory.mktemp("harness")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = [f"lm_eval[api]=={VERSION}", "transformers"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def _samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


def _log_probability(service: Running, before: list[int], after: list[int]) -> float:
    """Returns that of a continuation, from the API's own form of log-probabilities of prompts."""
    body = {"prompt": before + after, "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()
    entries = answer["choices"][0]["prompt_logprobs"][len(before) :]
    return sum(entry[str(token)]["logprob"] for entry, token in zip(entries, after, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tokens_as", ["ids", "text"])
def test_the_harness_gets_our_log_probabilities_and_texts(
    tokens_as: str, harness: Path, service: Running, tmp_path: Path
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    model = service.config.engine.model.path
    arguments = {
        "model": "tiny",
        "base_url": f"{service.url}/v1/completions",
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": str(tokens_as == "ids"),
        "num_concurrent": "4",
    }
    done = subprocess.run(
        [
            *(harness, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
            *("--include_path", tmp_path, "--tasks", "local_choices,local_texts"),
            *("--output_path", tmp_path / "results", "--log_samples", "--batch_size", "3"),
        ],
        capture_output=True,
        text=True,
        env={"PATH": str(harness.parent), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokenizer = Tokenizer.load(model)
    for question, sample in zip(QUESTIONS, _samples(tmp_path, "local_choices"), strict=True):
        scores = [float(pair[0]) for pair in sample["filtered_resps"]]
        before = list(tokenizer.encode(str(question["question"])))
        for choice, score in zip(question["choices"], scores, strict=True):  # type: ignore[arg-type]
            after = list(tokenizer.encode(f"{question['question']}{choice}"))[len(before) :]
            assert score == pytest.approx(_log_probability(service, before, after), abs=1e-4)
    for question, sample in zip(QUESTIONS, _samples(tmp_path, "local_texts"), strict=True):
        body = {"prompt": question["question"], "max_tokens": 12, "temperature": 0, "stop": ["\n"]}
        answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()
        assert sample["resps"][0][0] == answer["choices"][0]["text"]
    sys.stdout.write(done.stdout)
