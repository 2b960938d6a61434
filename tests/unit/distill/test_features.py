"""The feature store: data is read back unchanged, and damage is detected."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    FeatureSequence,
    FeatureStore,
    identity_of,
    inspect_shard,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.errors import CheckpointError, ConfigError
from tests.support.tiny_checkpoints import tiny_model
from tests.support.tiny_features import read_shard


def _sequence(num_tokens: int, *, seed: int = 0, vocab_size: int = 300) -> FeatureSequence:
    """Returns features of a sharply peaked target: in some rows one token has nearly all mass."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 6.0 * torch.randn(num_tokens, vocab_size, generator=generator) + 15.0
    best = logits_TV.topk(8, dim=-1)
    return FeatureSequence(
        tokens_T=torch.randint(vocab_size, (num_tokens,), generator=generator),
        num_prompt=num_tokens // 2,
        workload=f"class {seed}",
        temperature=0.8,
        hidden={
            at: torch.randn(num_tokens, 16, generator=generator).bfloat16() for at in (1, 2, 12)
        },
        top_ids_TK=best.indices.int(),
        top_logits_TK=best.values,
        lse_T=logits_TV.logsumexp(dim=-1),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(folder)
    return folder


def _store(folder: Path, target: Path, *, num_shards: int = 3, per_shard: int = 4) -> FeatureStore:
    entries = tuple(
        write_shard(
            folder,
            index,
            [_sequence(5 + n, seed=10 * index + n) for n in range(per_shard)],
            stamp="s",
        )
        for index in range(num_shards)
    )
    FeatureManifest(
        verifier=identity_of(target),
        weights_sha256=weights_fingerprint(target),
        exits=(1, 2, 12),
        top_k=8,
        seed=3,
        max_length=64,
        shards=entries,
    ).write(folder)
    return FeatureStore.open(folder, expect=identity_of(target))


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    written = [_sequence(n, seed=n) for n in (1, 7, 30)]
    entry = write_shard(tmp_path, 4, written)
    read = read_shard(tmp_path / entry.name)
    assert (entry.num_sequences, entry.num_tokens) == (3, 38)
    assert entry.num_bytes == (tmp_path / entry.name).stat().st_size
    for old, new in zip(written, read, strict=True):
        assert torch.equal(old.tokens_T, new.tokens_T)
        assert new.tokens_T.dtype == torch.int64
        assert (new.num_prompt, new.workload) == (old.num_prompt, old.workload)
        assert new.temperature == pytest.approx(0.8)
        assert list(new.hidden) == [1, 2, 12]
        assert all(torch.equal(old.hidden[at], new.hidden[at]) for at in old.hidden)
        assert torch.equal(old.top_ids_TK, new.top_ids_TK)
        assert torch.equal(old.lse_T, new.lse_T)  # to the bit


def test_kept_probabilities_are_right_to_a_thousandth_however_large_the_logits(
    tmp_path: Path,
) -> None:
    old = _sequence(200, seed=1)
    (new,) = read_shard(tmp_path / write_shard(tmp_path, 0, [old]).name)
    exact = (old.top_logits_TK - old.lse_T.unsqueeze(-1)).exp()
    restored = (new.top_logits_TK - new.lse_T.unsqueeze(-1)).exp()
    assert (exact - restored).abs().max() < 1e-3
    tail, exact_tail = (1.0 - share.sum(dim=-1) for share in (restored, exact))
    assert (tail.clamp(min=0.0) - exact_tail).abs().max() < 2e-3


def test_the_same_content_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, pickle, sys\n"
        "from eesd_dist.distill.features import write_shard\n"
        "sequences = pickle.loads(sys.stdin.buffer.read())\n"
        "print(write_shard(pathlib.Path(sys.argv[1]), 0, sequences).crc32)\n"
    )
    sequences = [_sequence(9), _sequence(4)]
    run = [sys.executable, "-c", code, str(tmp_path / "other")]
    theirs = subprocess.run(
        run, check=True, capture_output=True, input=pickle.dumps(sequences)
    ).stdout
    ours = write_shard(tmp_path / "mine", 0, sequences).crc32
    assert int(theirs) == ours


def test_a_torn_shard_is_refused_wherever_it_was_torn(tmp_path: Path) -> None:
    file = tmp_path / write_shard(tmp_path, 0, [_sequence(9)]).name
    whole = file.read_bytes()
    for length in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"expected a complete shard.*collect again"):
            read_shard(file)


