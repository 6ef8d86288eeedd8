"""Train the demo voice's language model on codes of speech.

    python demo/recipes/voice_lm.py FOLDER --minutes 60 [--device cuda]

FOLDER holds `tokens.npz` and `tokens.json` (voice_codec.py made them). A Llama of 11 M parameters, trained from nothing:
Muon on the matrices, AdamW on the rest, batches of equally long utterances. Some attention heads are led along the true
alignment at first (flite tells when it spoke each phone): without that, attention between phones and codes takes longer to
form than the whole training has (guided attention, Tachibana et al. 2017, here as -log of the attention mass near the
phone being spoken). Exports `lm.safetensors` in transformers' names with its config. Checkpoints every five minutes; goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import voice_tokens as ids
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

HEADS_LED, LAYERS_LED = 2, (3, 4)
LEAD_WEIGHT, LEAD_UNTIL = 0.2, 0.5  # the weight falls to 0 at this share of the training
SHORT_FIRST, SHORT_CODES_S = 0.06, 2.0  # in this first share only utterances of at most so many seconds
PRONOUNCED = 0.45  # sentences without speech in a pass, in shares of those with it
CHECKPOINT_S = 300.0
LONGEST_STEP_S = 20.0  # what a step takes longer does not count: somebody had stopped the process, or it compiled


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama with tied embeddings and as many kv heads as heads."""

    hidden: int = 320
    layers: int = 8
    heads: int = 5
    inner: int = 896
    theta: float = 10_000.0
    positions: int = 1024


@dataclass(frozen=True, kw_only=True)
class Example:
    """One utterance: ids of text and phones, and for each code the phone (index) being spoken in its middle."""

    text: list[int]
    phones: list[int]
    codes: NDArrayInt
    spoken: NDArrayInt


NDArrayInt = Any  # numpy int arrays; the annotation above is read before this line


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lead: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [B, L, E]; `lead` [B, L, L]: where the led heads should look. Also gives their loss."""
        batch, length, hidden = x.shape
        y = self.input_layernorm(x)
        q, k, v = (
            project(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        loss = None
        if lead is None and x.is_cuda:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # on a CPU the plain product has the faster way back at these lengths
            scores = torch.matmul(q, k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            hidden_keys = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(hidden_keys, -1e9).softmax(-1)
            mixed = torch.matmul(weights.to(v.dtype), v)
            if lead is not None:
                mass = (weights[:, :HEADS_LED] * lead[:, None]).sum(-1)
                led = (lead.sum(-1) > 0).float()[:, None]
                loss = -((mass + 1e-3).log() * led).sum() / (HEADS_LED * led.sum() + 1)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), loss


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SpeechLM(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, 1e-5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)
        for block in self.layers:
            for last in (block.o_proj, block.down_proj):
                nn.init.normal_(last.weight, 0, 0.02 / math.sqrt(2 * shape.layers))
        dim = shape.hidden // shape.heads
        angles = torch.outer(torch.arange(shape.positions), shape.theta ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, token_ids: Tensor, lead: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, L] -> hidden rows [B, L, E] and the loss of the led heads."""
        x = self.embed_tokens(token_ids)
        length = token_ids.shape[1]
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        total = x.new_zeros(())
        for at, block in enumerate(self.layers):
            x, loss = block(x, cos, sin, lead if at in LAYERS_LED else None)
            if loss is not None:
                total = total + loss
        return self.norm(x), total

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


# ---------------------------------------------------------------------------------------------------------------- data


def load_examples(folder: Path) -> tuple[list[Example], dict[str, Any]]:
    """All utterances of `tokens.npz`, and the codec's layout."""
    layout = json.loads((folder / "tokens.json").read_text())
    stored = np.load(folder / "tokens.npz", allow_pickle=False)
    parts: dict[str, list[NDArrayInt]] = {}
    for name in ("text", "phones", "codes", "spoken"):
        parts[name] = np.split(stored[name].astype(np.int64), np.cumsum(stored[f"{name}_len"])[:-1])
    columns = zip(*(parts[name] for name in ("text", "phones", "codes", "spoken")))
    return [Example(text=a.tolist(), phones=b.tolist(), codes=c, spoken=d) for a, b, c, d in columns], layout


def sequence(example: Example) -> list[int]:
    if not len(example.codes):  # pronunciation alone: ends where the speech would begin
        return [*example.text, *example.phones, ids.SOA]
    return [*example.text, *example.phones, ids.SOA, *example.codes.tolist(), ids.EOA]


