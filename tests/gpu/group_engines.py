"""Engines with groups of processes as stages, and passes of Llama 70B's shape over two ranks."""

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd_dist.backends.cuda.graphs import Graph
from eesd_dist.backends.cuda.layers import CudaLayers
from eesd_dist.config import EngineConfig
from eesd_dist.control.cost import NOMINAL_COST
from eesd_dist.engine.build import (
    build_draft_engine,
    build_draft_shard,
    build_verify_stage,
    head_shelf,
    layout_of,
)
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.drafting.ranks import follow_commands
from eesd_dist.engine.local import LocalEngine
from eesd_dist.engine.verify import follow_rounds, serve_rounds
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.model.layers.layer import DecoderLayer, LayerWeights
from eesd_dist.model.layers.paged_layers import PagedLayers
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rope import rotation_tables
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.channel import DistRoundSource, DistVerifyChannel
from eesd_dist.transport.command_stream import DistCommandSink, DistCommandSource
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import OntoDevice, ThroughHost
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from tests.gpu.ranks import Figures

_TIMEOUT_S = 90.0
"""Deadline of waits between ranks that compile kernels."""
_JOIN_S = 120.0
_EPOCH = 1
_PAGE_SIZE = 32
_NUM_PASSES = 9


class Replays:
    """Counts the replays of this process's graphs."""

    def __init__(self) -> None:
        self.number = 0
        replay = Graph.replay

        def counted(graph: Graph[Any], operation: str = "") -> Any:
            self.number += 1
            return replay(graph, operation)

        Graph.replay = counted  # type: ignore[method-assign]


def run_engine(
    group: ProcessGroup,
    device: torch.device,
    *,
    config: EngineConfig,
    at: Address,
    num_requests: int,
    num_tokens: int,
    num_nodes: int = 1,
) -> Figures:
    """Runs a rank of an engine: the draft ranks first, then the verify ranks, on so many nodes.
    Draft rank 0 compares its texts, drafted and plain, with each other, and counts those of one
    process that differ."""
    replays = Replays()
    num_draft = config.parallel.draft_tensor_parallel_size
    num_verify = config.parallel.verify_tensor_parallel_size
    is_drafting = group.rank < num_draft
    rank = group.rank if is_drafting else group.rank - num_draft

    def joined(name: str, rank: int, size: int, over: torch.device | str) -> ProcessGroup:
        return build_group(
            connect_store(at, timeout_s=_JOIN_S),
            epoch=_EPOCH,
            name=name,
            rank=rank,
            size=size,
            timeout_s=_TIMEOUT_S,
            join_timeout_s=_JOIN_S,
            address=f"127.0.0.{1 + rank * num_nodes // size if name == 'verify' else 1}",
            device=over,
        )

    size = num_draft if is_drafting else num_verify
    name = "draft" if is_drafting else "verify"
    stage_group = joined(name, rank, size, device) if size > 1 else None
    rounds = joined("rounds", int(not is_drafting), 2, "cpu") if rank == 0 else None
    if is_drafting and rounds is not None:
        figures = _lead(
            config,
            ThroughHost(DistVerifyChannel(rounds)),
            stage_group,
            num_requests=num_requests,
            num_tokens=num_tokens,
        )
    elif is_drafting:
        assert stage_group is not None
        layout = layout_of(config)
        shard = build_draft_shard(config, layout, stage_group)
        shard.begin()
        source = DistCommandSource(stage_group)
        follow_commands(shard, source, heads=head_shelf(config, layout, stage_group))
        figures = {}
    else:
        stage = build_verify_stage(config, stage_group or SingleGroup())
        if rounds is not None:
            serve_rounds(stage, OntoDevice(DistRoundSource(rounds), device))
        else:
            follow_rounds(stage)
        figures = {}
    if stage_group is not None:
        stage_group.check()
        sums = stage_group.counts().by_kind["all_reduce"].number
        plane = stage_group._nccl
        in_memory = plane is not None and plane._symmetric is not None
        figures |= {"sums": sums, "in memory": in_memory}
    return figures | {"replays": replays.number}


