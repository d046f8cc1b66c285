"""One engine over several processes: the first process takes requests, and sends them to the others before each step.

Every process has the whole scheduler and plans the same steps, since each process gets the same commands in
the same order; beside the commands, only the devices exchange anything.
"""

from collections.abc import Callable

from jaxlm.inference.commands import decode_commands
from jaxlm.inference.engine import Engine
from jaxlm.parallel import processes

_END = ""  # no message of an engine


def lead(engine: Engine) -> Callable[[], None]:
    """Let the engine of the first process send its commands to the other processes; call this before any request.
    Returns a function that ends `follow` in the other processes."""
    if processes.process_count() == 1:
        return lambda: None
    engine.tell(processes.tell_others)
    return lambda: processes.tell_others(_END)


def follow(engine: Engine) -> None:
    """Step the engine of another process as the first process steps its engine, until that engine ends."""
    while (message := processes.told_by_first()) != _END:
        for command in decode_commands(message):
            if command.method == "submit":
                assert command.request is not None
                salt = bytes.fromhex(command.salt)
                engine.submit(command.request, priority=command.priority, seed=command.seed, salt=salt)
            else:
                getattr(engine, command.method)(command.id)
        engine.step()
