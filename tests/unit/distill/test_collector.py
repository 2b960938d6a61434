"""From prompts to shards: the target's own texts, each chunk once, the same bytes every time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.distill.collector import (
    Chunk,
    Collector,
    Recipe,
    Source,
    done_already,
    finish,
    plan,
    plan_sha256,
)
from eesd_dist.distill.features import (
    FeatureStore,
    identity_of,
    read_shard,
    shard_name,
    weights_fingerprint,
)
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.engine.llm import LLM, Generation
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import Request
from tests.support.tiny_checkpoints import tiny_model

PROMPTS = [("chat", [5, 6, 7, 8]), ("code", [9, 10]), ("chat", [11, 12, 13])]
TEXTS = [[20, 21, 22, 23, 24], [30], list(range(40, 90))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", num_hidden_layers=4).save_pretrained(folder)
    return folder


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


class Counted:
    """The real engine, and which requests it was asked."""

    def __init__(self, target: Path) -> None:
        self._llm = LLM(
            EngineConfig(
                model=ModelConfig(path=target, dtype="float32", device="cpu", numerics="fast"),
                cache=CacheConfig(num_pages=64, page_size=16, prefix_caching=False),
                speculation=SpeculationConfig(max_draft_tokens=0),
            )
        )
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked.extend(requests)
        return self._llm.generate(requests)


def _collector(target: Path, recipe: Recipe) -> tuple[Collector, Counted]:
    writer = Counted(target)
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), recipe.exits)
    return Collector(writer=writer, target=frozen, recipe=recipe), writer


def _plan(recipe: Recipe, *, passes: int = 2, chunk_size: int = 3) -> list[Chunk]:
    return plan(
        PROMPTS,
        TEXTS,
        recipe=recipe,
        temperatures=(0.0, 0.8),
        passes=passes,
        chunk_size=chunk_size,
    )


def test_every_prompt_is_answered_at_every_temperature_and_every_text_is_read(
    recipe: Recipe,
) -> None:
    sources = [source for chunk in _plan(recipe) for source in chunk.sources]
    answered = sorted((s.tokens, s.temperature) for s in sources if s.is_prompt)
    assert answered == sorted((tuple(p), t) for _, p in PROMPTS for t in (0.0, 0.8))
    assert len({s.seed for s in sources if s.is_prompt}) == 6
    read = sorted(s.tokens for s in sources if not s.is_prompt)
    # The longest length cuts the long text in two; a single token teaches nothing.
    assert read == [tuple(TEXTS[0]), tuple(range(40, 72)), tuple(range(72, 90))]


def test_the_plan_depends_on_the_seed_alone_and_every_change_shows_in_its_hash(
    recipe: Recipe,
) -> None:
    assert _plan(recipe) == _plan(recipe)
    known = plan_sha256(_plan(recipe), recipe)
    for other in (replace(recipe, seed=8), replace(recipe, exits=(1,)), replace(recipe, top_k=4)):
        assert plan_sha256(_plan(other), other) != known
    assert plan_sha256(_plan(recipe, passes=1), recipe) != known


def test_the_name_of_the_targets_folder_is_no_part_of_the_recipe(recipe: Recipe) -> None:
    moved = replace(recipe, verifier=replace(recipe.verifier, name_or_path="elsewhere"))
    assert plan_sha256(_plan(recipe), recipe) == plan_sha256(_plan(recipe), moved)


def test_a_chunk_survives_its_way_as_text(recipe: Recipe) -> None:
    for chunk in _plan(recipe):
        assert Chunk.from_json(chunk.to_json()) == chunk


def test_nothing_that_fits_is_an_error(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="none of which fits: expected a prompt of at most 20"):
        plan([("chat", [3] * 21)], [], recipe=recipe, temperatures=(0.0,), passes=1, chunk_size=4)


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
    assert torch.equal(answered.tokens_T, expected[0])
    assert (answered.num_prompt, read.num_prompt) == (4, 0)
    assert read.tokens_T.tolist() == [20, 21, 22]
    assert len(writer.asked) == 1  # a text is read, not continued
    for at in recipe.exits:
        close = torch.testing.assert_close
        close(answered.hidden[at].float(), out.hidden_states[at][0], atol=1e-2, rtol=1e-2)
    log_p_TV = out.logits[0].log_softmax(dim=-1)
    kept_TK = answered.top_logits_TK - answered.lse_T.unsqueeze(-1)
    chosen_TK = log_p_TV.gather(-1, answered.top_ids_TK.long())
    torch.testing.assert_close(kept_TK, chosen_TK, atol=4e-3, rtol=1e-3)
    assert torch.equal(answered.top_ids_TK[:, 0].long(), log_p_TV.argmax(dim=-1))


def test_a_restart_makes_only_what_is_missing_and_the_same_bytes(
    tmp_path: Path, target: Path, recipe: Recipe
) -> None:
    chunks = _plan(recipe)
    whole, _ = _collector(target, recipe)
    entries = [whole.collect(tmp_path / "whole", chunk) for chunk in chunks]
    stopped, _ = _collector(target, recipe)
    stopped.collect(tmp_path / "stopped", chunks[1])

    there = done_already(tmp_path / "stopped", chunks, recipe)
    assert there == {1: entries[1]}
    again, writer = _collector(target, recipe)
    for chunk in chunks:
        if chunk.index not in there:
            again.collect(tmp_path / "stopped", chunk)
    asked = {request.request_id.split("-")[1] for request in writer.asked}
    assert "1" not in asked
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
