"""Speech: lengths, alignments that are summed over, and augmentation that is drawn in the step."""

import torch
import torchmetrics
from conformance.case import Case, Rows, loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

MELS, TOKENS = 6, 5


def utterance(index):
    frames = 10 + 2 * (index % 3)
    words = 1 + (torch.arange(2 + index % 2) + index) % (TOKENS - 1)
    return waves(frames, MELS, count=index + 1)[index], words


def collate(utterances):
    """Pads, and gives the lengths beside."""
    spectrograms, words = zip(*utterances, strict=True)
    return (
        pad_sequence(spectrograms, batch_first=True),
        torch.tensor([len(s) for s in spectrograms]),
        pad_sequence(words, batch_first=True),
        torch.tensor([len(w) for w in words]),
    )


def utterances():
    return loaders(Rows(utterance), Rows(utterance, 16), collate_fn=collate)


class DeepSpeech(LightningModule):
    """Convolutions, packed recurrent layers and CTC; greedy decoding in validation."""

    def __init__(self, hidden=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Sequential(
            nn.Conv1d(MELS, hidden, 3, stride=2, padding=1), nn.BatchNorm1d(hidden), nn.Hardtanh(0, 20)
        )
        self.rnns = nn.ModuleList(nn.GRU(hidden, hidden, batch_first=True, bidirectional=True) for _ in range(2))
        self.fc = nn.Linear(hidden, TOKENS)
        self.criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def forward(self, spectrograms, lengths):
        h, lengths = self.conv(spectrograms.transpose(1, 2)).transpose(1, 2), (lengths + 1) // 2
        for rnn in self.rnns:
            packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(rnn(packed)[0], batch_first=True)
            h = h.view(*h.shape[:2], 2, -1).sum(2)
        return self.fc(h).log_softmax(-1), lengths

    def training_step(self, batch, batch_idx):
        spectrograms, lengths, words, num_words = batch
        logs, lengths = self(spectrograms, lengths)
        loss = self.criterion(logs.transpose(0, 1), words, lengths, num_words)
        self.log("train_loss", loss, batch_size=len(words))
        return loss

    def decode(self, logs, lengths):
        best = logs.argmax(-1)
        return [[t for t in torch.unique_consecutive(b[:n]).tolist() if t] for b, n in zip(best, lengths, strict=True)]

    def validation_step(self, batch, batch_idx):
        spectrograms, lengths, words, num_words = batch
        logs, lengths = self(spectrograms, lengths)
        errors = 0
        for said, meant, count in zip(self.decode(logs, lengths), words.tolist(), num_words.tolist(), strict=True):
            errors += abs(len(said) - count) + sum(a != b for a, b in zip(said, meant[:count], strict=False))
        self.log("wer", errors / int(num_words.sum()), batch_size=len(words))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class Keywords(LightningModule):
    """Masks stripes of time and frequency that are drawn for each batch, in the step."""

    def __init__(self, width=8, time_mask=4, freq_mask=2):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(MELS if k == 0 else width, width, 3, padding=1),
                    nn.BatchNorm1d(width),
                    nn.SiLU(),
                    nn.Dropout(0.1),
                )
                for k in range(3)
            )
        )
        self.attention = nn.Linear(width, 1)
        self.head = nn.Linear(width, TOKENS)
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(TOKENS, average="macro")
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(TOKENS, average="macro")

    def spec_augment(self, spectrograms):
        augmented = spectrograms.clone()
        for sample in augmented:
            t, f = (int(torch.randint(0, n + 1, ())) for n in (self.hparams.time_mask, self.hparams.freq_mask))
            t0 = int(torch.randint(0, sample.shape[0] - t + 1, ()))
            f0 = int(torch.randint(0, MELS - f + 1, ()))
            sample[t0 : t0 + t] = 0.0
            sample[:, f0 : f0 + f] = 0.0
        return augmented

    def forward(self, spectrograms):
        h = self.blocks(spectrograms.transpose(1, 2)).transpose(1, 2)
        return self.head((h * self.attention(h).softmax(1)).sum(1))

    def training_step(self, batch, batch_idx):
        spectrograms, y = batch
        logits = self(self.spec_augment(spectrograms))
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.train_accuracy(logits, y)
        self.log("train_acc", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        spectrograms, y = batch
        logits = self(spectrograms)
        self.val_accuracy.update(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.val_accuracy})

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)}


def keyword(index):
    return waves(12, MELS, count=index + 1)[index], index % TOKENS


def keywords():
    return loaders(Rows(keyword), Rows(keyword, 16))


class Transducer(LightningModule):
    """A joint network over all pairs of frames and tokens, and the sum over all alignments."""

    def __init__(self, width=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.LSTM(MELS, width, batch_first=True)
        self.embedding, self.predictor = (
            nn.Embedding(TOKENS, width, padding_idx=0),
            nn.GRU(width, width, batch_first=True),
        )
        self.enc_proj, self.pred_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.joint = nn.Sequential(nn.Tanh(), nn.Linear(width, TOKENS))

    def forward(self, spectrograms, words):
        frames, _ = self.encoder(spectrograms)
        history, _ = self.predictor(self.embedding(F.pad(words, (1, 0))))
        return self.joint(self.enc_proj(frames)[:, :, None] + self.pred_proj(history)[:, None]).log_softmax(-1)

    @staticmethod
    def transducer_loss(logs, words, lengths, num_words):
        samples, frames, positions, _ = logs.shape
        blank = logs[..., 0]
        emit = logs[:, :, :-1].gather(-1, words[:, None, :, None].expand(-1, frames, -1, 1)).squeeze(-1)
        rows = []
        for time in range(frames):
            row = [logs.new_zeros(samples) if time == 0 else rows[-1][0] + blank[:, time - 1, 0]]
            for position in range(1, positions):
                came = row[-1] + emit[:, time, position - 1]
                if time > 0:
                    came = torch.logaddexp(came, rows[-1][position] + blank[:, time - 1, position])
                row.append(came)
            rows.append(row)
        alpha = torch.stack([torch.stack(row, 1) for row in rows], 1)
        each = torch.arange(samples, device=logs.device)
        last = lengths - 1
        return -(alpha[each, last, num_words] + blank[each, last, num_words]) / num_words

    def training_step(self, batch, batch_idx):
        spectrograms, lengths, words, num_words = batch
        loss = self.transducer_loss(self(spectrograms, words), words, lengths, num_words).mean()
        self.log("train_loss", loss, batch_size=len(words))
        return loss

    def validation_step(self, batch, batch_idx):
        spectrograms, lengths, words, num_words = batch
        losses = self.transducer_loss(self(spectrograms, words), words, lengths, num_words)
        self.log("val_loss", losses.mean(), batch_size=len(words))

    def on_before_optimizer_step(self, optimizer):
        self.log("embedding_norm", self.embedding.weight.detach().norm())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98))


CASES = [
    Case(DeepSpeech, utterances),
    Case(Keywords, keywords, draws=True, epochs=2),
    Case(Transducer, utterances, trainer={"gradient_clip_val": 5.0}),
]
