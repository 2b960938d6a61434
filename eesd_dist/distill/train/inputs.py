"""What a training run reads before its first step, alike in every rank.

Decides which sequences are learnt from, which device computes, and what the head begins as.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

import torch
from torch import Tensor

from eesd_dist.distill.features import MANIFEST_FILE, FeatureStore
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """The target's shape, the store and its split."""

    spec: ModelSpec
    store: FeatureStore
    features_sha256: str
    """Over the store's manifest, which knows every shard's checksum."""
    learnt: tuple[int, ...]
    judged: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, request: TrainRequest) -> Self:
        options = request.options
        store = FeatureStore.of_target(request.features, request.model)
        if request.exit_layer not in store.manifest.exits:
            raise ConfigError(
                f"{request.features}: features after layers {list(store.manifest.exits)}, not "
                f"after {request.exit_layer}: collect with --exits {request.exit_layer}"
            )
        learnt, held_out = store.split(options.held_out_share, request.seed)
        device = device_of(options)
        if options.bfloat16:
            _require_bfloat16(device)
        return cls(
            spec=ModelSpec.from_folder(request.model),
            store=store,
            features_sha256=sha256((store.folder / MANIFEST_FILE).read_bytes()).hexdigest(),
            learnt=learnt,
            judged=held_out[: options.held_out_sequences],
            device=device,
        )

    def job(self, request: TrainRequest) -> dict[str, object]:
        """What may not change while a run goes on."""
        return {**request.job(), "features_sha256": self.features_sha256}


def first_head(request: TrainRequest, inputs: TrainInputs) -> TrainableExitHead:
    """A head to train on, or one that begins as the target's last layer."""
    if request.start is not None:
        head = TrainableExitHead.read(request.start, target=inputs.spec, target_path=request.model)
        found = (head.config.kind, head.exit_layer, head.reads_embedding)
        wanted = (request.head, request.exit_layer, request.reads_embedding)
        if found != wanted:
            raise ConfigError(
                f"{request.start}: found (kind, exit layer, reads the embedding) {found}, asked "
                f"for {wanted}: start from another head, or from none"
            )
        return head
    draft_vocab = None
    if request.head == "truncated":
        draft_vocab = draft_tokens(inputs.store, inputs.learnt, count=request.draft_vocab).tolist()
    return TrainableExitHead.from_target(
        request.model,
        inputs.spec,
        request.exit_layer,
        head=request.head,
        draft_vocab=draft_vocab,
        reads_embedding=request.reads_embedding,
    )


def draft_tokens(store: FeatureStore, only: Sequence[int], *, count: int) -> Tensor:
    """A truncated vocabulary, ascending: the tokens that the target wrote most often; where those
    are too few, the most frequent ones of the prompts."""
    vocab_size = store.manifest.verifier.vocab_size
    written_W = torch.zeros(vocab_size, dtype=torch.long)
    given_W = torch.zeros(vocab_size, dtype=torch.long)
    for sequence in store.sequences(only):
        prompt_T, answer_T = sequence.tokens_T.tensor_split([sequence.num_prompt])
        written_W += torch.bincount(answer_T, minlength=vocab_size)
        given_W += torch.bincount(prompt_T, minlength=vocab_size)
    score_W = written_W * (given_W.sum() + 1) + given_W
    order_W = score_W.argsort(descending=True, stable=True)
    return order_W[: min(count, vocab_size)].sort().values


def device_of(options: TrainOptions) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, and torch finds no CUDA device here: take auto or cpu")
    if options.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _require_bfloat16(device: torch.device) -> None:
    if device.type == "cuda":
        fits = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fits = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if not fits:
        raise ConfigError(
            f"bfloat16 training on {device.type}: this machine does not compute in bfloat16; leave "
            "bfloat16 off and train in float32"
        )
