"""Models wide enough to be sharded over tensor ranks."""

from models.hand_written import VOCABULARY, Encoder
from models.hugging_face import GPT2, T5, Bert, Llama, ViT
from models.nano_gpt import NanoGPT


class GPT2Wide(GPT2):
    """Heads for two tensor ranks times two context ranks; the others as well."""

    heads = 4


class GPT2WideDropout(GPT2Wide):
    dropout = 0.2


class LlamaWide(Llama):
    heads = 4


class T5Wide(T5):
    heads = 4


class BertWide(Bert):
    heads = 4


class ViTWide(ViT):
    heads = 4


class EncoderWide(Encoder):
    heads = 4


class NanoGPTWide(NanoGPT):
    heads = 4


class GPT2OneHead(GPT2):
    """No number of context ranks divides its heads."""

    heads = 1


class LlamaGrouped(Llama):
    """Six query heads and two key heads: four context ranks do not divide them."""

    def build(self, transformers):
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
