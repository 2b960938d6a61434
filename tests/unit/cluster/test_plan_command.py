import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.link_figures import CollectiveFigures, write_links
from cluster.planning.memory import ROWS_OF_PREFILL, USUAL_SHARE
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import CacheConfig, SchedulerConfig
from serve_app.cli.main import main

FIELDS: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 8192,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
RECORDED = Path(__file__).parents[3] / "docs/benchmarks/2026-11-25-plan-2cpu.json"
SPLIT = ["--shape", "llama-3-70b", "--exit-layer", "2", "--verify-tp", "8"]
Output = pytest.CaptureFixture[str]


def _model(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**FIELDS, **changes}))
    return str(folder)


def _refused(words: list[str], output: Output) -> str:
    """Runs the command; returns its one line of error."""
    assert main(["plan", *words]) == 2
    captured = output.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def _shown(words: list[str], output: Output) -> str:
    assert main(["plan", *words]) == 0
    return output.readouterr().out


def test_the_command_prints_a_table_and_a_verdict(tmp_path: Path, capsys: Output) -> None:
    arguments = ["--model", _model(tmp_path), "--verify-tp", "8"]
    assert "speculation pays" in _shown([*arguments, "--exit-layer", "2"], capsys)
    assert "choose 1 to 79" in _refused([*arguments, "--exit-layer", "99"], capsys)


def test_the_json_has_what_the_table_shows(capsys: Output) -> None:
    words = ["--shape", "llama-3-70b", "--exit-layer", "2", "--verify-tp", "8"]
    report = json.loads(_shown([*words, "--json"], capsys))
    table = _shown(words, capsys)
    assert report["verdict"] in table
    assert f"{report['speedup']:.2f}x" in report["verdict"]
    assert [row["num_draft_tokens"] for row in report["lengths"]] == list(range(9))
    best = max(report["lengths"], key=lambda row: row["tokens_per_s"])
    assert best["num_draft_tokens"] == report["num_draft_tokens"]
    assert report["plain"][0]["tokens_per_s"] == report["plain_tokens_per_s"]


def test_without_an_exit_layer_the_best_splits_are_searched(capsys: Output) -> None:
    words = ["--shape", "llama-3-70b", "--nodes", "2", "--requests", "16", "--json"]
    plans = json.loads(_shown(words, capsys))["plans"]
    rates = [plan["tokens_per_s"] for plan in plans]
    assert len(plans) == 5
    assert rates == sorted(rates, reverse=True)
    for plan in plans:
        ranks = plan["draft_tensor_parallel_size"] + plan["verify_tensor_parallel_size"]
        assert plan["num_pipelines"] * ranks <= plan["num_gpus"] == 16


def test_a_search_is_no_worse_than_any_single_split(capsys: Output) -> None:
    words = ["--shape", "llama-3-70b", "--gpus-per-node", "9", "--json"]
    (best, *_) = json.loads(_shown(words, capsys))["plans"]
    single = [*words, "--exit-layer", "1", "--verify-tp", "8"]
    assert best["tokens_per_s"] >= json.loads(_shown(single, capsys))["tokens_per_s"]


def test_acceptance_by_exit_layer_moves_the_search_to_a_deeper_exit(capsys: Output) -> None:
    words = ["--shape", "llama-3-70b", "--json"]
    (flat, *_) = json.loads(_shown([*words, "--acceptance", "0.8"], capsys))["plans"]
    deeper = ["--acceptance-at", "1=0.3", "--acceptance-at", "8=0.9"]
    (steep, *_) = json.loads(_shown([*words, *deeper], capsys))["plans"]
    assert flat["exit_layer"] == 1
    assert 1 < steep["exit_layer"] <= 8
    assert 0.3 < steep["acceptance"] <= 0.9


