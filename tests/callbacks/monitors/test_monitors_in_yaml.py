"""Monitors of a configuration file are those of `lightning_hybrid.callbacks`, and log what they measure."""

import sys
from unittest import mock

from lightning.pytorch.cli import LightningCLI

from harness.trainer_runs import ignore_warnings
from models.command_line_classes import Stack

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  strategy: {class_path: lightning_hybrid.Hybrid3DStrategy}
  max_steps: 4
  log_every_n_steps: 1
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: FOLDER}}
  callbacks:
    - {class_path: lightning_hybrid.callbacks.ThroughputMonitor, init_args: {window_size: 2, available_flops: 1.0e9}}
    - {class_path: lightning_hybrid.callbacks.MemoryMonitor, init_args: {step: 3, path: FOLDER/memory.svg}}
"""


def test_monitors_of_a_configuration_file(tmp_path):
    ignore_warnings()
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    with mock.patch.object(sys, "argv", ["train", "fit", "--config", str(config)]):
        cli = LightningCLI(Stack, save_config_callback=None)
    header, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert {"train/device/mfu", "train/input_wait_share", "memory/peak", "memory/predicted_peak"} <= {
        *header.split(",")
    }
    assert rows and cli.trainer.callback_metrics
    assert (tmp_path / "memory.svg").exists()
