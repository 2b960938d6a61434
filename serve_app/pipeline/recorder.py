"""Records features that verification has computed, as a store that `eesd distill refresh` reads.

The drafting actor passes on pieces of texts; a thread writes them as shards and makes room by
removing the oldest. Only the service's user can read them. Rounds never wait for it: what the disk
has no time or no room for is dropped and counted. Several drafting actors may share a folder, one
writer at a time. The format of a shard is `eesd_dist.distill.features`'.
"""

import fcntl
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from eesd_dist.config import EngineConfig
from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    FeatureSequence,
    shard_name,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.recording.recorder import MAX_POSITIONS, VerifiedPiece
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.head_config import VerifierIdentity
from eesd_dist.types import RecorderCounts, Request
from serve_app.config import RecorderConfig

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 64 * 2**20
_SHARD_BYTES = 8 * 2**20
_LONGEST_WAIT_S = 10.0
"""Longest wait of a piece, which is lost when the process is killed."""
_FLUSH_WAIT_S = 5.0
_HEADER_BYTES = 4096
_SHARD = re.compile(r"shard-(\d+)\.safetensors")
_LOCK_FILE = ".lock"


def new_manifest(engine: EngineConfig, *, top_k: int) -> FeatureManifest:
    """Returns the manifest of an empty recording of this engine's target and split. Reads the
    checkpoint's small files."""
    layout = layout_of(engine)
    return FeatureManifest(
        verifier=VerifierIdentity.of(engine.model.path, layout.spec),
        weights_sha256=weights_fingerprint(engine.model.path),
        exits=(layout.split,),
        top_k=min(top_k, layout.spec.vocab_size),
        seed=0,
        max_length=MAX_POSITIONS,
        shards=(),
    )


