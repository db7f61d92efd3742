"""The same GPT through LightningCLI: the layout is a few lines of YAML, or of the command line.

python examples/gpt_cli.py fit --config examples/configs/one.yaml
python examples/gpt_cli.py fit --config examples/configs/pipeline.yaml
python examples/gpt_cli.py fit --config examples/configs/pipeline.yaml --trainer.max_steps 50 --model.layers 8
"""

import warnings

from gpt import GPT, SourceCode
from lightning.pytorch.cli import LightningCLI


class GPTCLI(LightningCLI):
    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.length", "model.length")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    GPTCLI(GPT, SourceCode, seed_everything_default=1, save_config_callback=None)
