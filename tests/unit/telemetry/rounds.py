"""Rounds as an engine reports them."""

from dataclasses import replace
from typing import Any

from eesd_dist.types import DrafterUse, RequestId, RoundStats, Traffic

_ROUND = RoundStats(
    round_id=7,
    microbatch=0,
    num_requests=2,
    num_rows=9,
    num_prefill_rows=0,
    num_drafted=7,
    num_accepted=4,
    num_emitted=6,
    plan_s=0.001,
    draft_s=0.010,
    transfer_s=0.002,
    verify_s=0.020,
    commit_s=0.001,
    started_unix_s=1_700_000_000.0,
    elapsed_s=0.040,
    num_lookup_drafted=3,
    num_lookup_accepted=1,
    sent_bytes=4096,
    received_bytes=1024,
    verify_group=Traffic(sent_bytes=300, received_bytes=200, wait_s=0.004),
    draft_group=Traffic(sent_bytes=30, received_bytes=20, wait_s=0.003),
    request_ids=(RequestId("a"), RequestId("b")),
    drafted_by_position=(2, 2, 2, 1),
    accepted_by_position=(2, 1, 1, 0),
    drafters=((DrafterUse("compiled", ""), 3), (DrafterUse("levels", "grammar"), 1)),
)


def a_round(**changes: Any) -> RoundStats:
    return replace(_ROUND, **changes)
