"""Models wide enough to be sharded over tensor ranks."""

from models.hand_written import Encoder
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
