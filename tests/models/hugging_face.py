"""Tiny models of transformers, as LightningModules."""

from typing import Any

from torch import nn
from torch.nn import functional as F

from models.hand_written import VOCABULARY, WIDTH, Lit

# --- Hugging Face ----------------------------------------------------------------------------------------------------


class Transformer(Lit):
    """Any model of transformers that returns a loss."""

    kind = "tokens"
    layers = 4
    heads = 2
    dropout = 0.0

    def __init__(self):
        super().__init__()
        import transformers

        self.model = self.build(transformers)
        self.model.train()

    def build(self, transformers: Any) -> nn.Module:
        raise NotImplementedError

    def loss(self, batch):
        return self.model(**batch).loss


class Causal(Transformer):
    """The loss of transformers' causal models is float32 for any model dtype; this one has the model's."""

    def loss(self, batch):
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class GPT2(Causal):
    def build(self, transformers):
        p = self.dropout
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=self.layers, n_head=self.heads,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)


class GPT2Dropout(GPT2):
    dropout = 0.2


class Llama(Causal):
    def build(self, transformers):
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads // 2, max_position_embeddings=16,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


class T5(Transformer):
    layers = 2

    def build(self, transformers):
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=self.layers, num_heads=self.heads,
            dropout_rate=self.dropout, decoder_start_token_id=0, relative_attention_num_buckets=8,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)


class Bert(Transformer):
    def build(self, transformers):
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            intermediate_size=32, max_position_embeddings=16,
            hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)


class ViT(Transformer):
    kind = "images"

    def build(self, transformers):
        config = transformers.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=self.layers, num_attention_heads=self.heads, intermediate_size=32,
            image_size=8, patch_size=4, num_channels=3, num_labels=4,
            hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)
