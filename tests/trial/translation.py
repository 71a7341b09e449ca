"""A larger trial as an author writes it: encoder and decoder, two losses, streams of unequal lengths, AUC."""

import random

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from determined_ds import DataParallelTrial


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, inputs, context, mask):
        found = F.scaled_dot_product_attention(
            self.query(inputs), self.key(context), self.value(context), attn_mask=mask
        )
        return inputs + self.out(found)


class Seq2Seq(nn.Module):
    """Encoder and decoder of one layer each; the encoder also classifies the source."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(64, width)
        self.encoder, self.decoder, self.cross = (Attention(width) for _ in range(3))
        self.generate = nn.Linear(width, vocab_size)
        self.classify = nn.Linear(width, 1)

    def embed(self, tokens):
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source, target_in):
        known = (source > 0)[:, None, :]  # 0 is padding
        encoded = self.encoder(self.embed(source), self.embed(source), known)
        length = target_in.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=source.device).tril()
        decoded = self.decoder(self.embed(target_in), self.embed(target_in), past)
        decoded = self.cross(decoded, encoded, known)
        pooled = (encoded * known.transpose(1, 2)).sum(1) / known.sum(-1)
        return self.generate(decoded), self.classify(pooled).squeeze(-1)


def sentences(seed, count):
    """Pairs to translate (here: to reverse), and whether the source has the word 1."""
    drawn = random.Random(seed)
    for _ in range(count):
        source = [drawn.randrange(1, 16) for _ in range(drawn.randrange(4, 12))]
        yield source, source[::-1], 1 in source


def collate(samples):
    """A dict of tensors; sentences of different lengths are padded with 0."""
    sources, targets, labels = zip(*samples, strict=True)

    def padded(rows):
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    return {
        "source": padded(sources),
        "target_in": padded([[16, *row] for row in targets]),  # 16 begins a sentence
        "target": padded([[*row, 17] for row in targets]),  # 17 ends it
        "label": torch.tensor(labels),
    }


class TranslationTrial(DataParallelTrial):
    validation_metrics = {"validation_auc": roc_auc_score}  # noqa: RUF012

    def build_model(self):
        return Seq2Seq(vocab_size=18, width=self.args.width)

    def build_optimizer(self, model):
        return torch.optim.AdamW(self.build_parameters(model), lr=self.args.learning_rate)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.args.learning_rate, total_steps=self.total_steps
        )

    def losses(self, model, batch):
        outputs, scores = model(batch["source"], batch["target_in"])
        translation = F.cross_entropy(outputs.flatten(0, 1), batch["target"].flatten(), ignore_index=0)
        return translation, F.binary_cross_entropy_with_logits(scores, batch["label"].float()), scores

    def loss(self, model, batch):
        translation, label, _ = self.losses(model, batch)
        loss = translation + self.args.label_weight * label
        return {"loss": loss, "translation": translation, "label": label}

    def evaluate(self, model, batch):
        translation, label, scores = self.losses(model, batch)
        return {
            "validation_loss": translation + self.args.label_weight * label,
            "validation_auc": (batch["label"], scores),
        }

    def build_training_data_loader(self):
        return self.training_loader(lambda: sentences(1, 1000), collate_fn=collate)

    def build_validation_data_loader(self):
        return self.validation_loader(lambda: sentences(2, 101), collate_fn=collate)
