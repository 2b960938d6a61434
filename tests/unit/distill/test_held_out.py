"""Training prompts and held-out prompts: always the same, and never both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.bench.options import SHIPPED_PROMPTS as BENCH_PROMPTS
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.distill.held_out import SHIPPED_PROMPTS, PromptChoice, read_texts
from eesd_dist.errors import ConfigError
from eesd_dist.model.spec import ModelSpec
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import TokenId
from tests.support.tiny_features import write_tiny_features, write_tiny_target


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(workload="w", tokens=(TokenId(n), TokenId(7))) for n in range(count)]


def test_the_three_parts_are_a_partition_and_always_the_same() -> None:
    choice = PromptChoice(held_out=10, seed=3)
    split = choice.split(_prompts(50))
    assert (len(split.calibrated), len(split.judged), len(split.learnt)) == (5, 5, 40)
    prompts = [*split.calibrated, *split.judged, *split.learnt]
    assert sorted(p.tokens for p in prompts) == [p.tokens for p in _prompts(50)]
    assert choice.split(_prompts(50)) == split
    assert replace(choice, seed=4).split(_prompts(50)) != split


def test_a_prompt_that_occurs_twice_is_not_on_both_sides() -> None:
    split = PromptChoice(held_out=10).split([*_prompts(20), *_prompts(20)])
    held = {*split.calibrated, *split.judged}
    assert len(held) == 10
    assert held.isdisjoint(split.learnt)
    assert len(split.learnt) == 10


def test_a_small_file_keeps_half_of_its_prompts_to_learn_from() -> None:
    split = PromptChoice(held_out=64).split(_prompts(8))
    assert (len(split.calibrated), len(split.judged), len(split.learnt)) == (2, 2, 4)
    with pytest.raises(ConfigError, match="found 3 different prompts, expected at least 4"):
        PromptChoice(held_out=64).split(_prompts(3))


def test_what_ships_can_be_read_and_shares_nothing_with_the_benchmarks() -> None:
    split = PromptChoice().read(BUNDLED_MODEL)
    assert len(split.learnt) > 400
    assert {p.workload for p in split.learnt} == {"arithmetic", "code", "passage", "instruction"}
    ours, theirs = (
        {json.dumps(json.loads(line), sort_keys=True) for line in file.read_text().splitlines()}
        for file in (SHIPPED_PROMPTS, BENCH_PROMPTS)
    )
    assert ours.isdisjoint(theirs)


def test_texts_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "one two"}\n\n{"text": "three"}\n')
    texts = read_texts(BUNDLED_MODEL, file)
    assert len(texts) == 2
    file.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(ConfigError, match=r"text\.jsonl:2: found no `text`"):
        read_texts(BUNDLED_MODEL, file)
    with pytest.raises(ConfigError, match="no such file"):
        read_texts(BUNDLED_MODEL, tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"5", "found int, expected a JSON object"),
        (b"{", "not JSON"),
        (b'{"prompt": 5}', "found prompt 5, expected a string"),
        (b'{"prompt": ""}', "found an empty prompt"),
        (b'{"messages": "x"}', "found messages 'x', expected a list"),
        (b'{"messages": []}', "expected a list of objects"),
        (b'{"messages": [{"role": "user"}]}', "found content None"),
        (b'{"question": 1}', "found content 1"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "one"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:3: .*{says}"):
        PromptChoice(prompts=file, held_out=2).read(BUNDLED_MODEL)


@pytest.mark.parametrize("line", [b"5", b'{"text": "\xff"}', b'{"text": "\\ud800"}'])
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(b'{"text": "one"}\n' + line)
    with pytest.raises(ConfigError, match=r"text\.jsonl:2: "):
        read_texts(BUNDLED_MODEL, file)


def test_prompts_too_long_for_the_target_are_in_no_part(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    room = ModelSpec.from_folder(BUNDLED_MODEL).max_position_embeddings - 1
    lines = [json.dumps({"prompt": f"number {n}"}) for n in range(8)]
    file.write_text("\n".join([json.dumps({"prompt": "x y " * room}), *lines]))
    choice = PromptChoice(prompts=file, held_out=4)
    split = choice.read(BUNDLED_MODEL)
    prompts = [*split.learnt, *split.calibrated, *split.judged]
    assert (split.num_skipped, len(prompts)) == (1, 8)
    assert max(len(prompt.tokens) for prompt in prompts) <= room
    file.write_text("\n".join(lines[:2]))
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: found 2 different prompts"):
        choice.read(BUNDLED_MODEL)


def test_other_prompts_kept_aside_than_when_collecting_are_refused(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target")
    manifest = write_tiny_features(tmp_path / "features", target).manifest
    PromptChoice(held_out=9, seed=9).require_kept_aside_from(
        tmp_path / "features"
    )  # there is no plan yet
    replace(manifest, plan_sha256="made", num_held_out=8).write(tmp_path / "features")
    PromptChoice(held_out=8).require_kept_aside_from(tmp_path / "features")
    with pytest.raises(ConfigError, match="collected with --seed 0, asked for 1"):
        PromptChoice(held_out=8, seed=1).require_kept_aside_from(tmp_path / "features")
    head = tmp_path / "head"
    head.mkdir()
    provenance = {"training": {"features": str(tmp_path / "features")}}
    (head / "config.json").write_text(json.dumps({"provenance": provenance}))
    with pytest.raises(ConfigError, match="collected with --held-out 8, asked for 16"):
        PromptChoice(held_out=16).require_unseen_by(head)