def test_a_split_is_compared_with_all_gpus_of_its_nodes(capsys: Output) -> None:
    split = ["--shape", "llama-3-70b", "--exit-layer", "4", "--draft-tp", "2", "--verify-tp", "8"]
    words = [*split, "--requests", "16"]
    bought, ten = (
        json.loads(_shown([*words, "--json", *more], capsys))
        for more in ([], ["--gpus-per-node", "10"])
    )
    assert (bought["num_used_gpus"], bought["num_gpus"]) == (10, 16)
    assert bought["plain"][0]["num_replicas"] == 2
    assert bought["tokens_per_s"] == pytest.approx(ten["tokens_per_s"], rel=0.01)
    assert bought["speedup"] < 0.95 * ten["speedup"]
    basis = "the fastest plain decoding on all 16 GPUs of 2 nodes, by 2 replicas of TP 8"
    assert f"{basis} (speculation leaves 6 of them unused)" in bought["verdict"]
    four = json.loads(_shown([*words, "--json", "--nodes", "4"], capsys))
    assert (four["num_pipelines"], four["num_used_gpus"], four["num_gpus"]) == (3, 30, 32)


def test_the_verdict_says_that_the_acceptance_is_assumed(capsys: Output) -> None:
    words = ["--shape", "llama-3-70b", "--verify-tp", "8"]
    plans = {
        layer: json.loads(_shown([*words, "--exit-layer", str(layer), "--json"], capsys))
        for layer in (1, 4, 16)
    }
    assert [plan["acceptance"] for plan in plans.values()] == [0.6, 0.7, 0.8]
    for plan in plans.values():
        assert f"at an assumed acceptance of {plan['acceptance']:.2f}" in plan["verdict"]
    assert "assumed, 0.6 at exit layer 1, 0.7 at exit layer 4" in _shown(SPLIT, capsys)
    assert "assumed, 0.9 at every exit" in _shown([*SPLIT, "--acceptance", "0.9"], capsys)


def test_a_model_that_fits_one_gpu_is_planned_for_it(capsys: Output) -> None:
    words = ["--shape", "llama-3-8b", "--gpus-per-node", "1", "--requests", "8"]
    report = json.loads(_shown([*words, "--json"], capsys))
    assert all(plan["shares_gpu"] for plan in report["plans"])
    (best, *_) = report["plans"]
    assert (best["num_used_gpus"], best["num_gpus"]) == (1, 1)
    assert "the fastest plain decoding on one GPU, by TP 1;" in best["verdict"]
    split = [*words, "--exit-layer", str(best["exit_layer"]), "--shared-gpu", "--json"]
    split += ["--draft-vocab-size", str(best["draft_vocab_size"])]
    assert json.loads(_shown(split, capsys))["tokens_per_s"] == best["tokens_per_s"]


@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-14b"])
def test_small_models_have_shapes(shape: str, capsys: Output) -> None:
    assert "speculation" in _shown(["--shape", shape, "--gpus-per-node", "2"], capsys)


def test_measured_links_replace_those_of_the_preset(tmp_path: Path, capsys: Output) -> None:
    slow = CollectiveFigures(
        operation="all_reduce",
        scope="node",
        num_ranks=8,
        backend="nccl",
        times=((1024, 1e-3), (1 << 20, 2e-3)),
    )
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"links": write_links([slow]), "checks": []}))
    words = ["--shape", "llama-3-70b", "--exit-layer", "2", "--verify-tp", "8", "--json"]
    preset = json.loads(_shown(words, capsys))
    measured = json.loads(_shown([*words, "--links", str(file)], capsys))
    # Two sums of 16 KiB in each of 78 layers, and one of the best tokens.
    expected_s = 156 * 1.0146e-3 + 1e-3
    assert measured["verify_pass_s"] == pytest.approx(expected_s, rel=0.06)
    assert preset["verify_pass_s"] < 0.1 * measured["verify_pass_s"]


def test_a_report_without_links_is_refused(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"links": [], "healthy": True}))
    message = _refused(["--shape", "llama-3-70b", "--links", str(file)], capsys)
    assert "preflight.json: found no measured links: run `eesd preflight --address auto" in message


