"""RUN, the folder of a training run: what its files are called."""

from pathlib import Path


class RunPaths:
    """What lies in the folder of a run; each file is there once something has written it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.lock = directory / "lock"  # of the job that is at work
        # What was begun: the resolved experiment, the tokenizer and the identity of the data.
        self.config = directory / "config.toml"
        self.tokenizer = directory / "tokenizer.json"
        self.data = directory / "data.json"
        # Lines of JSON: where each start ran, steps, held-out losses, norms of each layer, seconds of each start.
        self.starts = directory / "starts.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.evaluations = directory / "evaluations.jsonl"
        self.norms = directory / "norms.jsonl"
        self.goodput = directory / "goodput.jsonl"
        # What other programs show: event files, the id of the run at Weights & Biases, traces.
        self.tensorboard = directory / "tensorboard"
        self.wandb_id = directory / "wandb_id"
        self.profile = directory / "profile"
        self.checkpoints = directory / "checkpoints"
        # What is left at the end.
        self.ladder = directory / "ladder.json"
        self.loss_curve = directory / "loss.png"
        self.sample = directory / "sample.txt"

    def __str__(self) -> str:
        return str(self.directory)
