"""What a step gives: logs, metrics, outputs and gradients."""
