"""Updates the weights of one exit head, on one of any number of ranks.

DeepSpeed handles gradients and optimizer state (ZeRO stages 0 to 3); only the head's own parameters
are trained. The only module that imports DeepSpeed; the default process group must exist before a
learner (`alone` creates one for a single process). Where DeepSpeed is not installed, one process
trains without it (`torch_engine`).
"""

# Shapes: B rows, T positions, D hidden size, N = B x T positions, K best tokens, V vocabulary.

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from eesd_dist.backends.api import engine_on
from eesd_dist.devices import HOST
from eesd_dist.distill.folders import put_in_place
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train.batches import Batch, PlannedBatch, Position, Row
from eesd_dist.distill.train.held_out_rows import HeldOutBatch
from eesd_dist.distill.train.losses import Comparison, DraftVocabulary, KeptTargets, LossOptions
from eesd_dist.distill.train.request import (
    TrainInputs,
    TrainOptions,
    TrainRequest,
    device_of,
    first_head,
)
from eesd_dist.distill.train.torch_engine import TorchEngine
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.trainable_head import TrainableExitHead

_LEAST_WEIGHT = 1e-9
"""Minimum weight of a batch: one of prompts only may have weight 0, and keeps a loss of 0."""


@contextmanager
def alone(options: TrainOptions) -> Iterator[None]:
    """Creates a default process group of this process, which DeepSpeed requires."""
    if not has_deepspeed():
        yield
        return
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    device = device_of(options)
    deepspeed = load_deepspeed(force_cpu=device == HOST)
    backend = engine_on(device).collectives
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            dist.destroy_process_group()
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Loss and similarity of a head to the target, over some positions."""

    loss: float
    agreement: float
    """Share of positions with the same best token."""
    one_minus_tv: float
    """Lower bound of rejection sampling's acceptance at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run; a checkpoint has this and DeepSpeed's state."""

    step: int = 0
    """Optimizer steps taken."""
    spent_s: float = 0.0
    total_steps: int | None = None
    """None until a budget in minutes has been converted to steps."""
    position: Position = field(default_factory=Position)
    held_out: Figures | None = None
    """Figures of the last evaluation."""
    best_one_minus_tv: float | None = None
    best_step: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(text))


class _HeadLoss(nn.Module):
    """Forward pass as a module for DeepSpeed. ZeRO-3 gathers all of its parameters at once: they
    are one layer, which uses them without calling a submodule."""

    def __init__(self, head: TrainableExitHead, vocabulary: DraftVocabulary, loss: LossOptions):
        super().__init__()
        self.head = head
        self._vocabulary = vocabulary
        self._loss = loss

    def forward(
        self,
        hidden_BTD: Tensor,
        ids_NK: Tensor,
        logits_NK: Tensor,
        lse_N: Tensor,
        weights_N: Tensor,
        wants_figures: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns sums over positions: the loss, and [loss, agreement, 1 - TV, weight]."""
        guess_BTV = self.head.training_forward(hidden_BTD)
        targets = KeptTargets(ids_NK=ids_NK, logits_NK=logits_NK, lse_N=lse_N)
        comparison = Comparison(guess_BTV.flatten(0, 1), targets, self._vocabulary)
        loss = (comparison.loss(self._loss) * weights_N).sum()
        if not wants_figures:
            return loss, torch.zeros(4, dtype=torch.float64, device=loss.device)
        with torch.no_grad():
            sums = [
                loss,
                (comparison.agrees() * weights_N).sum(),
                (comparison.one_minus_tv() * weights_N).sum(),
                weights_N.sum(),
            ]
            return loss, torch.stack([x.double() for x in sums])


