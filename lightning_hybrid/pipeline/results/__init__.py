"""Results of a step: logs, metrics, outputs and gradients."""