def test_a_head_that_was_measured_untruncated_is_accepted_less_when_truncated(
    tmp_path: Path, capsys: Output
) -> None:
    """The recorded costs are those of a head with 2,048 of 4,096 tokens."""
    report = json.loads(RECORDED.read_text())
    report["costs"]["model"]["draft_vocab_size"] = 4096
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(report))
    words = ["--model", str(BUNDLED_MODEL), "--on-cpu", "--exit-layer", "1", "--search", "--json"]
    coverage = ["--draft-coverage", "0.99"]
    plans = json.loads(_shown([*words, "--costs", str(file), *coverage], capsys))["plans"]
    by_vocabulary = {plan["draft_vocab_size"]: plan for plan in plans}
    assert set(by_vocabulary) == {None, 1024}
    ratio = by_vocabulary[1024]["acceptance"] / by_vocabulary[None]["acceptance"]
    assert ratio == pytest.approx(0.99)
    assert (
        by_vocabulary[None]["acceptance_is_measured"]
        > by_vocabulary[1024]["acceptance_is_measured"]
    )
    message = _refused([*words, "--costs", str(RECORDED), *coverage], capsys)
    assert "found --draft-coverage 0.99, which would have no effect" in message


def test_keys_and_values_of_ranks_on_cpus_take_the_bytes_of_their_type(capsys: Output) -> None:
    words = ["--model", str(BUNDLED_MODEL), "--on-cpu", "--exit-layer", "1", "--json"]
    by_type = {
        name: json.loads(_shown([*words, *option], capsys))["memory"]
        for name, option in {
            "auto": [],
            "float32": ["--kv-cache-dtype", "float32"],
            "bfloat16": ["--kv-cache-dtype", "bfloat16"],
        }.items()
    }
    assert by_type["auto"] == by_type["float32"]
    for wide, narrow in zip(by_type["float32"], by_type["bfloat16"], strict=True):
        assert wide["kv_bytes"] == 2 * narrow["kv_bytes"] > 0
        assert wide["activation_bytes"] == narrow["activation_bytes"]


def test_the_defaults_of_the_engine_are_those_of_the_forecast() -> None:
    assert CacheConfig().gpu_memory_utilization == USUAL_SHARE
    assert SchedulerConfig().token_budget == ROWS_OF_PREFILL


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "found no model"),
        (["--shape", "llama-3-70b", "--model", "x"], "expected one of them"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--model", str(BUNDLED_MODEL), "--temperature", "0"], "evaluation.json"),
        (["--shape", "llama-3-70b", "--links", "no/such/file"], "JSON of preflight"),
        (["--shape", "llama-3-70b", "--costs", "no/such/file"], "eesd bench costs"),
        (["--shape", "llama-3-70b", "--gpus-per-node", "1"], "no split fits 1 GPUs"),
        (["--shape", "llama-3-70b", "--gpus-per-node", "2"], "no split fits 2 GPUs"),
        ([*SPLIT, "--nodes", "1"], "a pipeline of 9 GPUs on nodes that have 8: raise --nodes"),
        ([*SPLIT, "--shared-gpu", "--fallback"], "would die with the drafting actor"),
        (["--shape", "llama-3-8b", "--draft-vocab-size", "0"], "expected 1 to 128256"),
        (["--shape", "llama-3-8b", "--acceptance", "1.5"], "not a probability"),
        (["--shape", "llama-3-70b", "--exit-layer", "2", "--verify-tp", "3"], "choose one of"),
        (["--shape", "llama-3-70b", "--exit-layer", "2"], "raise --draft-tp or --verify-tp"),
        (["--shape", "llama-3-70b", "--acceptance-at", "90=0.5"], "exit layer from 1 to 79"),
        (["--shape", "llama-3-70b", "--acceptance-at", "what"], "like 4=0.8"),
        (["--shape", "llama-3-70b", "--draft-coverage", "nan"], "draft coverage nan"),
        (["--shape", "llama-3-70b", "--efficiency", "1.5"], "expected a share"),
        (["--shape", "llama-3-70b", "--gpu", "tpu"], "tpu"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], message: str, capsys: Output
) -> None:
    assert message in _refused(words, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-tp", "3", "--verify-tp", "7"], "found --draft-tp 3, which would have no effect"),
        (["--verify-tp", "7"], "a search chooses the ranks of both stages: give --exit-layer"),
        (["--exit-layer", "2", "--search", "--draft-tp", "1"], "give --exit-layer without"),
        (["--shared-gpu"], "found --shared-gpu, which would have no effect"),
        (["--fallback"], "found --fallback, which"),
        ([*SPLIT[2:], "--draft-coverage", "0.9"], "give --draft-vocab-size"),
        ([*SPLIT[2:], "--draft-all-reduce-us", "9"], "raise --draft-tp"),
        (["--costs", str(RECORDED), "--efficiency", "0.5"], "--costs has measured times"),
        (["--acceptance", "0.5", "--acceptance-at", "1=0.5"], "leave one of them out"),
        (["--acceptance", "0.5", "--head", "x"], "replace what was measured"),
        (["--temperature", "0"], "give --model"),
        (["--exit-layer", "1", "--shared-gpu", "--on-cpu"], "--on-cpu has no GPU"),
        (["--kv-cache-dtype", "bfloat16"], "a GPU stores keys and values in the type of the"),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], message: str, capsys: Output
) -> None:
    assert message in _refused(["--shape", "llama-3-70b", *words], capsys)


