"""Random models are of every family, load, and have heads that are sometimes right."""

from random import Random

from eesd_dist.bench.fuzz.models import HEAD_KINDS, ModelShelf, random_config
from eesd_dist.model.heads.head_config import HeadConfig


def test_shapes_are_odd_and_of_every_family() -> None:
    configs = [random_config(Random(number)) for number in range(80)]
    families = {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "granite",
        "olmo2",
        "phi3",
    }
    assert {config["model_type"] for config in configs} == families
    assert any(config["vocab_size"] % 2 for config in configs)
    assert any(config["tie_word_embeddings"] for config in configs)
    assert any(config.get("sliding_window") for config in configs)
    assert any(config["num_attention_heads"] != config["num_key_value_heads"] for config in configs)


def test_a_name_makes_the_same_model_again(shelf: ModelShelf) -> None:
    first = shelf.random(8, 0)
    second = ModelShelf(shelf.folder(first.name).parent / "again").random(8, 0)
    assert first == second
    names = ["config.json", "model.safetensors", *(f"heads/{k}/config.json" for k in HEAD_KINDS)]
    other = ModelShelf(shelf.folder(first.name).parent / "again")
    for name in names:
        content = (shelf.folder(first.name) / name).read_bytes()
        assert content == (other.folder(first.name) / name).read_bytes(), name


def test_every_kind_of_head_fits_its_target(shelf: ModelShelf) -> None:
    for number in range(4):
        model = shelf.random(9, number)
        folder = shelf.folder(model.name)
        kinds = [
            HeadConfig.read(folder / head, target=model.spec, target_path=folder).kind
            for head in model.heads
            if head is not None
        ]
        assert kinds == list(HEAD_KINDS)
