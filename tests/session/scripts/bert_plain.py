"""A small BERT, pre-trained to fill in masked letters, in the manner of DeepSpeed's HelloDeepSpeed.

Run as ``torchrun --nproc-per-node 2 bert_plain.py``; with ``--load-checkpoint-dir`` it continues from what it saved,
with the data from the beginning.
"""

import argparse

import deepspeed
import torch
from torch import nn

TEXT = (
    "a ship left the harbour in the early morning and sailed along the coast. the wind was weak, and the crew had time "
    "to knot the nets. by noon the sky was grey; they turned back before the storm, and told nobody how far they went. "
)
MASK, VOCABULARY, LENGTH = 0, 128, 24


class MaskedText(torch.utils.data.Dataset):
    """Pieces of a text. Which letters of a piece are masked depends on its number alone."""

    def __init__(self, size, mask_prob):
        self.letters = torch.tensor([min(ord(letter), VOCABULARY - 1) for letter in TEXT])
        self.size = size
        self.mask_prob = mask_prob

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        start = (7 * index) % (len(self.letters) - LENGTH)
        tokens = self.letters[start : start + LENGTH]
        masked = torch.rand(LENGTH, generator=torch.Generator().manual_seed(index)) < self.mask_prob
        masked[index % LENGTH] = True
        return {
            "src_tokens": tokens.masked_fill(masked, MASK),
            "tgt_tokens": tokens.masked_fill(~masked, -100),
        }


class Bert(nn.Module):
    def __init__(self, layers, heads, width, dropout):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, src_tokens, tgt_tokens):
        scores = self.head(self.encoder(self.tokens(src_tokens) + self.places))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tgt_tokens.flatten(), ignore_index=-100)


def forever(loader):
    while True:
        yield from loader


def get_arguments(words=None):
    parser = argparse.ArgumentParser(description="BERT")
    parser.add_argument("--checkpoint-dir", default=None)
    parser.add_argument("--load-checkpoint-dir", default=None)
    parser.add_argument("--num-iterations", type=int, default=14)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args(words)


def train(args):
    deepspeed.init_distributed()
    torch.manual_seed(42)
    dataset = MaskedText(size=40, mask_prob=0.15)
    model = Bert(layers=2, heads=2, width=32, dropout=args.dropout)
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    loader = engine.deepspeed_io(dataset)
    start_step = 1
    if args.load_checkpoint_dir is not None:
        _, client_state = engine.load_checkpoint(args.load_checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1
    engine.train()
    losses = []
    for step, batch in enumerate(forever(loader), start=start_step):
        if step > args.num_iterations:
            break
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % args.log_every == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}")
        if step % args.checkpoint_every == 0 and args.checkpoint_dir is not None:
            engine.save_checkpoint(args.checkpoint_dir, client_state={"checkpoint_step": step})
    return losses


if __name__ == "__main__":
    train(get_arguments())