def _lead(
    config: EngineConfig,
    channel: ThroughHost,
    group: ProcessGroup | None,
    *,
    num_requests: int,
    num_tokens: int,
) -> Figures:
    engine = build_draft_engine(
        config,
        channel,
        epoch=_EPOCH,
        cost=NOMINAL_COST,
        group=group,
        commands=None if group is None else DistCommandSink(group),
    )
    make = partial(_requests, config.model.path, num=num_requests, num_tokens=num_tokens)
    started_s = time.perf_counter()
    plain, _ = _texts(engine, make("off"))
    drafted, num_accepted = _texts(engine, make("auto"))
    took_s = time.perf_counter() - started_s
    engine.close()
    assert drafted == plain, "drafting changes a text"
    assert num_accepted > 0
    parallel = config.parallel.model_copy(
        update={"draft_tensor_parallel_size": 1, "verify_tensor_parallel_size": 1}
    )
    single = LocalEngine(config.model_copy(update={"parallel": parallel}))
    other, _ = _texts(single.engine, make("auto"))
    single.close()
    return {
        "tokens": 2 * sum(len(text) for text in plain),
        "accepted drafts": num_accepted,
        "texts": len(plain),
        "texts unlike one process's": sum(a != b for a, b in zip(plain, other, strict=True)),
        "s": round(took_s, 1),
    }


def _texts(engine: EngineCore, requests: list[Request]) -> tuple[list[list[TokenId]], int]:
    """Returns the text of each request, and the number of drafted tokens that were accepted."""
    texts: dict[RequestId, list[TokenId]] = {request.request_id: [] for request in requests}
    num_accepted = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        for emission in result.emissions:
            texts[emission.request_id].extend(emission.tokens)
            num_accepted += emission.num_accepted
    return list(texts.values()), num_accepted


def _requests(folder: Path, mode: str, *, num: int, num_tokens: int) -> list[Request]:
    """Returns greedy and sampled requests with prompts of several lengths."""
    vocab_size = ModelSpec.from_folder(folder).vocab_size
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            request_id=RequestId(f"{mode}-{at}"),
            prompt=tuple(
                TokenId(token)
                for token in torch.randint(3, vocab_size, (4 + at,), generator=generator).tolist()
            ),
            sampling=SamplingParams(temperature=(0.0, 0.7)[at % 2], seed=at, max_tokens=num_tokens),
            speculation=SpeculationParams(mode="off" if mode == "off" else "auto"),
        )
        for at in range(num)
    ]


@torch.inference_mode()
def time_70b_pass(
    group: ProcessGroup, device: torch.device, *, num_layers: int, num_stored: int, divisor: int
) -> Figures:
    """Returns milliseconds of a verify pass over layers of one eighth of Llama 70B's width, with
    sums over the ranks and without, as graphs and kernel by kernel. `num_stored` layers stand for
    all, since weights take memory; `divisor` makes the layers narrower."""
    spec = _spec_of_70b(num_stored=num_stored, divisor=divisor)
    layers = _layers_of_70b(spec, device)
    figures: Figures = {}
    groups: dict[str, TensorGroup] = {
        "sums, graph": group,
        "no sums, graph": SingleGroup(),
        "sums, kernels": group,
    }
    stacks = {
        name: _paged(spec, layers, summing, num_layers, device=device)
        for name, summing in groups.items()
    }
    for paged in stacks.values():
        paged.begin()  # keys that no pass has written are read
    if isinstance(eager := stacks["sums, kernels"].fused, CudaLayers):
        eager._graphs._epoch, eager._graphs.has_room = group.epoch, False
    expected: dict[int, Tensor] = {}
    for name, paged in stacks.items():
        for num_requests, num_rows in ((1, 5), (8, 5), (64, 5)):
            generator = torch.Generator(device).manual_seed(num_requests)
            x_TD = torch.randn(
                num_requests * num_rows, 8192 // divisor, device=device, generator=generator
            )
            segments = [
                RowSegment(256, num_rows, PageTable(range(10 * at, 10 * at + 10)))
                for at in range(num_requests)
            ]
            queued_ms, all_ms, out_TD = _timed(paged, x_TD, segments, group, device)
            if name != "no sums, graph":
                earlier_TD = expected.setdefault(num_requests, out_TD)
                assert torch.equal(out_TD, earlier_TD), "a replay has other bits"
            figures[f"{name}, {num_requests} x {num_rows}"] = (queued_ms, all_ms)
    return figures