class RecorderFolder:
    """The recorder of one drafting actor; `put` may be called in any thread."""

    def __init__(
        self, folder: Path, manifest: FeatureManifest, *, max_bytes: int, sample_rate: float
    ) -> None:
        """Raises ConfigError for a folder that cannot be used, or has rows of another target."""
        self._folder = folder
        self._empty = manifest
        self._max_bytes = max_bytes
        self._sample_rate = sample_rate
        self._rng = Random()
        self._lock = threading.Condition()
        self._waiting: deque[VerifiedPiece] = deque()
        self._waiting_bytes = 0
        self._oldest_s = 0.0
        """Arrival of the first waiting piece."""
        self._is_writing = False
        self._is_hurried = False
        """`flush` waits until everything is on disk."""
        self._num_written = 0
        self._num_dropped = 0
        self._num_bytes = self._check_folder()
        threading.Thread(target=self._run, name="recorder", daemon=True).start()

    @property
    def top_k(self) -> int:
        return self._empty.top_k

    def wants(self, request: Request) -> bool:
        del request  # every one has the same chance
        return self._rng.random() < self._sample_rate

    def put(self, segment: VerifiedPiece) -> None:
        size = self._size_of(segment)
        with self._lock:
            if self._waiting_bytes + size > min(_MAX_WAITING_BYTES, self._max_bytes):
                self._num_dropped += 1
                return
            if not self._waiting:
                self._oldest_s = time.monotonic()
            self._waiting.append(segment)
            self._waiting_bytes += size
            self._lock.notify_all()

    def counts(self) -> RecorderCounts:
        with self._lock:
            return RecorderCounts(
                num_written=self._num_written,
                num_dropped=self._num_dropped,
                num_bytes=self._num_bytes,
            )

    def flush(self) -> None:
        """Returns when everything taken so far is on disk or dropped, or after some seconds."""
        with self._lock:
            self._is_hurried = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._waiting and not self._is_writing, _FLUSH_WAIT_S)

    def _run(self) -> None:
        while True:
            segments = self._next_batch()
            try:
                num_bytes = self._write([self._sequence(segment) for segment in segments])
                error: Exception | None = None
            except Exception as raised:  # no error of a disk or device may stop serving
                error = raised
                logger.warning(
                    "not recorded: texts=%d folder=%s error=%r", len(segments), self._folder, raised
                )
            with self._lock:
                if error is None:
                    self._num_written += len(segments)
                    self._num_bytes = num_bytes
                else:
                    self._num_dropped += len(segments)
                self._is_writing = False
                self._lock.notify_all()

    def _next_batch(self) -> list[VerifiedPiece]:
        """Returns enough pieces for a shard, or those that have waited for long enough."""
        enough = min(_SHARD_BYTES, self._max_bytes // 4)
        with self._lock:
            while True:
                waited_s = time.monotonic() - self._oldest_s
                is_due = self._is_hurried or waited_s >= _LONGEST_WAIT_S
                if self._waiting and (is_due or self._waiting_bytes >= enough):
                    break
                if not self._waiting:
                    self._is_hurried = False
                self._lock.wait(_LONGEST_WAIT_S - waited_s if self._waiting else None)
            segments = [self._waiting.popleft()]
            num_bytes = self._size_of(segments[0])
            while self._waiting and num_bytes + self._size_of(self._waiting[0]) <= enough:
                segment = self._waiting.popleft()
                num_bytes += self._size_of(segment)
                segments.append(segment)
            self._waiting_bytes -= num_bytes
            self._is_writing = True
            return segments

    def _write(self, sequences: list[FeatureSequence]) -> int:
        """Makes room and writes one more shard; returns the folder's bytes."""
        expected = sum(self._bytes_of(sequence.num_tokens) for sequence in sequences)
        with _locked(self._folder):
            manifest = self._present()
            _sweep(self._folder, manifest)
            manifest = self._with_room(manifest, expected + _HEADER_BYTES)
            index = max((_number(shard.name) + 1 for shard in manifest.shards), default=0)
            entry = write_shard(self._folder, index, sequences)
            manifest = replace(manifest, shards=(*manifest.shards, entry))
            manifest.write(self._folder)
            return self._with_room(manifest, 0).num_bytes

    def _with_room(self, manifest: FeatureManifest, extra_bytes: int) -> FeatureManifest:
        """Removes the oldest shards, first from the manifest, then from the disk."""
        shards = list(manifest.shards)
        while shards and sum(shard.num_bytes for shard in shards) + extra_bytes > self._max_bytes:
            shards.pop(0)
        if len(shards) == len(manifest.shards):
            return manifest
        gone = manifest.shards[: len(manifest.shards) - len(shards)]
        manifest = replace(manifest, shards=tuple(shards))
        manifest.write(self._folder)
        for shard in gone:
            (self._folder / shard.name).unlink(missing_ok=True)
        return manifest

    def _present(self) -> FeatureManifest:
        if not (self._folder / MANIFEST_FILE).exists():
            return self._empty
        return FeatureManifest.read(self._folder)

    def _check_folder(self) -> int:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder):
                present = self._present()
        except OSError as error:
            raise ConfigError(
                f"recorder.folder {self._folder}: {error.strerror or error}: name a folder that "
                "the drafting actors may write to, or leave it out"
            ) from error
        if replace(present, shards=()) != self._empty:
            raise ConfigError(
                f"recorder.folder {self._folder}: holds rows of another target, exit layer or "
                "recorder.top_k: name another folder, or remove this one"
            )
        return present.num_bytes

    def _sequence(self, segment: VerifiedPiece) -> FeatureSequence:
        (exit_layer,) = self._empty.exits
        return FeatureSequence(
            tokens_T=torch.from_numpy(segment.tokens_T).long(),
            num_prompt=segment.num_prompt,
            workload=segment.workload,
            temperature=segment.temperature,
            hidden={exit_layer: segment.hidden_TD.to("cpu", torch.bfloat16)},
            top_ids_TK=torch.from_numpy(segment.top_ids_TK),
            # Log-probabilities are logits with a log-sum-exp of 0.
            top_logits_TK=torch.from_numpy(segment.top_logprobs_TK),
            lse_T=torch.zeros(len(segment.tokens_T)),
        )

    def _size_of(self, segment: VerifiedPiece) -> int:
        return self._bytes_of(len(segment.tokens_T))

    def _bytes_of(self, num_tokens: int) -> int:
        """Bytes on disk: tokens, hidden states, best tokens with their log-probabilities."""
        return num_tokens * (8 + 2 * self._empty.verifier.hidden_size + 6 * self.top_k)


def open_recorder(config: RecorderConfig, engine: EngineConfig) -> RecorderFolder:
    """Raises ConfigError for a folder that cannot be used, or has rows of another target."""
    assert config.folder is not None, "without a folder nothing is kept"
    return RecorderFolder(
        config.folder,
        new_manifest(engine, top_k=config.top_k),
        max_bytes=config.max_bytes,
        sample_rate=config.sample_rate,
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one writer in at a time, across processes; the lock is released when a process dies."""
    with (folder / _LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path, manifest: FeatureManifest) -> None:
    """Removes what a killed writer left: shards that no manifest names, partly written files."""
    names = {shard.name for shard in manifest.shards}
    for file in folder.iterdir():
        is_shard = _SHARD.fullmatch(file.name) and file.name not in names
        if is_shard or file.name.endswith(".partial"):
            file.unlink(missing_ok=True)


def _number(name: str) -> int:
    match = _SHARD.fullmatch(name)
    assert match is not None, f"{name} is not what {shard_name(0)} is"
    return int(match[1])