class HeadLearner:
    """The head and its optimizer; all ranks make the same calls."""

    def __init__(
        self, request: TrainRequest, inputs: TrainInputs, *, rank: int, world_size: int
    ) -> None:
        deepspeed = deepspeed_for(request, device=inputs.device)
        options = request.options
        head = first_head(request, inputs).to(inputs.device)
        vocabulary = DraftVocabulary(
            head.vocab_ids, vocab_size=inputs.spec.vocab_size, device=inputs.device
        )
        module = _HeadLoss(head, vocabulary, options.loss)
        if deepspeed is not None and request.zero_stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, [_HeadLoss])
        trained = [p for p in head.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._deepspeed = deepspeed
        self._engine: Any
        if deepspeed is None:
            self._engine = TorchEngine(
                module, optimizer, accumulation=options.accumulation, clip=options.clip
            )
        else:
            self._engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=trained,
                optimizer=optimizer,
                config=_deepspeed_config(request),
            )
        self._head = head
        self._target: FrozenTarget | None = None
        if options.source == "live":
            self._target = FrozenTarget(
                request.model, inputs.spec, [head.exit_layer], device=inputs.device
            )
        self._options = options
        self._device = inputs.device
        self._rank = rank
        self._world_size = world_size

    def learn(
        self, planned: PlannedBatch, *, rate: float, wants_figures: bool, flag: float
    ) -> tuple[Figures | None, float]:
        """Takes one optimizer step over the rows of all ranks. With `wants_figures` the figures are
        summed over all ranks, and every rank gets the sum of all `flag`s, which is non-zero on the
        first rank only."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        options = self._options
        # DeepSpeed divides by the micro-batches and averages over the ranks.
        num_shares = self._world_size * options.accumulation
        (weight,) = self.sum_over_ranks([planned.weight(options.prompt_weight)])
        scale = num_shares / max(weight, _LEAST_WEIGHT)
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for micro in range(options.accumulation):
            rows = planned.share(micro, options.accumulation)
            loss, micro_sums = self._forward(
                rows, options.prompt_weight, wants_figures=wants_figures
            )
            self._engine.backward(loss * scale)
            self._engine.step()
            sums += micro_sums
        if not wants_figures:
            return None, 0.0
        *totals, flag = self.sum_over_ranks([*sums.tolist(), flag])
        return _figures(totals), flag

    def judge(self, batches: Sequence[HeldOutBatch]) -> Figures:
        """Returns figures over the target's text in the rows of all ranks, without prompts."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        self._engine.eval()
        with torch.no_grad():
            for batch in batches:
                _, micro_sums = self._forward(batch.rows, 0.0, wants_figures=True)
                if batch.counts:
                    sums += micro_sums
        self._engine.train()
        return _figures(self.sum_over_ranks(sums.tolist()))

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._world_size > 1:
            self._deepspeed.comm.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def save(self, folder: Path, progress: Progress) -> None:
        """Writes every rank's part of a checkpoint into one folder."""
        self._engine.save_checkpoint(
            str(folder.parent),
            tag=folder.name,
            client_state={"progress": progress.to_json()},
            save_latest=False,
            exclude_frozen_parameters=True,
        )

    def load(self, folder: Path) -> Progress:
        _, client_state = self._engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=False
        )
        return Progress.from_json(client_state["progress"])

    def save_head(self, final: Path, *, provenance: Mapping[str, object]) -> None:
        """Replaces the head at `final` by the current one."""
        parameters = list(self._head.parameters())
        gathered = (
            self._deepspeed.zero.GatheredParameters(parameters)
            if self._is_partitioned
            else nullcontext()
        )
        with gathered:
            if self._rank == 0:
                written = final.with_name(f".{final.name}.new")
                try:
                    self._head.save(written, dtype=self._options.save_dtype, provenance=provenance)
                except SafetensorError as error:  # for example a full disk, without the file's name
                    raise ConfigError(f"{written}: cannot be written ({error})") from error
                put_in_place(written, final)

    def finish_work(self) -> None:
        """Waits for the device, which computes a step while the next one is prepared."""
        engine_on(self._device).synchronize(self._device)

    def wait_for_all(self) -> None:
        if self._world_size > 1:
            self._deepspeed.comm.barrier()

    def close(self) -> None:
        self._engine.destroy()

    @property
    def _is_partitioned(self) -> bool:
        return bool(self._engine.zero_optimization_partition_weights())

    def _forward(
        self, rows: Sequence[Row], prompt_weight: float, *, wants_figures: bool
    ) -> tuple[Tensor, Tensor]:
        batch = Batch.of(rows, prompt_weight=prompt_weight, device=self._device)
        hidden_BTD, targets = self._features(batch)
        if self._is_partitioned and torch.is_grad_enabled():
            # ZeRO-3 releases the parameters when the gradient of an input is computed; without one
            # it would release them before the backward pass.
            hidden_BTD = hidden_BTD.detach().requires_grad_()
        loss, sums = self._engine(
            hidden_BTD,
            targets.ids_NK,
            targets.logits_NK,
            targets.lse_N,
            batch.weights_BT.flatten(),
            wants_figures,
        )
        return loss, sums

    def _features(self, batch: Batch) -> tuple[Tensor, KeptTargets]:
        """Returns stored features, or the target's over each row as if it were a whole text."""
        if self._target is None:
            return batch.hidden_BTD, batch.targets
        hidden, logits_BTV = self._target.forward(batch.tokens_BT, self._target.exits)
        return hidden[self._head.exit_layer], KeptTargets.whole(logits_BTV.flatten(0, 1))


def _deepspeed_config(request: TrainRequest) -> dict[str, object]:
    options = request.options
    zero: dict[str, object] = {"stage": request.zero_stage}
    if request.zero_stage == 3:
        # A head is a dozen tensors: not partitioning small ones would gain nothing.
        zero["stage3_param_persistence_threshold"] = 0
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": options.rows // request.shape.num_shares,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.clip,
        "zero_optimization": zero,
        # DeepSpeed's CPU optimizer would be compiled first; torch's needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.bfloat16},
        "steps_per_print": None,
    }


def has_deepspeed() -> bool:
    return find_spec("deepspeed") is not None


def deepspeed_for(request: TrainRequest, *, device: torch.device) -> Any:
    """Returns DeepSpeed, or None where it is not installed and one process trains alone. Raises
    ConfigError if training needs it."""
    is_plain = request.workers == 1 and request.zero_stage == 0 and not request.options.bfloat16
    if is_plain and not has_deepspeed():
        return None
    return load_deepspeed(force_cpu=device == HOST)


def load_deepspeed(*, force_cpu: bool) -> Any:
    """Imports DeepSpeed without its shared-memory all-reduce, which needs a compiler and works on
    one host only (DeepSpeed issue 7625), and without checks for a compiler of other ops."""
    if force_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(
            "several workers, ZeRO and bfloat16 need DeepSpeed "
            f"({error}): pip install 'eesd-dist[distill]'"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _figures(sums: Sequence[float]) -> Figures:
    loss, agreement, one_minus_tv, weight = sums
    weight = max(weight, _LEAST_WEIGHT)
    return Figures(
        loss=loss / weight, agreement=agreement / weight, one_minus_tv=one_minus_tv / weight
    )
