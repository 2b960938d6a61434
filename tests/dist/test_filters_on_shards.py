"""Processes that share a vocabulary filter and choose as one process does."""

from contextlib import ExitStack

import pytest
import torch

from eesd_dist.sampling.rule import choose
from eesd_dist.transport.authentication.key_store import StoreHost
from tests.dist.filter_ranks import filter_as_rank, logits, rules
from tests.dist.transport.peers import peer_process
from tests.unit.sampling.test_filters import filtered_slowly

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("size", [2, 3])
def test_processes_keep_and_choose_what_one_process_does(size: int) -> None:
    host = StoreHost()
    with ExitStack() as peers:
        for rank in range(1, size):
            peers.enter_context(peer_process(filter_as_rank, host.at, rank, size))
        filtered_RV, tokens_S = filter_as_rank(host.at, 0, size)
    rows = [row for row, rule in enumerate(rules()) if rule.params.is_filtered]
    for filtered_V, row in zip(filtered_RV, rows, strict=True):
        assert torch.equal(filtered_V, filtered_slowly(logits()[row], rules()[row]))
    assert tokens_S.tolist() == choose(logits(), rules()).tokens.tolist()
