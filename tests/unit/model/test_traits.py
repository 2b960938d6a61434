"""Each trait of a family, on a toy family, compared with plain arithmetic."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from eesd_dist.config import Numerics
from eesd_dist.errors import CheckpointError
from eesd_dist.model import families
from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.elementwise import GELU_TANH, soft_capped, soft_capped_rows
from eesd_dist.model.families.family import Family, Norms, Scores, Traits
from eesd_dist.model.families.windows import window_in_every_other_layer
from eesd_dist.model.heads.head_config import single_layer_config
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.layers.norms import HeadNorm, RmsNorm
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import TensorGroup
from tests.support.thread_ranks import on_ranks
from tests.unit.model.paged_stages import Stages

WIDTH, HEADS, KV_HEADS, HEAD_DIM, CHANNELS, VOCAB, LAYERS = 32, 4, 2, 8, 48, 50, 3
NUM_TOKENS = 61
FOUR_NORMS = Norms(after_attention="after_attention", before_mlp="before_mlp", after_mlp="last")
TWO_NORMS_AFTER = Norms(
    before_attention=None, after_attention="after_attention", before_mlp=None, after_mlp="last"
)
TOYS: Mapping[str, Traits] = {
    "none": Traits(),
    "norms after attention and MLP": Traits(norms=FOUR_NORMS),
    "norm weights from 1": Traits(norms=Norms(weight_offset=1.0)),
    "GELU": Traits(activation=GELU_TANH),
    "scale of scores": Traits(scores=Scores(scale=0.11)),
    "capped scores": Traits(scores=Scores(softcap=0.5)),
    "scaled and capped scores": Traits(scores=Scores(scale=0.9, softcap=1.3)),
    "scaled embedding": Traits(embedding_scale=2.5),
    "capped logits": Traits(logit_softcap=1.5),
    "norms of heads": Traits(qk_norm=True),
    "norms of heads from 1": Traits(qk_norm=True, norms=Norms(weight_offset=1.0)),
    "one norm for all heads": Traits(qk_norm=True, joint_qk_norm=True),
    "norms after attention and MLP only": Traits(norms=TWO_NORMS_AFTER),
    "scaled residuals": Traits(residual_scale=0.3),
    "scaled norms after attention and MLP": Traits(norms=FOUR_NORMS, residual_scale=0.3),
    "scaled logits": Traits(logits_scale=0.3),
    "scaled and capped logits": Traits(logits_scale=1.7, logit_softcap=1.5),
}


def register(traits: Traits, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(model_types=("toy",), traits=lambda fields: traits)
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "ToyForCausalLM": family})


def write(folder: Path, traits: Traits) -> dict[str, Tensor]:
    """Writes a random checkpoint of the toy family in three layers; no norm is one."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(width: int = WIDTH) -> Tensor:  # weights that are added to 1 stay about as large
        return torch.rand(width, generator=generator) + 0.5 - traits.norms.weight_offset

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, WIDTH),
        "lm_head.weight": normal(VOCAB, WIDTH),
        "model.norm.weight": norm(),
    }
    for at in range(LAYERS):
        layer = {
            "self_attn.q_proj": normal(HEADS * HEAD_DIM, WIDTH) * 2.0,
            "self_attn.k_proj": normal(KV_HEADS * HEAD_DIM, WIDTH) * 2.0,
            "self_attn.v_proj": normal(KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": normal(WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj": normal(CHANNELS, WIDTH),
            "mlp.up_proj": normal(CHANNELS, WIDTH),
            "mlp.down_proj": normal(WIDTH, CHANNELS),
        }
        layer |= {name: norm() for name in traits.norms.names().values()}
        if traits.qk_norm:
            counts = (HEADS, KV_HEADS) if traits.joint_qk_norm else (1, 1)
            for name, count in zip("qk", counts, strict=True):
                layer[f"self_attn.{name}_norm"] = norm(count * HEAD_DIM)
        tensors |= {f"model.layers.{at}.{name}.weight": x for name, x in layer.items()}
    config = {
        "architectures": ["ToyForCausalLM"],
        "model_type": "toy",
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": CHANNELS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "hidden_act": traits.activation.name,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def plain_logits(traits: Traits, tensors: Mapping[str, Tensor], tokens_T: Tensor) -> Tensor:
    """Computes the model again in float64, without sharing, caching or fusing."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    norms = traits.norms

    def normed(x: Tensor, name: str | None) -> Tensor:
        if name is None:
            return x
        unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return unit * (wide[f"{name}.weight"] + norms.weight_offset)

    x_TD = wide["model.embed_tokens.weight"][tokens_T] * traits.embedding_scale
    for at in range(LAYERS):
        prefix = f"model.layers.{at}."

        def product(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            return x @ wide[f"{prefix}{name}.weight"].T

        def named(name: str | None, prefix: str = prefix) -> str | None:
            return None if name is None else prefix + name

        def heads(x: Tensor) -> Tensor:
            return x.reshape(len(tokens_T), -1, HEAD_DIM)

        y_TD = normed(x_TD, named(norms.before_attention))
        q, k, v = (heads(product(y_TD, f"self_attn.{name}_proj")) for name in "qkv")
        if traits.qk_norm:
            start = 1 if traits.joint_qk_norm else 2
            q, k = (
                heads(normed(x.flatten(start), f"{prefix}self_attn.{name}_norm"))
                for x, name in ((q, "q"), (k, "k"))
            )
        mixed = attended(traits.scores, rotated(q), rotated(k), v)
        update = product(mixed, "self_attn.o_proj")
        update = normed(update, named(norms.after_attention))
        x_TD = x_TD + update * traits.residual_scale
        y_TD = normed(x_TD, named(norms.before_mlp))
        gate = product(y_TD, "mlp.gate_proj")
        is_gelu = traits.activation is GELU_TANH
        acted = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        update = product(acted * product(y_TD, "mlp.up_proj"), "mlp.down_proj")
        update = normed(update, named(norms.after_mlp))
        x_TD = x_TD + update * traits.residual_scale
    logits_TV = normed(x_TD, "model.norm") @ wide["lm_head.weight"].T * traits.logits_scale
    return capped(logits_TV, traits.logit_softcap).float()


def capped(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else limit * torch.tanh(x / limit)


def rotated(heads_THE: Tensor) -> Tensor:
    """Rotates heads to their positions; channel e is paired with e + E/2."""
    inverse = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = (torch.arange(len(heads_THE)).double()[:, None] * inverse)[:, None, :]
    first, second = heads_THE.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(scores: Scores, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
    scale = HEAD_DIM**-0.5 if scores.scale is None else scores.scale
    rows = []
    for row, q_HE in enumerate(q_THE):
        heads = []
        for head, q_E in enumerate(q_HE):
            kv = head // (HEADS // KV_HEADS)
            scores_N = capped(k_TKE[: row + 1, kv] @ q_E * scale, scores.softcap)
            heads.append(scores_N.softmax(0) @ v_TKE[: row + 1, kv])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("name", TOYS)
def test_a_trait_changes_the_model_as_its_arithmetic_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, numerics: Numerics
) -> None:
    traits = TOYS[name]
    register(traits, monkeypatch)
    tensors = write(tmp_path, traits)
    expected_TV = plain_logits(traits, tensors, tokens())
    stages = Stages.load(tmp_path, numerics=numerics)
    chunked_TV = stages.run_in_chunks(tokens(), pages=(7, 3, 4, 11), chunks=[30, 1, 7, 23])
    whole_TV = stages.run_without_pages(tokens()[None])[0]
    for logits_TV in (chunked_TV, whole_TV):  # against float64
        assert float((logits_TV - expected_TV).abs().max()) <= 1e-4
    norms = traits.norms
    names = Norms(before_attention=norms.before_attention, before_mlp=norms.before_mlp)
    without_TV = plain_logits(Traits(norms=names), tensors, tokens())
    assert (float((without_TV - expected_TV).abs().max()) > 0.05) == (name != "none")


@pytest.mark.parametrize("name", TOYS)
def test_a_row_of_any_family_has_the_same_bits_alone_and_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    register(TOYS[name], monkeypatch)
    write(tmp_path, TOYS[name])
    stages = Stages.load(tmp_path)
    single_TV = stages.run_in_chunks(tokens(), pages=range(4), chunks=[1] * NUM_TOKENS)
    for chunks in ([NUM_TOKENS], [17, 33, 11], [2, 5, 3, 40, 11]):
        logits_TV = stages.run_in_chunks(tokens(), pages=(9, 30, 2, 14), chunks=chunks)
        assert torch.equal(logits_TV, single_TV), chunks


@pytest.mark.parametrize(
    "name", ["norms after attention and MLP", "capped logits", "scaled residuals"]
)
def test_two_ranks_norm_scale_and_cap_what_is_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    traits = TOYS[name]
    register(traits, monkeypatch)
    expected_TV = plain_logits(traits, write(tmp_path, traits), tokens())

    def rank(group: TensorGroup) -> Tensor:
        stages = Stages.load(tmp_path, group=group)
        return stages.run_in_chunks(tokens(), pages=range(4), chunks=[40, 1, 20])

    logits_TV = torch.cat(on_ranks(2, rank), dim=1)
    assert float((logits_TV - expected_TV).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", TOYS)
def test_an_exit_head_has_the_traits_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    traits = TOYS[name]
    register(traits, monkeypatch)
    tensors = write(tmp_path, traits)
    spec = ModelSpec.from_folder(tmp_path)
    head = TrainableExitHead.from_target(tmp_path, spec, LAYERS - 1, head="own")
    span = Stages.load(tmp_path, cut=LAYERS - 1).draft
    hidden_1TD = span.forward_full(span.embed(tokens()[None]))
    logits_TV = head.training_forward(hidden_1TD)[0]
    expected_TV = plain_logits(traits, tensors, tokens())
    assert float((logits_TV.detach() - expected_TV).abs().max()) <= 1e-4
    logits_TV.logsumexp(-1).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
    stored = head.layer.checkpoint_tensors(f"model.layers.{LAYERS - 1}.")
    assert {x for x in tensors if f".{LAYERS - 1}." in x} == set(stored)
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)


def test_a_norm_adds_its_offset_in_float32() -> None:
    # 1 + 2^-9 is not representable in bfloat16.
    weight_D = torch.full((8,), 2.0**-9, dtype=torch.bfloat16)
    x_TD = torch.ones(1, 8)
    normed_TD = RmsNorm(weight_D, eps=0.0, dtype=torch.float32, offset=1.0)(x_TD)
    torch.testing.assert_close(normed_TD, torch.full((1, 8), 1.0 + 2.0**-9), rtol=1e-6, atol=0.0)


def test_a_norm_of_heads_adds_its_offset_in_float32() -> None:
    weight_HE = torch.full((2, 8), 2.0**-9, dtype=torch.bfloat16)
    heads_THE = torch.ones(1, 2, 8, dtype=torch.bfloat16)
    norm = HeadNorm(weight_HE, eps=0.0, dtype=torch.bfloat16, offset=1.0)
    assert torch.equal(norm.weight_HE, torch.full((2, 8), 1.0 + 2.0**-9))
    assert torch.equal(norm(heads_THE), heads_THE)  # rounded once, at the end


def test_a_soft_cap_leaves_small_numbers_and_bounds_large_ones() -> None:
    x = torch.tensor([-1e6, -0.01, 0.0, 0.01, 1e6])
    bounded = soft_capped(x, 30.0)
    torch.testing.assert_close(bounded[1:4], x[1:4], rtol=1e-5, atol=0.0)
    assert bounded[[0, 4]].tolist() == [-30.0, 30.0]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("width", [37, 5_001])
def test_a_row_of_capped_logits_has_the_same_bits_among_any_number(
    num_threads: int, width: int
) -> None:
    x_TV = torch.randn(9, width, generator=torch.Generator().manual_seed(1)) * 20
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        batch_TV = soft_capped_rows(x_TV, 30.0)
        for at in range(9):
            assert torch.equal(soft_capped_rows(x_TV[at : at + 1], 30.0)[0], batch_TV[at])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(batch_TV, soft_capped(x_TV, 30.0))
    assert soft_capped_rows(x_TV[:0], 30.0).shape == (0, width)


@pytest.mark.parametrize(
    ("config", "cap"),
    [({}, 50.0), ({"cap": None}, None), ({"cap": 8}, 8.0), ({"cap": 0.5}, 0.5)],
)
def test_a_cap_is_the_family_s_own_unless_the_file_says_a_number_or_null(
    config: dict[str, object], cap: float | None
) -> None:
    fields = ConfigFields(config, file=Path("config.json"), defaults={"cap": 50.0})
    assert fields.positive_or_null("cap") == cap
    assert fields.positive("cap") == (50.0 if cap is None else cap)


@pytest.mark.parametrize("value", [0, -1.0, "30", True, [30.0], float("nan"), float("inf")])
def test_a_cap_that_is_no_positive_number_is_refused(value: object) -> None:
    fields = ConfigFields({"cap": value}, file=Path("config.json"), defaults={})
    with pytest.raises(CheckpointError, match=r"config\.json: found cap = .*expected a positive"):
        fields.positive_or_null("cap")


def windows_of(**config: object) -> tuple[int | None, ...]:
    fields = ConfigFields(config, file=Path("config.json"), defaults={"sliding_window": 9})
    return window_in_every_other_layer(fields, 3)


def test_every_other_layer_has_a_window_unless_layer_types_say_otherwise() -> None:
    full = ["full_attention"] * 3
    assert windows_of() == (9, None, 9)
    assert windows_of(sliding_window=5) == (5, None, 5)
    assert windows_of(layer_types=["full_attention", *["sliding_attention"] * 2]) == (None, 9, 9)
    assert windows_of(layer_types=full, sliding_window=None) == (None,) * 3
    with pytest.raises(CheckpointError, match=r"sliding_window = None, expected a window"):
        windows_of(sliding_window=None)


@pytest.mark.parametrize(
    ("config", "layer_types"),
    [
        ({"max_window_layers": 2}, ["sliding_attention"]),
        ({"max_window_layers": 4}, None),
        ({"max_window_layers": 0}, None),
        ({"layer_types": ["sliding_attention", *["attention"] * 3]}, ["full_attention"]),
        ({"layer_types": ["full_attention"] * 4}, ["full_attention"]),
    ],
)
def test_a_head_names_the_type_of_its_layer_where_the_target_s_layers_differ(
    config: dict[str, object], layer_types: object
) -> None:
    whole = {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        **config,
    }
    target = ModelSpec.from_config(whole, file=Path("config.json"))
    single = single_layer_config(whole, target)
    assert single.get("layer_types") == layer_types
    layer = ModelSpec.from_config(single, file=Path("config.json"))
    assert layer.sliding_windows == target.sliding_windows[-1:]
