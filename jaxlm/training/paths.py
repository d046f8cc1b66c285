"""The file names in RUN, the folder of a training run."""

from pathlib import Path


class RunPaths:
    """Paths of the files in the folder of a run; each file exists once something has written it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.lock = directory / "lock"  # held by the job that is running
        # The definition of the run: the resolved experiment, the tokenizer and the identity of the data.
        self.config = directory / "config.toml"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        # Lines of JSON: the environment of each attempt, steps, held-out losses, norms per layer, seconds per attempt.
        self.attempts = directory / "attempts.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.evaluations = directory / "evaluations.jsonl"
        self.norms = directory / "norms.jsonl"
        self.goodput = directory / "goodput.jsonl"
        # For other programs: event files, the id of the run at Weights & Biases, traces.
        self.tensorboard = directory / "tensorboard"
        self.wandb_id = directory / "wandb_id"
        self.profile = directory / "profile"
        self.checkpoints = directory / "checkpoints"
        # Results at the end.
        self.ladder = directory / "ladder.json"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"

    def __str__(self) -> str:
        return str(self.directory)
