"""From prompts to shards: the texts of the target, each chunk once, the same bytes in every run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.distill.collect import (
    CollectOptions,
    CollectRequest,
    collect,
    done_already,
    finish,
    plan,
    plan_sha256,
    planned,
    within,
)
from eesd_dist.distill.collector import Chunk, Collector, MadeShard, Recipe, ShardJob, Source
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import (
    FeatureStore,
    ShardEntry,
    identity_of,
    shard_name,
    weights_fingerprint,
)
from eesd_dist.distill.sources import EngineRows, TextRows
from eesd_dist.engine.build import build_local_engine
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.types import Request
from tests.support.drafters import save_target
from tests.support.tiny_checkpoints import tiny_model
from tests.support.tiny_features import read_shard
from tests.support.tiny_tokenizer import write_byte_level

PROMPTS = [("chat", [5, 6, 7, 8]), ("code", [9, 10]), ("chat", [11, 12, 13])]
TEXTS = [[20, 21, 22, 23, 24], [30], list(range(40, 90))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer."""
    return save_target(write_byte_level(tmp_path_factory.mktemp("readable")), vocab_size=320)


@pytest.fixture(scope="module")
def recipe(target: Path) -> Recipe:
    return Recipe(
        verifier=identity_of(target),
        weights_sha256=weights_fingerprint(target),
        exits=(1, 2),
        top_k=5,
        max_tokens=12,
        max_length=32,
        stop_token_ids=(2,),
        dtype="float32",
        seed=7,
    )


def quiet(text: str) -> None:
    assert text


class Counted:
    """The real engine; records the requests that it receives."""

    def __init__(self, target: Path) -> None:
        engine = build_local_engine(
            EngineConfig(
                model=ModelConfig(path=target, dtype="float32", device="cpu", numerics="fast"),
                cache=CacheConfig(num_pages=64, page_size=16, prefix_caching=False),
                speculation=SpeculationConfig(max_draft_tokens=0),
            )
        )
        self._rows = EngineRows(engine)
        self.asked: list[Request] = []

    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        self.asked.extend(requests)
        return self._rows.rows_of(requests)


def _collector(target: Path, recipe: Recipe) -> tuple[Collector, Counted]:
    source = Counted(target)
    return Collector(source=source, recipe=recipe), source


def _plan(recipe: Recipe, *, passes: int = 2, chunk_size: int = 3) -> list[Chunk]:
    options = CollectOptions(model=Path(), passes=passes, chunk_size=chunk_size)
    return plan(PROMPTS, TEXTS, options, recipe)


def test_every_prompt_is_answered_at_every_temperature_and_every_text_is_read(
    recipe: Recipe,
) -> None:
    sources = [source for chunk in _plan(recipe) for source in chunk.sources]
    answered = sorted((s.tokens, s.temperature) for s in sources if s.is_prompt)
    assert answered == sorted((tuple(p), t) for _, p in PROMPTS for t in (0.0, 0.8))
    assert len({s.seed for s in sources if s.is_prompt}) == 6
    read = sorted(s.tokens for s in sources if not s.is_prompt)
    # The maximum length splits the long text; a text of one token is not used.
    assert read == [tuple(TEXTS[0]), tuple(range(40, 72)), tuple(range(72, 90))]


def test_the_plan_depends_on_the_seed_alone_and_every_change_shows_in_its_hash(
    recipe: Recipe,
) -> None:
    assert _plan(recipe) == _plan(recipe)
    sha256 = plan_sha256(_plan(recipe), recipe)
    for other in (replace(recipe, seed=8), replace(recipe, exits=(1,)), replace(recipe, top_k=4)):
        assert plan_sha256(_plan(other), other) != sha256
    assert plan_sha256(_plan(recipe, passes=1), recipe) != sha256


def test_the_name_of_the_targets_folder_is_no_part_of_the_recipe(recipe: Recipe) -> None:
    moved = replace(recipe, verifier=replace(recipe.verifier, name_or_path="elsewhere"))
    assert plan_sha256(_plan(recipe), recipe) == plan_sha256(_plan(recipe), moved)