def batches(
    examples: Sequence[Example], tokens: int, rng: np.random.Generator, *, longest: int = 10**9
) -> Iterator[list[Example]]:
    """One pass: batches of about `tokens` ids, each of utterances about equally long, in random order."""
    chosen = [example for example in examples if len(example.codes) <= longest]
    lengths = np.array([len(e.text) + len(e.phones) + len(e.codes) + 2 for e in chosen])
    made: list[list[Example]] = []
    batch: list[Example] = []
    widest = 0
    for at in np.argsort(lengths + rng.random(len(chosen)) * 8):
        if batch and max(widest, lengths[at]) * (len(batch) + 1) > tokens:
            made.append(batch)
            batch, widest = [], 0
        batch.append(chosen[at])
        widest = max(widest, int(lengths[at]))
    if batch:
        made.append(batch)
    for index in rng.permutation(len(made)):
        yield made[index]


def collate(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Inputs and wanted ids [B, L]; -1 where nothing is to be learned (text, padding)."""
    rows = [sequence(example) for example in batch]
    length = max(map(len, rows)) - 1
    inputs = torch.full((len(rows), length), ids.PAD)
    wanted = torch.full((len(rows), length), -1)
    for at, (row, example) in enumerate(zip(rows, batch)):
        inputs[at, : len(row) - 1] = torch.tensor(row[:-1])
        begin = len(example.text)  # SOP itself is given, the first phone is not
        wanted[at, begin : len(row) - 1] = torch.tensor(row[begin + 1 :])
    return inputs, wanted


def leads(batch: Sequence[Example], length: int) -> Tensor:
    """Where led heads should look, [B, L, L]: codes at the phone being spoken, phones along the letters."""
    out = torch.zeros(len(batch), length, length)
    for at, example in enumerate(batch):
        num_letters, num_phones = len(example.text) - 2, len(example.phones) - 1
        first_phone = len(example.text) + 1
        # A row predicts the id after it: the row of SOP the first phone, that of SOA the first code.
        phones, letters = np.arange(num_phones), np.arange(num_letters)
        aim = (phones + 0.5) / num_phones * num_letters - 0.5
        near = np.exp(-((letters - aim[:, None]) ** 2) / (2 * 2.5**2))
        rows = slice(first_phone - 1, first_phone - 1 + num_phones)
        out[at, rows, 1 : 1 + num_letters] = torch.from_numpy(near).float()
        if num_codes := len(example.codes):
            near = np.exp(-((phones - example.spoken[:, None]) ** 2) / (2 * 0.7**2))
            begin = first_phone + num_phones
            out[at, begin : begin + num_codes, first_phone : first_phone + num_phones] = torch.from_numpy(near).float()
    return out


# ------------------------------------------------------------------------------------------------------------ training


class Trainer:
    def __init__(self, folder: Path, shape: Shape, *, device: str, tokens: int, rate: float, seed: int) -> None:
        self.folder, self.device, self.tokens, self.rate = folder, torch.device(device), tokens, rate
        examples, self.layout = load_examples(folder)
        spoken = [example for example in examples if len(example.codes)]
        self.held_out = spoken[: min(128, len(spoken) // 10)]
        kept_out = {id(example) for example in self.held_out}
        self.examples = [example for example in examples if len(example.codes) and id(example) not in kept_out]
        self.pronounced = [example for example in examples if not len(example.codes)]
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.num_places = len(ids.places(self.layout["strides"]))
        self.frame_s = self.layout["strides"][0] * self.layout["hop"] / self.layout["sample_rate"]
        self.model = SpeechLM(shape, ids.vocabulary_size(self.layout["strides"], self.layout["size"])).to(self.device)
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
        others = [p for name, p in self.model.named_parameters() if p.dim() != 2 or not name.startswith("layers.")]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.steps, self.seen, self.spent_s = 0, 0, 0.0
        self._resume()
        if self.device.type == "cuda" or shutil.which("g++"):
            for block in self.model.layers:
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]

    def loss(self, batch: Sequence[Example], lead_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """(loss of each wanted id, those ids, loss of the led heads)."""
        inputs, wanted = collate(batch)
        lead = leads(batch, inputs.shape[1]).to(self.device) if lead_weight > 0 else None
        inputs, wanted = inputs.to(self.device), wanted.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden, led = self.model(inputs, lead)
            known = wanted >= 0
            logits = self.model.logits(hidden[known])
        return F.cross_entropy(logits.float(), wanted[known], reduction="none"), wanted[known], led

    def train(self, minutes: float) -> None:
        """Until so many minutes have been spent in all. The rate falls with the time, to a twentieth."""
        budget_s = minutes * 60
        last = saved = time.monotonic()
        recent: list[list[float]] = []
        short = round(SHORT_CODES_S / self.frame_s * self.num_places)
        some_short = any(len(example.codes) <= short for example in self.examples)
        while True:
            longest = short if some_short and self.spent_s < SHORT_FIRST * budget_s else 10**9
            # Beside all that is spoken, some of what is only pronounced: other sentences in every pass.
            num_pronounced = min(len(self.pronounced), round(PRONOUNCED * len(self.examples)))
            others = self.rng.choice(len(self.pronounced), num_pronounced, replace=False) if num_pronounced else []
            examples = [*self.examples, *(self.pronounced[at] for at in others)]
            for batch in batches(examples, self.tokens, self.rng, longest=longest):
                now = time.monotonic()
                self.spent_s += min(now - last, LONGEST_STEP_S)
                last = now
                share = self.spent_s / budget_s
                if share >= 1:
                    self.save()
                    return
                if longest == short and share >= SHORT_FIRST:
                    break
                rate = self.rate * min(1.0, (self.steps + 1) / 100) * (1 - 0.95 * max(0.0, (share - 0.15) / 0.85))
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                lead_weight = LEAD_WEIGHT * max(0.0, 1 - share / LEAD_UNTIL)
                losses, wanted, led = self.loss(batch, lead_weight)
                (losses.mean() + lead_weight * led).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                self.steps += 1
                self.seen += sum(len(sequence(example)) for example in batch)
                recent.append([*self._parts(losses.detach(), wanted), float(led.detach())])
                if self.steps % 50 == 0:
                    self._log(recent, rate)
                    recent = []
                if self.steps % 250 == 0:
                    self._validate()
                if time.monotonic() - saved > CHECKPOINT_S:
                    self.save()
                    saved = time.monotonic()

    def _parts(self, losses: Tensor, wanted: Tensor) -> list[float]:
        """Mean loss of phones, then of each place of a frame; NaN where the batch has none."""
        size = self.layout["size"]
        place = torch.where(wanted < ids.AUDIO, -1, (wanted - ids.AUDIO) // size)
        place = torch.where((wanted < ids.FIRST_PHONE), -2, place)
        return [float(losses[place == at].mean()) for at in range(-1, self.num_places)]

    def _log(self, rows: Sequence[Sequence[float]], rate: float) -> None:
        means = np.nanmean(np.array(rows), axis=0)
        shown = " ".join(f"{value:.3f}" for value in means[1:-1])
        print(
            f"lm {self.spent_s:.0f} s step {self.steps} ids {self.seen / 1e6:.2f} M {self.seen / self.spent_s:.0f}/s "
            f"phones {means[0]:.3f} codes {shown} led {means[-1]:.2f} rate {rate:.1e}",
            flush=True,
        )

    @torch.no_grad()
    def _validate(self) -> None:
        rows = []
        for at in range(0, len(self.held_out), 32):
            losses, wanted, _ = self.loss(self.held_out[at : at + 32], 0.0)
            rows.append(self._parts(losses, wanted))
        means = np.nanmean(np.array(rows), axis=0)
        shown = " ".join(f"{value:.3f}" for value in means[1:])
        print(f"lm held out: phones {means[0]:.3f} codes {shown}", flush=True)

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "steps": self.steps,
            "seen": self.seen,
            "spent_s": self.spent_s,
        }
        path = self.folder / "lm.ckpt"
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def _resume(self) -> None:
        path = self.folder / "lm.ckpt"
        if not path.is_file():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(stored)
        self.steps, self.seen, self.spent_s = state["steps"], state["seen"], state["spent_s"]
        self.rng = np.random.default_rng(self.steps)
        print(f"lm goes on after {self.spent_s:.0f} s, {self.steps} steps", flush=True)


def export(model: SpeechLM, folder: Path) -> None:
    """`lm.safetensors` (bfloat16, transformers' names of a Llama) and `lm.json`, its config."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.startswith("layers."):
            head, _, rest = name.rpartition(".weight")[0].rpartition(".")
            group = {"q": "self_attn.", "k": "self_attn.", "v": "self_attn.", "o": "self_attn."}.get(rest[0], "")
            group = group if rest.endswith("_proj") and rest[1] == "_" else "mlp." if rest.endswith("_proj") else ""
            name = f"{head}.{group}{rest}.weight"
        tensors[f"model.{name}"] = value.to("cpu", torch.bfloat16).contiguous()
    save_file(tensors, folder / "lm.safetensors")
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.theta,
        "vocab_size": model.embed_tokens.num_embeddings,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "bos_token_id": ids.SOT,
        "eos_token_id": ids.EOA,
        "pad_token_id": ids.PAD,
    }
    (folder / "lm.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo voice's language model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=0, help="ids of a batch (default: 6000 on a CPU, 60000 on CUDA)")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens = options.tokens or (60_000 if options.device.startswith("cuda") else 6_000)
    trainer = Trainer(
        options.folder, Shape(), device=options.device, tokens=tokens, rate=options.rate, seed=options.seed
    )
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"lm: {count / 1e6:.2f} M parameters, {asdict(trainer.model.shape)}", flush=True)
    trainer.train(options.minutes)
    export(trainer.model, options.folder)


if __name__ == "__main__":
    main()