def _spec_of_70b(*, num_stored: int, divisor: int) -> ModelSpec:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": num_stored, "hidden_size": 8192 // divisor, "head_dim": 128,
        "intermediate_size": 28672 // divisor, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "dtype": "bfloat16",
    }  # fmt: skip
    return ModelSpec.from_config(config, file=Path("config.json"))


def _layers_of_70b(spec: ModelSpec, device: torch.device) -> list[DecoderLayer]:
    """Returns layers with random weights, the same on every rank."""
    torch.manual_seed(1)
    shard = Shard.of(spec, rank=0, size=8)
    packer = LinearPacker(dtype="bfloat16", numerics="invariant", device=device)
    shapes = {
        "qkv_weight": ((len(shard.heads) + 2 * len(shard.kv_heads)) * 128, spec.hidden_size),
        "output_weight": (spec.hidden_size, len(shard.heads) * 128),
        "gate_up_weight": (2 * len(shard.channels), spec.hidden_size),
        "down_weight": (spec.hidden_size, len(shard.channels)),
    }
    layers = []
    for _ in range(spec.num_layers):
        tensors = {
            name: torch.randn(shape, device=device).mul_(0.2 * shape[1] ** -0.5).bfloat16()
            for name, shape in shapes.items()
        }
        for norm in spec.traits.norms.names():
            tensors[norm] = torch.ones(spec.hidden_size, device=device).bfloat16()
        weights = LayerWeights(spec, shard, tensors).requires_grad_(False)
        layers.append(weights.layer(packer.pack, SingleGroup(), dtype=packer.compute_dtype))
    return layers


def _paged(
    spec: ModelSpec,
    layers: list[DecoderLayer],
    group: TensorGroup,
    num_layers: int,
    *,
    device: torch.device,
) -> PagedLayers:
    """Returns so many layers, with pages of their own, that sum in the group."""
    summing = [
        replace(
            layer,
            output=replace(layer.output, group=group),
            mlp=replace(layer.mlp, down=replace(layer.mlp.down, group=group)),
        )
        for layer in layers
    ]
    (rotation,) = rotation_tables(spec.ropes[:1], num_positions=1024, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return PagedLayers(
        [summing[at % len(summing)] for at in range(num_layers)],
        [None] * num_layers,
        spec=spec,
        rotations=[rotation] * num_layers,
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        num_pages=10 * 64,
        page_size=_PAGE_SIZE,
    )


def _timed(
    paged: PagedLayers,
    x_TD: Tensor,
    segments: list[RowSegment],
    group: ProcessGroup,
    device: torch.device,
) -> tuple[float, float, Tensor]:
    """Returns the medians of the time to queue a pass and of the whole pass, and its result."""
    queued_ms, all_ms = [], []
    for _ in range(_NUM_PASSES):
        plan = RowPlan.build(segments, page_size=_PAGE_SIZE, device=device, numerics="invariant")
        group.broadcast(torch.zeros(1, device=group.device))  # the ranks begin together
        _synchronize(device)
        started_s = time.perf_counter()
        out_TD = paged.forward(x_TD, plan)
        queued_ms.append(1e3 * (time.perf_counter() - started_s))
        _synchronize(device)
        all_ms.append(1e3 * (time.perf_counter() - started_s))
    first = 2  # the first pass compiles, and captures
    medians = [round(statistics.median(times[first:]), 3) for times in (queued_ms, all_ms)]
    return medians[0], medians[1], out_TD.clone()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
