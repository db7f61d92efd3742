"""Notes on errors: the stage, microbatch and operation of a step in which they arose."""

from __future__ import annotations

from lightning_hybrid.schedule import Action, Compute, Kind, Program, Receive, Send

_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward", Kind.W: "gradients of weights"}


def add_error_note(error: BaseException, text: str) -> None:
    """Add a note to an error; before Python 3.11 it is stored but not printed.

    Args:
        error: The error that propagates.
        text: One line.
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        vars(error)["__notes__"] = [*error_notes_of(error), text]


def error_notes_of(error: BaseException) -> list[str]:
    """The notes of an error, oldest first."""
    return list(getattr(error, "__notes__", ()))


def location_of(instruction: Compute | Send | Receive | None, rank: int, program: Program, step: str) -> str:
    """Describe the stage, instruction and microbatch at which a rank of a pipeline is.

    Args:
        instruction: The instruction that runs; None once all have run, while messages are still being sent.
        rank: Pipeline coordinate of the rank.
        program: The program of the step.
        step: The step's name, such as "training_step".

    Returns:
        Such as ``on pipeline rank 1, stage 1 of 2, action 1F0 of training_step (forward of microbatch 0)``.
    """
    stages = program.schedule.num_stages
    if instruction is None:
        return f"on pipeline rank {rank}, at the end of {step}, sending its last messages"
    if isinstance(instruction, Compute):
        action = instruction.action
        location = f"stage {action.stage} of {stages}, action {action} of {step} ({_in_words(action)})"
    else:
        message = instruction.message
        what = "gradients" if message.direction == "backward" else "values"
        what = f"{what} of microbatch {message.microbatch} of {step}"
        if isinstance(instruction, Receive):
            location = f"stage {message.target} of {stages}, receiving {what} from stage {message.source}"
        else:
            location = f"stage {message.source} of {stages}, sending {what} to stage {message.target}"
    return f"on pipeline rank {rank}, {location}"


def _in_words(action: Action) -> str:
    if action.kind is Kind.REDUCE:
        return "average of its gradients over the replicas"
    return f"{_WORDS[action.kind]} of microbatch {action.microbatch}"