ODD_NUMBERS = st.one_of(
    st.floats(), st.integers(-(10**30), 10**30), st.sampled_from([0, -0.0, 1e-320, 1e308])
)
FIGURES = (
    "--gpu-memory-gb",
    "--gpu-bandwidth-gbps",
    "--gpu-tflops",
    "--efficiency",
    "--intra-hop-us",
    "--intra-bandwidth-gbps",
    "--inter-hop-us",
    "--inter-bandwidth-gbps",
    "--draft-all-reduce-us",
    "--verify-all-reduce-us",
    "--acceptance",
    "--draft-coverage",
    "--temperature",
)
COUNTS = (
    "--exit-layer",
    "--draft-tp",
    "--verify-tp",
    "--draft-vocab-size",
    "--gpus-per-node",
    "--nodes",
    "--requests",
    "--context",
    "--max-draft-tokens",
)


def _ends_well(words: list[str], output: Output) -> None:
    """Either a forecast, without a figure that is no number, or one line that says what is wrong
    and what was expected."""
    status = main(["plan", *words])
    captured = output.readouterr()
    assert status in (0, 2), captured.err
    if status == 0:
        assert not {"nan", "inf"} & set(captured.out.split())
    else:
        assert captured.out == ""
        assert captured.err.strip()


@QUICK
@given(option=st.sampled_from(FIGURES), value=ODD_NUMBERS, single=st.booleans())
def test_odd_figures_end_in_a_forecast_or_in_an_error(
    option: str, value: float, single: bool, capsys: Output
) -> None:
    split = ["--exit-layer", "2", "--verify-tp", "8"] if single else []
    _ends_well(["--shape", "llama-2-13b", *split, f"{option}={value}"], capsys)


@QUICK
@given(
    option=st.sampled_from(COUNTS),
    value=st.one_of(st.integers(-3, 70), st.integers()),
    data=st.data(),
)
def test_odd_counts_end_in_a_forecast_or_in_an_error(
    option: str, value: int, data: st.DataObject, capsys: Output
) -> None:
    split = data.draw(st.sampled_from([["--exit-layer", "2"], []]))
    _ends_well(["--shape", "llama-2-13b", *split, f"{option}={value}"], capsys)


@QUICK
@given(
    field=st.sampled_from([*FIELDS, "head_dim", "max_position_embeddings", "torch_dtype"]),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=5),
        st.floats(),
        st.integers(),
        st.integers(-2, 130),
        st.lists(st.integers(), max_size=2),
    ),
)
def test_an_odd_field_of_a_config_ends_in_a_forecast_or_in_an_error(
    field: str, value: object, tmp_path: Path, capsys: Output
) -> None:
    model = _model(tmp_path, **{field: value})
    _ends_well(["--model", model, "--exit-layer", "2", "--verify-tp", "4"], capsys)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b'"text"']
)
def test_a_file_that_is_no_config_is_refused(
    content: bytes, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert "config.json" in _refused(["--model", str(tmp_path)], capsys)
    for option in ("--links", "--costs"):
        words = ["--shape", "llama-2-13b", option, str(file)]
        assert "config.json" in _refused(words, capsys)
