"""Pipeline in processes of this machine, over links: the drafting process and its verify ranks.

The processes run the functions of a served pipeline, without Ray.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eesd_dist.config import EngineConfig
from eesd_dist.control.cost import NOMINAL_COST
from eesd_dist.engine.build import build_draft_engine, load_verify_weights
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.verify import follow_rounds, serve_rounds
from eesd_dist.errors import ConfigError, PeerLost
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.channel import DistRoundSource, DistVerifyChannel
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.rendezvous import build_group, connect_store

_JOIN_S = 120.0
"""Includes loading and packing the weights."""


@contextmanager
def running_pipeline(config: EngineConfig) -> Iterator[EngineCore]:
    """Starts the verify ranks and yields the engine of this process, which drafts.

    Sets the number of threads of this process to `config.parallel.num_threads`. Raises ConfigError
    for a draft stage of several ranks.
    """
    num_draft_ranks = config.parallel.draft_tensor_parallel_size
    if num_draft_ranks != 1:
        raise ConfigError(f"found {num_draft_ranks} draft ranks, expected 1: this process drafts")
    torch.set_num_threads(config.parallel.num_threads)
    host = StoreHost()
    spawned = multiprocessing.get_context("spawn")
    ranks = [
        spawned.Process(target=run_verify_rank, args=(config, host.at, rank), daemon=True)
        for rank in range(config.parallel.verify_tensor_parallel_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        engine = build_draft_engine(
            config,
            DistVerifyChannel(_rounds_group(config, host.at, rank=0)),
            cost=NOMINAL_COST,
        )
        yield engine
        engine.close()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def run_verify_rank(config: EngineConfig, store: Address, rank: int) -> None:
    """Runs one verify rank until the drafting process closes its channel or is lost."""
    parallel = config.parallel
    torch.set_num_threads(parallel.num_threads)
    size = parallel.verify_tensor_parallel_size
    group = _verify_group(config, store, rank=rank) if size > 1 else SingleGroup()
    assert config.cache.num_pages is not None, "all ranks have the same number of pages"
    stage = load_verify_weights(config, group).stage(num_pages=config.cache.num_pages)
    try:
        if rank == 0:
            serve_rounds(stage, DistRoundSource(_rounds_group(config, store, rank=1)))
        else:
            follow_rounds(stage)
    except PeerLost:
        return


def _rounds_group(config: EngineConfig, store: Address, *, rank: int) -> ProcessGroup:
    members = ("draft rank 0", "verify rank 0")
    return _group(config, store, name="rounds", rank=rank, members=members)


def _verify_group(config: EngineConfig, store: Address, *, rank: int) -> ProcessGroup:
    members = tuple(
        f"verify rank {peer}" for peer in range(config.parallel.verify_tensor_parallel_size)
    )
    return _group(config, store, name="verify", rank=rank, members=members)


def _group(
    config: EngineConfig, store: Address, *, name: str, rank: int, members: tuple[str, ...]
) -> ProcessGroup:
    return build_group(
        connect_store(store, timeout_s=_JOIN_S),
        epoch=0,
        name=name,
        rank=rank,
        size=len(members),
        timeout_s=config.parallel.timeout_s,
        join_timeout_s=_JOIN_S,
        members=members,
        in_memory=name == "verify",
    )
