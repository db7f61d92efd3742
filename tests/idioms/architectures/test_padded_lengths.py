"""Models of transformers run sharded for batches of every padded length, with a mask or without, as in one process."""

import warnings

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.trainer_runs import trainer_of

VOCABULARY, WIDTH, LONGEST = 40, 16, 16
NAMED = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "pad_token_id": 0, "bos_token_id": 1}
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LONGEST,
    "embd_pdrop": 0,
    "resid_pdrop": 0,
    "attn_pdrop": 0,
}
MODELS = {
    "GPT2": GPT2,
    "GPT2 with dropout": {**GPT2, "attn_pdrop": 0.1},
    "Bert": {**NAMED, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "OPT": {**NAMED, "ffn_dim": 32, "word_embed_proj_dim": WIDTH, "dropout": 0},
    "Qwen2": {**NAMED, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Qwen2 with one key head": {**NAMED, "num_attention_heads": 4, "num_key_value_heads": 1},
    "Mistral": {**NAMED, "num_key_value_heads": 2, "sliding_window": 12},
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
LENGTHS = [(7, 7, 7, 7), (7, 5, 7, 3), (9, 9, 9, 9), (5, 4, 5, 5)]
LENGTHS += [(12, 2, 3, 4), (2, 1, 2, 2), (9, 9, 4, 1), (3, 3, 3, 3), (1, 1, 1, 1)]


class Model(LightningModule):
    def __init__(self, name, implementation):
        super().__init__()
        kind = name.partition(" ")[0]
        model_class = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))
        config = model_class.config_class(**TEXT | MODELS[name])
        config._attn_implementation = implementation
        self.model, self.losses = model_class(config), []

    def training_step(self, batch):
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded(lengths):
    ids = torch.stack([torch.arange(max(lengths)) * (3 + row) % (VOCABULARY - 2) + 2 for row in range(len(lengths))])
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.roll(-1, 1).masked_fill(~mask, -100)}


def trained(name, implementation, devices, **sizes):
    torch.manual_seed(0)
    model = Model(name, implementation)
    loader = DataLoader([padded(lengths) for lengths in LENGTHS], batch_size=None)
    trainer = trainer_of(devices, 1, strategy_options=sizes or None, precision="64-true", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader)
    texts = [str(warning.message) for warning in caught]
    return torch.stack(model.losses), model.state_dict(), [text for text in texts if "unsharded" in text]


KINDS = [(name, kind) for name in MODELS if "dropout" not in name for kind in ("sdpa", "eager")]
# The layers of Bert run another line where there is a mask.
DEFAULT = [("GPT2", "sdpa", False), ("Bert", "eager", False), ("Bert", "eager", True)]
CASES = [
    pytest.param(*kind, sequence, marks=[pytest.mark.slow] * ((*kind, sequence) not in DEFAULT))
    for sequence in (False, True)
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "implementation", "sequence_parallel"), CASES)
def test_each_length_runs_sharded(worlds, name, implementation, sequence_parallel):
    [(losses, state, _)] = worlds.run(1, trained, name, implementation, 1)
    options = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    for found, weights, unsharded in worlds.run(2, trained, name, implementation, 2, **options):
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(weights, state, rtol=1e-9, atol=1e-11)
        # Without a mask torch repeats the key head, and with one the model does: the plan holds for the first alone.
        assert unsharded == [] or (name, implementation) == ("Qwen2 with one key head", "sdpa")


def test_each_length_runs_sharded_with_dropout(worlds):
    for *_, unsharded in worlds.run(2, trained, "GPT2 with dropout", "sdpa", 2, tensor_parallel_size=2):
        assert unsharded == []
