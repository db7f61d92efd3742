"""What is refused, or fails, today: an entry goes when its case trains. Nothing is ever different."""

NOT_YET: dict[tuple[str, str], str] = {
    ("DQN", "pp2"): "failed: ControlFlowError",
    ("DQN", "dp2 x pp2"): "failed: ControlFlowError",
    ("DQN", "pp2 x 4 microbatches"): "failed: ControlFlowError",
    ("Reinforce", "zero3"): "refused: StepError",
    ("AveragedDiffusion", "pp2"): "failed: NotHere",
    ("AveragedDiffusion", "dp2 x pp2"): "failed: NotHere",
    ("AveragedDiffusion", "pp2 x 4 microbatches"): "failed: NotHere",
}
