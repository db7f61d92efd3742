"""One tiny model of each family of transformers, trained as its users train it."""

import torch
import transformers
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from harness.layouts import each_under
from harness.verification import LAYOUTS, check

PP2, _, BOTH, *_ = LAYOUTS
VOCABULARY, LENGTH = 40, 6
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}


class FineTuner(LightningModule):
    """A minimal wrapper around a model that returns its loss."""

    model_class, options = None, {}

    def __init__(self):
        super().__init__()
        config = self.model_class.config_class(**self.options)
        self.model = self.model_class(config)

    def training_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log("train_loss", out.loss, prog_bar=True)
        return out.loss

    def configure_optimizers(self):
        decayed = [p for name, p in self.named_parameters() if "bias" not in name and "norm" not in name.lower()]
        rest = [p for name, p in self.named_parameters() if "bias" in name or "norm" in name.lower()]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Decoder(FineTuner):
    model_class, options = transformers.LlamaForCausalLM, {**TEXT, "num_key_value_heads": 1}


class Encoder(FineTuner):
    """With dropout on, as by default."""

    model_class, options = transformers.BertForSequenceClassification, TEXT


ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
}  # fmt: skip


class EncoderDecoder(FineTuner):
    model_class, options = transformers.T5ForConditionalGeneration, ENCODER_DECODER


class Vision(FineTuner):
    model_class, options = transformers.ViTForImageClassification, {**SIZES, "image_size": 8, "patch_size": 4}


AUDIO = {
    **SIZES, "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip


class Audio(FineTuner):
    model_class, options = transformers.Wav2Vec2ForSequenceClassification, AUDIO


STATE_SPACE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, "expand": 2}


class StateSpace(FineTuner):
    model_class, options = transformers.MambaForCausalLM, STATE_SPACE


MIXTURE = {
    **TEXT, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Mixture(FineTuner):
    model_class, options = transformers.MixtralForCausalLM, MIXTURE


class BalancedMixture(Mixture):
    """The loss balances the experts too: hooks inside the layers stash router outputs."""

    options = MIXTURE | {"output_router_logits": True, "router_aux_loss_coef": 0.02}


def draws(*shape, high=None):
    generator = torch.Generator().manual_seed(3)
    if high is not None:
        return torch.randint(1, high, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loader(**columns):
    count = len(next(iter(columns.values())))
    samples = [{name: column[index] for name, column in columns.items()} for index in range(count)]
    return {"train_dataloaders": DataLoader(samples, 4)}


def language_data():
    ids = draws(24, LENGTH, high=VOCABULARY)
    return loader(input_ids=ids, labels=ids)


def sentence_data():
    ids = draws(24, LENGTH, high=VOCABULARY)
    return loader(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0] % 2)


def image_data():
    return loader(pixel_values=draws(24, 3, 8, 8), labels=torch.arange(24) % 2)


def sound_data():
    return loader(input_values=draws(24, 160), labels=torch.arange(24) % 2)


# The loss of causal models is float32 under any precision.
CASES = [
    (Decoder, language_data, "32-true"),
    (Encoder, sentence_data, "64-true"),
    (EncoderDecoder, language_data, "64-true"),
    (Vision, image_data, "64-true"),
    (Audio, sound_data, "64-true"),
    (StateSpace, language_data, "32-true"),
    (Mixture, language_data, "32-true"),
]


# T5 and ViT are among the architectures of `pipeline/test_parity.py`.
@each_under("module,data,precision", CASES, [PP2, BOTH], replicated=[], covered_by={CASES[2]: CASES[0]})
def test_matches_one_process(worlds, module, data, precision, layout):
    report = check(worlds, module, layout, make_data=data, precision=precision)
    assert report.outcome == "same", str(report)
    assert report.steps == 2


def test_values_stashed_by_hooks_inside_units_from_the_second_batch_on(worlds):
    report = check(worlds, BalancedMixture, PP2, make_data=language_data, precision="32-true")
    assert report.outcome == "same" and "sharded instead of pipelined" not in str(report), str(report)