def test_a_chunk_survives_its_way_as_text(recipe: Recipe) -> None:
    for chunk in _plan(recipe):
        assert Chunk.from_json(chunk.to_json()) == chunk


def test_a_limited_disk_is_never_exceeded(tmp_path: Path, target: Path, recipe: Recipe) -> None:
    collector, _ = _collector(target, recipe)
    chunks = _plan(recipe)
    limit = recipe.most_bytes(chunks[0]) + recipe.most_bytes(chunks[1])
    fitting = within(chunks, recipe, max_bytes=limit)
    assert fitting == chunks[:2]
    assert within(chunks, recipe, max_bytes=limit - 1) == chunks[:1]
    written = sum(collector.collect(tmp_path, chunk).num_bytes for chunk in fitting)
    assert 0.5 * limit < written <= limit
    with pytest.raises(ConfigError, match="the size of one shard"):
        within(chunks, recipe, max_bytes=10)


def test_nothing_that_fits_is_an_error(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="none of which fits: expected a prompt of at most 20"):
        plan([("chat", [3] * 21)], [], CollectOptions(model=Path()), recipe)


def test_features_are_the_targets_own_words_and_thoughts(
    tmp_path: Path, target: Path, recipe: Recipe
) -> None:
    collector, writer = _collector(target, recipe)
    sources = (
        Source(tokens=(5, 6, 7, 8), workload="chat", is_prompt=True, seed=1),
        Source(tokens=(20, 21, 22), workload="text", is_prompt=False),
    )
    entry = collector.collect(tmp_path, Chunk(index=0, sources=sources))
    answered, read = read_shard(tmp_path / entry.name)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([[5, 6, 7, 8]]),
            attention_mask=torch.ones(1, 4, dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        out = theirs(answered.tokens_T.unsqueeze(0), output_hidden_states=True)
    # Nothing is computed after the last token: it has no row.
    assert torch.equal(answered.tokens_T, expected[0, :-1])
    assert (answered.num_prompt, read.num_prompt) == (4, 0)
    assert read.tokens_T.tolist() == [20, 21, 22]
    assert [request.sampling.max_tokens for request in writer.asked] == [12, 1]
    for at in recipe.exits:
        close = torch.testing.assert_close
        close(answered.hidden[at].float(), out.hidden_states[at][0], atol=1e-2, rtol=1e-2)
    log_p_TV = out.logits[0].log_softmax(dim=-1)
    log_q_TK = answered.top_logits_TK - answered.lse_T.unsqueeze(-1)
    chosen_TK = log_p_TV.gather(-1, answered.top_ids_TK.long())
    torch.testing.assert_close(log_q_TK, chosen_TK, atol=4e-3, rtol=1e-3)
    assert torch.equal(answered.top_ids_TK[:, 0].long(), log_p_TV.argmax(dim=-1))


def test_a_restart_makes_only_what_is_missing_and_the_same_bytes(
    tmp_path: Path, target: Path, recipe: Recipe
) -> None:
    chunks = _plan(recipe)
    whole, _ = _collector(target, recipe)
    entries = [whole.collect(tmp_path / "whole", chunk) for chunk in chunks]
    stopped, _ = _collector(target, recipe)
    stopped.collect(tmp_path / "stopped", chunks[1])

    entries_before = done_already(tmp_path / "stopped", chunks, recipe)
    assert entries_before == {1: entries[1]}
    restarted, writer = _collector(target, recipe)
    for chunk in chunks:
        if chunk.index not in entries_before:
            restarted.collect(tmp_path / "stopped", chunk)
    numbers = {request.request_id.split("-")[1] for request in writer.asked}
    assert "1" not in numbers
    for chunk in chunks:
        name = shard_name(chunk.index)
        ours, theirs = (tmp_path / folder / name for folder in ("whole", "stopped"))
        assert ours.read_bytes() == theirs.read_bytes()

    manifest = finish(tmp_path / "stopped", entries[::-1], chunks, recipe)
    assert [shard.name for shard in manifest.shards] == [shard_name(c.index) for c in chunks]
    store = FeatureStore.open(tmp_path / "stopped", expect=recipe.verifier)
    assert store.num_sequences == 9


def test_shards_of_another_plan_are_refused(tmp_path: Path, target: Path, recipe: Recipe) -> None:
    collector, _ = _collector(target, recipe)
    chunks = _plan(recipe)
    collector.collect(tmp_path, chunks[0])
    other = replace(recipe, max_tokens=11)
    with pytest.raises(CheckpointError, match="other options or of another target"):
        done_already(tmp_path, _plan(other), other)


def test_time_that_was_too_short_for_one_shard_is_an_error(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="before one shard was made: allow more"):
        finish(tmp_path, [], _plan(recipe), recipe)


def test_a_finished_store_is_left_as_it_is_and_one_of_another_plan_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "say {n} twice"}}\n' for n in range(8)))
    options = CollectOptions(model=BUNDLED_MODEL, prompts=file, passes=1)
    request = CollectRequest(options=options, out=tmp_path / "features")
    entry = ShardEntry(name="s", num_sequences=1, num_tokens=1, num_bytes=1, crc32=0)
    recipe = request.recipe()
    manifest = finish(request.out, [entry], planned(options, recipe, say=quiet), recipe)
    lines: list[str] = []
    assert collect(request, executor=LocalExecutor(), say=lines.append) == manifest
    assert lines[0].startswith("collect: done before, 1 tokens of 1 sequences in 1 shards")
    other = replace(request, options=replace(options, max_tokens=10))
    with pytest.raises(CheckpointError, match="collected from another target, or other prompts"):
        collect(other, executor=LocalExecutor(), say=lines.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": (32,)}, "exit layer 32: expected 1 to 31"),
        ({"max_tokens": 2048, "max_length": 4096}, "raise max_length or lower max_tokens"),
    ],
)
def test_what_the_target_cannot_do_is_refused_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    exits = change.pop("exits", (1,))
    options = CollectOptions(model=BUNDLED_MODEL, **change)
    request = CollectRequest(options=options, out=tmp_path, exits=exits)
    with pytest.raises(ConfigError, match=message):
        collect(request, executor=LocalExecutor(), say=quiet)


