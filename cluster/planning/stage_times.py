"""Time of each part of a round on one machine: drafted token, known rows, verify pass, transfer.

docs/planning.md has the reasoning. Rows are those of one microbatch; a request's keys and values
are read once for all its rows.
"""

from dataclasses import dataclass

from cluster.planning.machine import Machine
from cluster.planning.shapes import ModelShape, Split

_PRODUCTS_OF_A_LAYER = 4
_GUESS_BYTES = 16
"""Two tokens and their scores, which each draft rank tells the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests that are computed together."""

    num_requests: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the parts of a round."""

    shape: ModelShape
    machine: Machine
    split: Split

    def prefix_s(self, batch: Batch) -> float:
        """Returns the seconds of the last known token of every request through layers [0, N)."""
        host = self.machine.host
        host_s = host.prefix_s + batch.num_requests * host.prefix_request_s
        return host_s + self._draft_layers_s(self.split.exit_layer, batch)

    def draft_step_s(self, batch: Batch) -> float:
        """Returns the seconds of one drafted token of every request: N layers, the layer of the
        exit head, its LM head, and the host's choice."""
        split, host, requests = self.split, self.machine.host, batch.num_requests
        ranks = split.draft_tensor_parallel_size
        vocabulary = split.draft_vocab_size or self.shape.vocab_size
        head_s = self._head_s(vocabulary, rows=requests, ranks=ranks)
        gather_s = self._draft_sum_s(requests, _GUESS_BYTES)
        host_s = host.step_s + requests * host.step_request_s
        layers_s = self._draft_layers_s(split.exit_layer + 1, batch)
        return layers_s + head_s + gather_s + host_s

    def draft_s(self, batch: Batch, num_draft_tokens: int) -> float:
        """Returns the seconds of the known rows and of drafts of this length."""
        if not num_draft_tokens:
            return self.prefix_s(batch)
        # The exit head also reads the known row before the first token.
        ranks, rows = self.split.draft_tensor_parallel_size, batch.num_requests
        more_s = self._layer_s(ranks, rows=2 * rows, batch=batch)
        more_s += self.machine.host.first_s - self._layer_s(ranks, rows=rows, batch=batch)
        if ranks > 1:  # one command to the other ranks
            more_s += self.machine.host.hop_s
        return self.prefix_s(batch) + more_s + num_draft_tokens * self.draft_step_s(batch)

    def verify_s(self, batch: Batch, num_draft_tokens: int) -> float:
        """Returns the seconds of layers [N, L) and the LM head over the rows of a round."""
        ranks = self.split.verify_tensor_parallel_size
        num_layers = self.shape.num_layers - self.split.exit_layer
        return self.target_s(
            num_layers, ranks=ranks, batch=batch, rows_per_request=num_draft_tokens + 1
        )

    def target_s(
        self, num_layers: int, *, ranks: int, batch: Batch, rows_per_request: int
    ) -> float:
        """Returns the seconds of the last layers of the target and its LM head on so many ranks."""
        host, requests = self.machine.host, batch.num_requests
        rows = requests * rows_per_request
        layer_s = self._layer_s(ranks, rows=rows, batch=batch)
        layers_s = self._layers_s(num_layers, ranks, layer_s, self._verify_sum_s(rows, ranks))
        head_s = self._head_s(self.shape.vocab_size, rows=rows, ranks=ranks)
        # The best token of every shard is exchanged at the end.
        choice_s = self._sum_s(24 * rows, ranks, self.machine.verify_sum_s)
        share_s = host.hop_s if ranks > 1 else 0.0
        host_s = host.verify_s + requests * host.verify_request_s
        return layers_s + head_s + choice_s + share_s + host_s

    def round_host_s(self, batch: Batch, num_draft_tokens: int) -> float:
        """Returns the host's seconds for planning a round, its header and its commit."""
        host, rows = self.machine.host, batch.num_requests * (num_draft_tokens + 1)
        return host.round_s + batch.num_requests * host.round_request_s + rows * host.round_row_s

    def transfer_s(self, batch: Batch, num_draft_tokens: int) -> float:
        """Returns the seconds of sending hidden states; the reply is a few integers."""
        rows = batch.num_requests * (num_draft_tokens + 1)
        size_bytes = rows * self.shape.hidden_size * self.shape.bytes_per_activation
        if self.split.shares_gpu:
            return 0.0
        network = self.machine.network
        crosses = self.split.num_gpus > network.gpus_per_node
        send_s = network.message_s(size_bytes, crosses=crosses)
        return 2 * self.machine.host.hop_s + send_s + network.message_s(0, crosses=crosses)

    def _draft_layers_s(self, num_layers: int, batch: Batch) -> float:
        rows, ranks = batch.num_requests, self.split.draft_tensor_parallel_size
        layer_s = self._layer_s(ranks, rows=rows, batch=batch)
        return self._layers_s(num_layers, ranks, layer_s, self._draft_sum_s(rows, self._row_bytes))

    def _layers_s(self, num_layers: int, ranks: int, layer_s: float, sum_s: float) -> float:
        """The host queues each sum over nodes, and the ranks wait for it if it takes longer."""
        if self.machine.network.crosses(ranks):
            return num_layers * max(layer_s + 2 * sum_s, 2 * self.machine.host.queued_sum_s)
        return num_layers * (layer_s + 2 * sum_s)

    def _layer_s(self, ranks: int, *, rows: int, batch: Batch) -> float:
        arithmetic = self.machine.arithmetic
        weights = self.shape.layer_weights_of(ranks)
        attention, kv_bytes, attention_s = arithmetic.attention, 0, 0.0
        if attention is None:
            kv_bytes = batch.num_requests * batch.context_tokens
            kv_bytes *= self.shape.kv_bytes_per_token_of(ranks)
        else:
            attention_s = attention.seconds(
                num_heads=self.shape.num_heads / ranks,
                requests=batch.num_requests,
                rows=rows,
                context=batch.context_tokens,
            )
        products_s = arithmetic.product_of(
            weights * self.shape.bytes_per_weight + kv_bytes, flops=2 * weights * rows
        )
        calls_s = (_PRODUCTS_OF_A_LAYER - 1) * arithmetic.product_s
        return products_s + calls_s + attention_s + arithmetic.layer_s + rows * arithmetic.row_s

    def _head_s(self, vocabulary: int, *, rows: int, ranks: int) -> float:
        weights = self.shape.hidden_size * vocabulary / ranks
        return self.machine.arithmetic.product_of(
            weights * self.shape.bytes_per_weight, flops=2 * weights * rows
        )

    @property
    def _row_bytes(self) -> int:
        return self.shape.hidden_size * self.shape.bytes_per_activation

    def _draft_sum_s(self, rows: int, row_bytes: int) -> float:
        ranks = self.split.draft_tensor_parallel_size
        return self._sum_s(rows * row_bytes, ranks, self.machine.draft_sum_s)

    def _verify_sum_s(self, rows: int, ranks: int) -> float:
        return self._sum_s(rows * self._row_bytes, ranks, self.machine.verify_sum_s)

    def _sum_s(self, size_bytes: int, ranks: int, fixed_s: float | None) -> float:
        if ranks == 1:
            return 0.0
        if fixed_s is not None:
            return fixed_s
        return self.machine.network.sum_s(size_bytes, ranks)
