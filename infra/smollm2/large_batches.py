"""A Llama that writes and reads many texts at once on one GPU, for collecting training text.

Plain torch with a cache of fixed size. The engine serves few requests soon; here a thousand texts
advance together, and then each is read whole for its features. Implements `RowSource`.
"""

# Shapes: B texts, T positions, S positions of the cache, N rows, D hidden size, H query heads,
# K key heads, G query heads of a key head, C channels of a head, V vocabulary.

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from eesd_dist.distill.sources import TextRows
from eesd_dist.model.spec import read_json
from eesd_dist.types import FeatureSpec, Request

_READ_TOKENS = 1 << 16
"""Positions that are read in one pass."""
_LOGITS_ROWS = 1 << 13
_CHECK_STEPS = 8
"""Steps between counts of the texts that go on."""
_LEAST_SHARE = 0.1
"""Share of texts below which those that still go on are ended where they are."""


class LargeBatches:
    """The target, in one process and on one device."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        config = read_json(folder / "config.json")
        self._device = device
        self._num_layers = int(config["num_hidden_layers"])
        self._heads = int(config["num_attention_heads"])
        self._key_heads = int(config["num_key_value_heads"])
        self._channels = int(config.get("head_dim") or config["hidden_size"] // self._heads)
        self._epsilon = float(config["rms_norm_eps"])
        weights = {
            name: x.to(device, dtype)
            for file in folder.glob("*.safetensors")
            for name, x in load_file(file).items()
        }
        self._embedding_VD = weights["model.embed_tokens.weight"]
        self._lm_head_VD = weights.get("lm_head.weight", self._embedding_VD)
        self._norm_D = weights["model.norm.weight"]
        self._layers = [_Layer(weights, f"model.layers.{n}.") for n in range(self._num_layers)]
        theta = float(config["rope_parameters"]["rope_theta"])
        steps = torch.arange(0, self._channels, 2, dtype=torch.float64)
        angles = torch.outer(
            torch.arange(int(config["max_position_embeddings"]), dtype=torch.float64),
            theta ** (-steps / self._channels),
        ).repeat(1, 2)
        self._cos_SC = angles.cos().to(device, dtype)
        self._sin_SC = angles.sin().to(device, dtype)
        self._dtype = dtype

    @torch.inference_mode()
    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        texts = self.written(requests)
        spec = requests[0].features
        assert spec is not None
        rows: list[TextRows | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        while order:
            room = max(1, _READ_TOKENS // len(texts[order[-1]]))
            batch, order = order[-room:], order[:-room]
            for at, text in zip(batch, self._read([texts[n] for n in batch], spec), strict=True):
                rows[at] = text
        return [row for row in rows if row is not None]

    @torch.inference_mode()
    def written(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Returns the prompt of each request with the target's answer, of equal maximum length."""
        limit = requests[0].sampling.max_tokens
        ends = torch.tensor(requests[0].sampling.stop_token_ids, device=self._device)
        temperatures = [request.sampling.temperature for request in requests]
        temperature_B1 = torch.tensor(temperatures, device=self._device).unsqueeze(1)
        lengths = [len(request.prompt) for request in requests]
        longest = max(lengths)
        tokens_BT = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            tokens_BT[row, : lengths[row]] = torch.tensor(request.prompt)
        tokens_BT = tokens_BT.to(self._device)
        at_B = torch.tensor(lengths, device=self._device)
        cache = self._empty_cache(len(requests), longest + limit)
        batch_B = torch.arange(len(requests), device=self._device)
        last_BD = torch.empty(
            len(requests), self._embedding_VD.shape[1], device=self._device, dtype=self._dtype
        )
        size = max(1, _READ_TOKENS // longest)
        for first in range(0, len(requests), size):
            some = slice(first, first + size)
            cache_rows = [(k[some], v[some]) for k, v in cache]
            hidden_BTD, _ = self._forward(tokens_BT[some], (), cache=cache_rows)
            last_BD[some] = hidden_BTD[
                torch.arange(hidden_BTD.shape[0], device=self._device), at_B[some] - 1
            ]
        answer_BT = torch.zeros(len(requests), limit, dtype=torch.long, device=self._device)
        is_over_B = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        count_B = torch.zeros_like(at_B)
        torch.manual_seed(requests[0].sampling.seed or 0)
        for step in range(limit):
            token_B = _chosen(functional.linear(last_BD, self._lm_head_VD), temperature_B1)
            answer_BT[:, step] = token_B
            count_B += ~is_over_B
            is_over_B |= torch.isin(token_B, ends)
            if step + 1 == limit:
                break
            if step % _CHECK_STEPS == 0:
                going = int((~is_over_B).sum())
                if going <= _LEAST_SHARE * len(requests) * (step > 0):
                    break
            last_BD = self._step(token_B, at_B, cache, batch_B, used=longest + step + 1)
            at_B = at_B + 1
        answers, counts = answer_BT.tolist(), count_B.tolist()
        return [
            (*request.prompt, *answer[:count])
            for request, answer, count in zip(requests, answers, counts, strict=True)
        ]

    def _read(self, texts: Sequence[tuple[int, ...]], spec: FeatureSpec) -> list[TextRows]:
        lengths = [len(text) - 1 for text in texts]
        tokens_BT = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens_BT[row, : lengths[row]] = torch.tensor(text[:-1])
        is_row_BT = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        is_row_BT = is_row_BT.to(self._device)
        last_BTD, by_exit = self._forward(tokens_BT.to(self._device), spec.exits)
        ids, logits, lse = [], [], []
        for rows_ND in torch.split(last_BTD[is_row_BT], _LOGITS_ROWS):
            logits_NV = functional.linear(rows_ND, self._lm_head_VD).float()
            best = logits_NV.topk(spec.top_k, dim=-1)
            ids.append(best.indices.int())
            logits.append(best.values)
            lse.append(logits_NV.logsumexp(dim=-1))
        columns = [torch.cat(x).cpu().split(lengths) for x in (ids, logits, lse)]
        hidden = {at: x_BTD[is_row_BT].cpu().split(lengths) for at, x_BTD in by_exit.items()}
        return [
            TextRows(
                tokens=text,
                hidden={at: rows[number] for at, rows in hidden.items()},
                top_ids_TK=columns[0][number],
                top_logits_TK=columns[1][number],
                lse_T=columns[2][number],
            )
            for number, text in enumerate(texts)
        ]

    def _forward(
        self,
        tokens_BT: Tensor,
        exits: Sequence[int],
        *,
        cache: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns normalized hidden states and those after each exit; fills the cache's start."""
        hidden_BTD = self._embedding_VD[tokens_BT]
        num_positions = tokens_BT.shape[1]
        cos_TC, sin_TC = self._cos_SC[:num_positions], self._sin_SC[:num_positions]
        by_exit = {}
        for number, layer in enumerate(self._layers):
            q_BTHC, k_BTKC, v_BTKC = self._projected(layer, hidden_BTD)
            q = _rotated(q_BTHC.transpose(1, 2), cos_TC, sin_TC)
            k = _rotated(k_BTKC.transpose(1, 2), cos_TC, sin_TC)
            v = v_BTKC.transpose(1, 2)
            if cache is not None:
                cache[number][0][:, :, :num_positions] = k
                cache[number][1][:, :, :num_positions] = v
            groups = self._heads // self._key_heads
            mixed = functional.scaled_dot_product_attention(
                q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
            )
            hidden_BTD = self._after_attention(layer, hidden_BTD, mixed.transpose(1, 2).flatten(2))
            if number + 1 in exits:
                by_exit[number + 1] = hidden_BTD
        return self._normalized(hidden_BTD, self._norm_D), by_exit

    def _step(
        self,
        token_B: Tensor,
        at_B: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        batch_B: Tensor,
        *,
        used: int,
    ) -> Tensor:
        """Returns the normalized hidden states of one token per text, at its position."""
        size, groups = len(token_B), self._heads // self._key_heads
        hidden_BD = self._embedding_VD[token_B]
        cos_B1C, sin_B1C = self._cos_SC[at_B].unsqueeze(1), self._sin_SC[at_B].unsqueeze(1)
        hidden_S = torch.arange(used, device=self._device) > at_B.unsqueeze(1)
        bias_B11S = torch.zeros(size, used, dtype=self._dtype, device=self._device)
        bias_B11S = bias_B11S.masked_fill_(hidden_S, -1e9)[:, None, None]
        for layer, (k_BKSC, v_BKSC) in zip(self._layers, cache, strict=True):
            q_BHC, k_BKC, v_BKC = self._projected(layer, hidden_BD)
            q_BHC = _rotated(q_BHC, cos_B1C, sin_B1C) * self._channels**-0.5
            k_BKSC[batch_B, :, at_B] = _rotated(k_BKC, cos_B1C, sin_B1C)
            v_BKSC[batch_B, :, at_B] = v_BKC
            q_BKGC = q_BHC.view(size, self._key_heads, groups, self._channels)
            scores_BKGS = q_BKGC @ k_BKSC[:, :, :used].transpose(-1, -2)
            shares_BKGS = (scores_BKGS + bias_B11S).softmax(dim=-1)
            mixed_BKGC = shares_BKGS @ v_BKSC[:, :, :used]
            hidden_BD = self._after_attention(layer, hidden_BD, mixed_BKGC.reshape(size, -1))
        return self._normalized(hidden_BD, self._norm_D)

    def _projected(self, layer: "_Layer", hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = functional.linear(self._normalized(hidden, layer.input_norm_D), layer.qkv)
        heads = projected.unflatten(-1, (-1, self._channels))
        q, k, v = heads.split([self._heads, self._key_heads, self._key_heads], dim=-2)
        return q, k, v

    def _after_attention(self, layer: "_Layer", hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + functional.linear(mixed, layer.output)
        inner = functional.linear(self._normalized(hidden, layer.mlp_norm_D), layer.gate_and_up)
        gate, up = inner.chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)

    def _normalized(self, hidden: Tensor, weight_D: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight_D.shape, weight_D, self._epsilon)

    def _empty_cache(self, size: int, positions: int) -> list[tuple[Tensor, Tensor]]:
        shape = (2, size, self._key_heads, positions, self._channels)
        both = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in self._layers]
        return [(pair[0], pair[1]) for pair in both]


class _Layer:
    """Weights of one layer, those of equal inputs side by side."""

    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        def read(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        self.input_norm_D = read("input_layernorm")
        self.mlp_norm_D = read("post_attention_layernorm")
        self.qkv = torch.cat([read(f"self_attn.{name}_proj") for name in "qkv"])
        self.output = read("self_attn.o_proj")
        self.gate_and_up = torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")])
        self.down = read("mlp.down_proj")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _chosen(logits_BV: Tensor, temperature_B1: Tensor) -> Tensor:
    """Returns the best token at temperature 0, and otherwise a sample."""
    scores_BV = logits_BV.float()
    noise_BV = -torch.empty_like(scores_BV).exponential_().clamp_(min=1e-20).log_()
    return (scores_BV + temperature_B1 * noise_BV).argmax(dim=-1)
