"""Pre-trains the bundled demo model from plain text: tokenizer, weights, chat template.

    python infra/demo_model/pretrain.py --gsm8k gsm8k_train.jsonl --out build/demo --minutes 90

The budget is time, not steps: the learning rate follows the share of the budget that is spent, so a
run can be stopped and started again (same command) at any point and still ends on its schedule.
The exit head is trained afterwards, on the frozen model.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>\n{{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}<|assistant|>\n{{ message['content'] }}<|end|>\n"
    "{% else %}<|system|>\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HELD_OUT = 200
"""The last problems of GSM8K's training split are not trained on: prompts for benchmarks."""


def gsm8k_documents(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        f"<|bos|><|user|>\n{row['question']}\n<|assistant|>\n{row['answer']}<|end|>\n"
        for row in rows
    ]


def stdlib_documents() -> list[str]:
    """Returns modules of the standard library of this Python (PSF licence), without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    texts = (f.read_text(encoding="utf-8", errors="ignore") for f in files)
    return [f"<|bos|>{text}<|end|>\n" for text in texts if 500 < len(text) < 60_000]


def train_tokenizer(documents: list[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index("<|bos|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
    )


def initialise(model: LlamaForCausalLM) -> None:
    """Scales output projections down, so that 32 layers start close to the identity."""
    scale = 1.0 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)


def batches(
    chat: Tensor, code: Tensor, *, rows: int, length: int, chat_share: float, seed: int, start: int
) -> Iterator[Tensor]:
    """Yields random crops [rows, length + 1]; step i always draws the same crops."""
    step = start
    while True:
        rng = random.Random(f"{seed}/{step}")
        crops = []
        for _ in range(rows):
            stream = chat if rng.random() < chat_share else code
            at = rng.randrange(len(stream) - length - 1)
            crops.append(stream[at : at + length + 1])
        yield torch.stack(crops)
        step += 1


def orthogonalised(update: Tensor, *, steps: int = 5) -> Tensor:
    """Returns the nearest semi-orthogonal matrices (Newton-Schulz; Muon, K. Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.transpose(-1, -2) if update.size(-2) > update.size(-1) else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if update.size(-2) > update.size(-1) else x


class StackedMuon(torch.optim.Optimizer):
    """Muon in float32 over equal-shaped matrices at once: bfloat16 matmul is slow on most CPUs."""

    def __init__(self, matrices: list[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                directions = []
                for p in params:
                    state = self.state[p]
                    if not state:
                        state["velocity"] = torch.zeros_like(p)
                    velocity = state["velocity"].mul_(group["momentum"]).add_(p.grad)
                    directions.append(p.grad + group["momentum"] * velocity)
                scale = 0.2 * math.sqrt(max(shape))  # an update as large as AdamW's
                for p, direction in zip(
                    params, orthogonalised(torch.stack(directions)), strict=True
                ):
                    p.mul_(1 - 0.1 * group["lr"]).add_(direction, alpha=-scale * group["lr"])


def rate_at(share: float, *, warm_up: float = 0.01, decay_from: float = 0.6) -> float:
    if share < warm_up:
        return share / warm_up
    if share < decay_from:
        return 1.0
    return max(0.02, 1.0 - (share - decay_from) / (1.0 - decay_from))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: Tensor, *, length: int) -> float:
    count = min(32, (len(stream) - 1) // length)
    ids = stream[: count * length].view(count, length)
    return float(model(input_ids=ids, labels=ids).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K train split, JSON lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--chat-share", type=float, default=0.8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    problems = gsm8k_documents(options.gsm8k)
    code_documents = stdlib_documents()
    if (options.out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.out)
    else:
        sample = random.Random(options.seed).sample(code_documents, len(code_documents) // 4)
        tokenizer = train_tokenizer(problems + sample, vocab_size=options.vocab_size)
        tokenizer.save_pretrained(options.out)

    def stream(documents: list[str]) -> Tensor:
        encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
        return torch.tensor([token for ids in encoded for token in ids])

    random.Random(options.seed).shuffle(code_documents)
    chat, held_out = stream(problems[:-HELD_OUT]), stream(problems[-HELD_OUT:])
    code = stream(code_documents)
    print(f"tokens: chat {len(chat):,}, code {len(code):,}, held out {len(held_out):,}", flush=True)

    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(model_config(len(tokenizer)))
    initialise(model)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    optimizers: list[torch.optim.Optimizer] = [
        StackedMuon(matrices, lr=options.lr),
        torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}", flush=True)

    state_file = options.out / "training_state.pt"
    step, spent_s = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent_s = state["step"], state["spent_s"]

    def save() -> None:
        partial = state_file.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "spent_s": spent_s,
            },
            partial,
        )
        partial.replace(state_file)

    budget_s = options.minutes * 60
    source = batches(
        chat,
        code,
        rows=options.rows,
        length=options.length,
        chat_share=options.chat_share,
        seed=options.seed,
        start=step,
    )
    while spent_s < budget_s:
        started = time.monotonic()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate_at(spent_s / budget_s)
        ids = next(source)
        loss = model(input_ids=ids[:, :-1], labels=None).logits
        loss = torch.nn.functional.cross_entropy(loss.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1
        spent_s += time.monotonic() - started
        if step % 20 == 0:
            row = {
                "step": step,
                "minutes": round(spent_s / 60, 2),
                "loss": round(float(loss), 4),
                "tokens": step * options.rows * options.length,
            }
            if step % 200 == 0:
                row["held_out"] = round(held_out_loss(model, held_out, length=options.length), 4)
                save()
            print(json.dumps(row), flush=True)
    save()
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.to(torch.bfloat16).save_pretrained(options.out)
    model.float()
    row = {"step": step, "held_out": held_out_loss(model, held_out, length=options.length)}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