def test_a_step_killed_after_its_first_shard_makes_only_the_others(
    tmp_path: Path, readable: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {n} twice"}}\n' for n in range(8)))
    options = CollectOptions(
        model=readable, prompts=prompts, max_tokens=8, max_length=48, chunk_size=3, dtype="float32"
    )
    request = CollectRequest(options=options, out=tmp_path / "features", exits=(2, 1))
    killed = Killed(after=1)
    with pytest.raises(KeyboardInterrupt):
        collect(request, executor=killed, say=quiet)
    assert len(list(request.out.glob("shard-*"))) == 1
    lines: list[str] = []
    manifest = collect(request, executor=LocalExecutor(), say=lines.append)
    assert lines[0] == "collect: 3 shards planned, 1 there already"
    assert (manifest.exits, len(manifest.shards), manifest.num_sequences) == ((1, 2), 3, 8)
    assert not (request.out / "progress.json").exists()
    store = FeatureStore.of_target(request.out, readable)
    assert sum(1 for _ in store.sequences()) == 8


def test_no_shard_is_begun_after_the_time_is_spent(tmp_path: Path, target: Path) -> None:
    job = ShardJob(
        model=target,
        folder=tmp_path,
        recipe=CollectRequest(
            options=CollectOptions(model=target, max_tokens=8, max_length=48, dtype="float32"),
            out=tmp_path,
        ).recipe(),
        batch=2,
        threads=1,
        workers=None,
        allowed_s=-1.0,
    )
    source = Source(tokens=(5, 6, 7), workload="text", is_prompt=False)
    chunks = [Chunk(index=index, sources=(source,)) for index in range(2)]
    assert list(LocalExecutor().make_shards(job, chunks)) == []
    shards = list(LocalExecutor().make_shards(replace(job, allowed_s=1e9), chunks))
    assert [shard.entry.name for shard in shards] == [shard_name(0), shard_name(1)]
    assert shards[0].spent_s <= shards[1].spent_s


class Killed(LocalExecutor):
    """Runs until the given number of shards is made, then fails."""

    def __init__(self, *, after: int) -> None:
        self._after = after

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        yield from islice(super().make_shards(job, chunks), self._after)
        raise KeyboardInterrupt