def test_other_files_are_no_shards(tmp_path: Path, target: Path) -> None:
    with pytest.raises(CheckpointError, match="no header of a shard"):
        read_shard(target / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        read_shard(tmp_path / "shard-00000.safetensors")


def test_a_shard_of_other_options_is_told_apart_by_its_stamp(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, [_sequence(9)], stamp="these")
    assert inspect_shard(tmp_path / entry.name, stamp="these") == entry
    with pytest.raises(CheckpointError, match="other options or of another target"):
        inspect_shard(tmp_path / entry.name, stamp="those")


def test_nothing_but_the_shard_is_left_in_the_folder(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, [_sequence(9)])
    assert [file.name for file in tmp_path.iterdir()] == [entry.name]


def test_a_store_knows_its_size_and_gives_its_sequences_in_order(
    tmp_path: Path, target: Path
) -> None:
    store = _store(tmp_path, target)
    assert store.num_sequences == 12
    assert store.manifest.num_tokens == 3 * (5 + 6 + 7 + 8)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert store.manifest.bytes_per_million_tokens == round(1e6 * size / 78)
    names = [sequence.workload for sequence in store.sequences()]
    assert names == [f"class {10 * s + n}" for s in range(3) for n in range(4)]
    some = [sequence.workload for sequence in store.sequences((9, 0, 6))]
    assert some == ["class 0", "class 12", "class 21"]


def test_a_split_is_a_partition_and_always_the_same(tmp_path: Path, target: Path) -> None:
    store = _store(tmp_path, target)
    learnt, held = store.split(0.25, seed=1)
    assert len(held) == 3
    assert sorted([*learnt, *held]) == list(range(12))
    assert store.split(0.25, seed=1) == (learnt, held)
    assert store.split(0.25, seed=2) != (learnt, held)
    assert store.split(0.0, seed=1) == (tuple(range(12)), ())
    assert len(store.split(0.001, seed=1)[1]) == 1
    with pytest.raises(ConfigError, match="expected 0 up to, not with, 1"):
        store.split(1.0, seed=1)


def test_all_answers_to_a_prompt_are_on_one_side_and_texts_stand_alone(
    tmp_path: Path, target: Path
) -> None:
    def piece(number: int, num_prompt: int, first: int) -> FeatureSequence:
        prompt_T = torch.full((num_prompt,), first)
        sequence = _sequence(9, seed=number)
        return dataclasses.replace(
            sequence,
            tokens_T=torch.cat([prompt_T, sequence.tokens_T[num_prompt:]]),
            num_prompt=num_prompt,
        )

    answers = [piece(n, 4, n % 10) for n in range(20)]
    texts = [piece(20 + n, 1, 7) for n in range(10)]
    whole = _store(tmp_path, target)
    entry = write_shard(tmp_path, 0, [*answers, *texts])
    dataclasses.replace(whole.manifest, shards=(entry,)).write(tmp_path)
    for seed in range(5):
        learnt, held = FeatureStore.open(tmp_path, expect=None).split(0.3, seed=seed)
        assert 9 <= len(held) <= 10
        assert sorted([*learnt, *held]) == list(range(30))
        assert {n % 10 for n in learnt if n < 20}.isdisjoint(n % 10 for n in held if n < 20)


def test_features_of_the_target_before_it_was_trained_on_are_refused(
    tmp_path: Path, target: Path
) -> None:
    store = _store(tmp_path, target)
    assert FeatureStore.of_target(tmp_path, target).num_sequences == 12
    dataclasses.replace(store.manifest, weights_sha256="0" * 64).write(tmp_path)
    with pytest.raises(CheckpointError, match="of a target with other weights"):
        FeatureStore.of_target(tmp_path, target)


def test_a_flipped_bit_is_noticed(tmp_path: Path, target: Path) -> None:
    store = _store(tmp_path, target)
    file = tmp_path / store.manifest.shards[1].name
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert len(store.shard(0)) == 4
    with pytest.raises(CheckpointError, match="checksum differs"):
        list(store.sequences())


def test_a_store_without_one_of_its_shards_does_not_open(tmp_path: Path, target: Path) -> None:
    store = _store(tmp_path, target)
    (tmp_path / store.manifest.shards[2].name).unlink()
    with pytest.raises(CheckpointError, match="expected a shard that the manifest names"):
        FeatureStore.open(tmp_path, expect=None)


def test_an_unfinished_store_does_not_open(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [_sequence(9)])
    with pytest.raises(CheckpointError, match=r"found no manifest.*continues there"):
        FeatureStore.open(tmp_path, expect=None)


def test_features_of_another_target_are_refused(tmp_path: Path, target: Path) -> None:
    _store(tmp_path, target)
    other = dataclasses.replace(identity_of(target), sha256="0" * 64, name_or_path="other")
    with pytest.raises(CheckpointError, match=r"expected of 'other'.*collect features"):
        FeatureStore.open(tmp_path, expect=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 9}, "features of version 9"), ({"exits": None}, "expected a complete manifest")],
)
def test_a_manifest_that_says_something_else_is_refused(
    tmp_path: Path, target: Path, change: dict[str, object], message: str
) -> None:
    _store(tmp_path, target)
    file = tmp_path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        FeatureStore.open(tmp_path, expect=None)


def test_a_manifest_reads_as_it_was_written(tmp_path: Path, target: Path) -> None:
    store = _store(tmp_path, target)
    assert FeatureManifest.read(tmp_path) == store.manifest


def test_other_weights_of_the_same_shape_have_another_fingerprint(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    model.save_pretrained(tmp_path / "b")
    model.save_pretrained(tmp_path / "c")
    fingerprints = [weights_fingerprint(tmp_path / name) for name in "abc"]
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]
    with pytest.raises(CheckpointError, match="no safetensors"):
        weights_fingerprint(tmp_path)
