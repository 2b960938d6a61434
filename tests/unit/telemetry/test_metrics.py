"""Metrics: the names that dashboards use, and counts that agree with the rounds."""

from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.telemetry.metrics import RequestTimings, ServiceMetrics
from eesd_dist.types import FinishReason, Traffic
from tests.unit.telemetry.rounds import a_round

NAMES = {
    "eesd_num_requests_running",
    "eesd_num_requests_waiting",
    "eesd_kv_cache_usage_perc",
    "eesd_prompt_tokens_total",
    "eesd_generation_tokens_total",
    "eesd_request_success_total",
    "eesd_time_to_first_token_seconds_bucket",
    "eesd_inter_token_latency_seconds_bucket",
    "eesd_e2e_request_latency_seconds_bucket",
    "eesd_request_queue_time_seconds_bucket",
    "eesd_spec_decode_num_drafts_total",
    "eesd_spec_decode_num_draft_tokens_total",
    "eesd_spec_decode_num_accepted_tokens_total",
    "eesd_spec_decode_num_lookup_draft_tokens_total",
    "eesd_spec_decode_num_lookup_accepted_tokens_total",
    "eesd_spec_decode_num_requests_by_drafter_total",
    "eesd_spec_decode_num_accepted_tokens_per_pos_total",
    "eesd_spec_decode_num_draft_tokens_per_pos_total",
    "eesd_num_preemptions_total",
    "eesd_prefix_cache_queries_total",
    "eesd_prefix_cache_hits_total",
    "eesd_round_stage_seconds_bucket",
    "eesd_hop_bytes_total",
    "eesd_hop_seconds_total",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(metrics: ServiceMetrics) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(page: Samples, name: str, **labels: str) -> float:
    return page[(name, frozenset({"model_name": "demo", **labels}.items()))]


def test_every_name_is_there_and_carries_the_model() -> None:
    metrics = ServiceMetrics(model_name="demo")
    metrics.observe_round(a_round())
    page = samples(metrics)
    assert {name for name, _ in page} >= NAMES
    assert all(("model_name", "demo") in labels for _, labels in page)


def test_totals_that_begin_again_with_an_engine_go_on() -> None:
    metrics = ServiceMetrics(model_name="demo")
    for total in (3, 5, 5, 2):
        metrics.observe_totals(
            num_preemptions=total, num_prompt_tokens=10 * total, num_cached_tokens=total
        )
    page = samples(metrics)
    assert value(page, "eesd_num_preemptions_total") == 7
    assert value(page, "eesd_prefix_cache_queries_total") == 70
    assert value(page, "eesd_prefix_cache_hits_total") == 7


def test_rounds_add_up() -> None:
    metrics = ServiceMetrics(model_name="demo")
    metrics.observe_round(a_round())
    metrics.observe_round(a_round())
    page = samples(metrics)
    assert value(page, "eesd_generation_tokens_total") == 12
    assert value(page, "eesd_spec_decode_num_drafts_total") == 4
    assert value(page, "eesd_spec_decode_num_draft_tokens_total") == 14
    assert value(page, "eesd_spec_decode_num_accepted_tokens_total") == 8
    assert value(page, "eesd_spec_decode_num_lookup_draft_tokens_total") == 6
    assert value(page, "eesd_spec_decode_num_lookup_accepted_tokens_total") == 2
    of = "eesd_spec_decode_num_requests_by_drafter_total"
    assert value(page, of, drafter="compiled", reason="") == 6
    assert value(page, of, drafter="levels", reason="grammar") == 2
    by_position = [
        value(page, "eesd_spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
        for i in range(4)
    ]
    assert by_position == [4, 2, 2, 0]
    assert sum(by_position) == value(page, "eesd_spec_decode_num_accepted_tokens_total")
    assert value(page, "eesd_round_stage_seconds_count", stage="verify") == 2
    assert abs(value(page, "eesd_round_stage_seconds_sum", stage="verify") - 0.04) < 1e-9


def test_bytes_and_seconds_of_each_hop_add_up() -> None:
    metrics = ServiceMetrics(model_name="demo")
    before = samples(metrics)
    assert value(before, "eesd_hop_bytes_total", hop="verify_group", direction="sent") == 0
    for _ in range(2):
        metrics.observe_round(a_round())
    page = samples(metrics)
    bytes_by_hop = {
        (labels["hop"], labels["direction"]): amount
        for (name, pairs), amount in page.items()
        if name == "eesd_hop_bytes_total"
        for labels in [dict(pairs)]
    }
    assert bytes_by_hop == {
        ("draft_to_verify", "sent"): 8192,
        ("verify_to_draft", "received"): 2048,
        ("verify_group", "sent"): 600,
        ("verify_group", "received"): 400,
        ("draft_group", "sent"): 60,
        ("draft_group", "received"): 40,
    }
    for hop, seconds in (
        ("draft_to_verify", 0.004),
        ("verify_group", 0.008),
        ("draft_group", 6e-3),
    ):
        assert abs(value(page, "eesd_hop_seconds_total", hop=hop) - seconds) < 1e-9


def test_a_groups_counts_of_a_new_epoch_are_taken_as_they_are() -> None:
    old = Traffic(sent_bytes=900, received_bytes=90, wait_s=9.0)
    new = Traffic(sent_bytes=950, received_bytes=95, wait_s=9.5)
    new_engine = Traffic(sent_bytes=10, received_bytes=1, wait_s=0.1)
    assert new.since(old) == Traffic(sent_bytes=50, received_bytes=5, wait_s=0.5)
    assert new_engine.since(old) == new_engine


def test_a_plain_round_is_no_draft() -> None:
    metrics = ServiceMetrics(model_name="demo")
    metrics.observe_round(
        a_round(num_drafted=0, num_accepted=0, drafted_by_position=(), accepted_by_position=())
    )
    assert value(samples(metrics), "eesd_spec_decode_num_drafts_total") == 0


def test_a_request_is_counted_by_how_it_ended() -> None:
    metrics = ServiceMetrics(model_name="demo")
    assert value(samples(metrics), "eesd_request_success_total", finished_reason="stop") == 0
    metrics.observe_request(
        RequestTimings(
            num_prompt_tokens=11,
            finish_reason=FinishReason.STOP,
            queue_s=0.01,
            e2e_s=0.5,
            time_to_first_token_s=0.05,
            inter_token_s=(0.01, 0.02),
        )
    )
    metrics.observe_request(
        RequestTimings(
            num_prompt_tokens=3, finish_reason=FinishReason.ABORT, queue_s=0.01, e2e_s=0.02
        )
    )
    page = samples(metrics)
    assert value(page, "eesd_request_success_total", finished_reason="stop") == 1
    assert value(page, "eesd_request_success_total", finished_reason="abort") == 1
    assert value(page, "eesd_prompt_tokens_total") == 14
    assert value(page, "eesd_time_to_first_token_seconds_count") == 1
    assert value(page, "eesd_inter_token_latency_seconds_count") == 2


def test_load_is_what_was_said_last() -> None:
    metrics = ServiceMetrics(model_name="demo")
    metrics.observe_load(num_running=3, num_waiting=2, kv_usage=0.25)
    metrics.observe_load(num_running=1, num_waiting=0, kv_usage=0.5)
    page = samples(metrics)
    assert value(page, "eesd_num_requests_running") == 1
    assert value(page, "eesd_num_requests_waiting") == 0
    assert value(page, "eesd_kv_cache_usage_perc") == 0.5


def test_two_services_in_one_process_do_not_mix() -> None:
    first, second = ServiceMetrics(model_name="demo"), ServiceMetrics(model_name="demo")
    first.observe_round(a_round())
    assert value(samples(second), "eesd_generation_tokens_total") == 0


def test_refused_connections_are_counted_from_totals() -> None:
    metrics = ServiceMetrics(model_name="demo")
    for total in (0, 3, 3, 8):
        metrics.observe_refused(total)
    assert value(samples(metrics), "eesd_refused_connections_total") == 8
