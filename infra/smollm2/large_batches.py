"""A Llama that writes and reads many texts at once on one device, for collecting training text.

Plain torch with a cache of fixed size. The engine serves few requests soon; here a thousand texts
advance together, and features are kept as they are computed. Implements `RowSource`.
"""

# Shapes: B texts, T positions, S positions of the cache, N rows, D hidden size, H query heads,
# K key heads, G query heads of a key head, C channels of a head, V vocabulary.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from eesd_dist.distill.sources import TextRows
from eesd_dist.model.config_fields import read_json
from eesd_dist.types import FeatureSpec, Request

_READ_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}
"""Positions that are read in one pass, by device."""
_LOGITS_ROWS = {"cuda": 1 << 13, "cpu": 1 << 9}
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
        """Returns each prompt with the target's answer, and the features of its rows, in order.

        An answer is chosen among the `top_k` best tokens of each row. All requests of a call have
        the same maximum length, stop tokens and features.
        """
        spec, limit = requests[0].features, requests[0].sampling.max_tokens
        assert spec is not None
        lengths = [len(request.prompt) for request in requests]
        longest = max(lengths)
        tokens_BT = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            tokens_BT[row, : lengths[row]] = torch.tensor(request.prompt)
        tokens_BT = tokens_BT.to(self._device)
        cache = self._empty_cache(len(requests), longest + limit)
        texts = [_Text(request.prompt) for request in requests]
        last = []
        size = max(1, _READ_TOKENS[self._device.type] // longest)
        for first in range(0, len(requests), size):
            rows = self._read(
                tokens_BT[first : first + size],
                lengths[first : first + size],
                spec,
                [(k[first : first + size], v[first : first + size]) for k, v in cache],
            )
            for text, own in zip(texts[first : first + size], rows, strict=True):
                text.rows.append(own)
                last.append(own.changed(itemgetter(slice(-1, None))))
        self._answer(requests, texts, _Rows.combined(last, torch.cat), cache, longest=longest)
        return [text.finished() for text in texts]

    def _answer(
        self,
        requests: Sequence[Request],
        texts: "Sequence[_Text]",
        rows: "_Rows",
        cache: Sequence[tuple[Tensor, Tensor]],
        *,
        longest: int,
    ) -> None:
        """Appends to each text its answer, and the rows that were computed for it."""
        spec, limit = requests[0].features, requests[0].sampling.max_tokens
        assert spec is not None
        ends = torch.tensor(requests[0].sampling.stop_token_ids, device=self._device)
        temperatures = [request.sampling.temperature for request in requests]
        temperature_B1 = torch.tensor(temperatures, device=self._device).unsqueeze(1)
        at_B = torch.tensor([len(text.tokens) for text in texts], device=self._device)
        is_over_B = torch.zeros(len(texts), dtype=torch.bool, device=self._device)
        live = list(texts)
        steps: list[tuple[Tensor, Tensor, _Rows]] = []
        torch.manual_seed(requests[0].sampling.seed or 0)
        for step in range(limit):
            token_B = rows.chosen(temperature_B1)
            steps.append((token_B, is_over_B, rows))
            is_over_B = is_over_B | torch.isin(token_B, ends)
            if step + 1 == limit:
                break
            if (step + 1) % _CHECK_STEPS == 0:
                going = (~is_over_B).nonzero().squeeze(1)
                if len(going) <= _LEAST_SHARE * len(texts):
                    break
                if len(going) <= len(live) // 2:
                    _append(live, steps)
                    steps = []
                    live = [live[number] for number in going.tolist()]
                    cache = [(k[going], v[going]) for k, v in cache]
                    token_B, at_B, is_over_B = token_B[going], at_B[going], is_over_B[going]
                    temperature_B1 = temperature_B1[going]
            last_BD, by_exit = self._step(token_B, at_B, spec.exits, cache, used=longest + step + 1)
            rows = self._rows(last_BD, by_exit, spec)
            at_B = at_B + 1
        _append(live, steps)

    def _read(
        self,
        tokens_BT: Tensor,
        lengths: Sequence[int],
        spec: FeatureSpec,
        cache: Sequence[tuple[Tensor, Tensor]],
    ) -> "list[_Rows]":
        """Returns the rows of prompts, which begin a cache."""
        is_row_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        is_row_BT = is_row_BT.to(self._device)
        last_BTD, by_exit = self._forward(tokens_BT, spec.exits, cache=cache)
        hidden = {at: x_BTD[is_row_BT] for at, x_BTD in by_exit.items()}
        logits_rows = _LOGITS_ROWS[self._device.type]
        blocks = [
            self._rows(rows_ND, {}, spec)
            for rows_ND in torch.split(last_BTD[is_row_BT], logits_rows)
        ]
        return replace(_Rows.combined(blocks, torch.cat), hidden=hidden).split(lengths)

    def _rows(self, last_ND: Tensor, by_exit: dict[int, Tensor], spec: FeatureSpec) -> "_Rows":
        logits_NV = functional.linear(last_ND, self._lm_head_VD).float()
        best = logits_NV.topk(spec.top_k, dim=-1)
        return _Rows(
            ids_NK=best.indices.int(),
            logits_NK=best.values,
            lse_N=logits_NV.logsumexp(dim=-1),
            hidden=by_exit,
        )

    def _forward(
        self,
        tokens_BT: Tensor,
        exits: Sequence[int],
        *,
        cache: Sequence[tuple[Tensor, Tensor]],
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
        exits: Sequence[int],
        cache: Sequence[tuple[Tensor, Tensor]],
        *,
        used: int,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the normalized hidden states of one token per text, and those after each exit."""
        size, groups = len(token_B), self._heads // self._key_heads
        hidden_BD, by_exit = self._embedding_VD[token_B], {}
        batch_B = torch.arange(size, device=self._device)
        cos_B1C, sin_B1C = self._cos_SC[at_B].unsqueeze(1), self._sin_SC[at_B].unsqueeze(1)
        hidden_S = torch.arange(used, device=self._device) > at_B.unsqueeze(1)
        bias_B11S = torch.zeros(size, used, dtype=self._dtype, device=self._device)
        bias_B11S = bias_B11S.masked_fill_(hidden_S, -1e9)[:, None, None]
        for number, layer in enumerate(self._layers):
            k_BKSC, v_BKSC = cache[number]
            q_BHC, k_BKC, v_BKC = self._projected(layer, hidden_BD)
            q_BHC = _rotated(q_BHC, cos_B1C, sin_B1C) * self._channels**-0.5
            k_BKSC[batch_B, :, at_B] = _rotated(k_BKC, cos_B1C, sin_B1C)
            v_BKSC[batch_B, :, at_B] = v_BKC
            q_BKGC = q_BHC.view(size, self._key_heads, groups, self._channels)
            scores_BKGS = q_BKGC @ k_BKSC[:, :, :used].transpose(-1, -2)
            shares_BKGS = (scores_BKGS + bias_B11S).softmax(dim=-1)
            mixed_BKGC = shares_BKGS @ v_BKSC[:, :, :used]
            hidden_BD = self._after_attention(layer, hidden_BD, mixed_BKGC.reshape(size, -1))
            if number + 1 in exits:
                by_exit[number + 1] = hidden_BD
        return self._normalized(hidden_BD, self._norm_D), by_exit

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Scores of the target after each of N tokens, and hidden states there."""

    ids_NK: Tensor
    logits_NK: Tensor
    lse_N: Tensor
    hidden: dict[int, Tensor]

    @classmethod
    def combined(
        cls, blocks: "Sequence[_Rows]", combine: Callable[[list[Tensor]], Tensor]
    ) -> "_Rows":
        return cls(
            ids_NK=combine([block.ids_NK for block in blocks]),
            logits_NK=combine([block.logits_NK for block in blocks]),
            lse_N=combine([block.lse_N for block in blocks]),
            hidden={at: combine([block.hidden[at] for block in blocks]) for at in blocks[0].hidden},
        )

    def changed(self, change: Callable[[Tensor], Tensor]) -> "_Rows":
        return _Rows.combined([self], lambda tensors: change(tensors[0]))

    def chosen(self, temperature_N1: Tensor) -> Tensor:
        """Returns the best token at temperature 0, and otherwise a sample, for each row."""
        noise_NK = -torch.empty_like(self.logits_NK).exponential_().clamp_(min=1e-20).log_()
        best_N1 = (self.logits_NK + temperature_N1 * noise_NK).argmax(dim=-1, keepdim=True)
        return self.ids_NK.gather(1, best_N1).squeeze(1).long()

    def split(self, lengths: Sequence[int]) -> "list[_Rows]":
        ends = list(accumulate(lengths))
        return [
            self.changed(itemgetter(slice(end - length, end)))
            for length, end in zip(lengths, ends, strict=True)
        ]


class _Text:
    """A prompt, its answer so far, and the rows of both."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.tokens = list(prompt)
        self.rows: list[_Rows] = []

    def finished(self) -> TextRows:
        rows = _Rows.combined([rows.changed(Tensor.cpu) for rows in self.rows], torch.cat)
        assert len(rows.lse_N) == len(self.tokens) - 1
        return TextRows(
            tokens=tuple(self.tokens),
            hidden=rows.hidden,
            top_ids_TK=rows.ids_NK,
            top_logits_TK=rows.logits_NK,
            lse_T=rows.lse_N,
        )


def _append(texts: Sequence[_Text], steps: Sequence[tuple[Tensor, Tensor, _Rows]]) -> None:
    """Appends the tokens of these steps and the rows between them to the texts that go on.

    The row before the first token of a prompt's answer is the last of the prompt, so each step
    brings the row that chose its token; a text has it already when it is the prompt's own.
    """
    tokens_BS = torch.stack([token_B for token_B, _, _ in steps], dim=1).cpu()
    num_steps_B = (~torch.stack([is_over_B for _, is_over_B, _ in steps], dim=1)).sum(dim=1)
    rows = _Rows.combined([rows for _, _, rows in steps], partial(torch.stack, dim=1))
    rows = rows.changed(Tensor.cpu)
    for number, (text, count) in enumerate(zip(texts, num_steps_B.tolist(), strict=True)):
        is_first = len(text.rows) == 1 and len(text.rows[0].lse_N) == len(text.tokens)
        first = 1 if is_first else 0
        text.rows.append(rows.changed(lambda x, at=number, to=slice(first, count): x[at, to]))
        text.tokens += tokens_BS[number, :count].tolist()
