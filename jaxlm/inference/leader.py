"""One engine over several processes: the first takes requests, and tells the others of them before each step.

Every process has the whole scheduler and plans the same steps, since each is told the same in the same order; nothing
else is sent but what the devices exchange.
"""

from collections.abc import Callable

from jaxlm.inference.commands import decode_commands
from jaxlm.inference.engine import Engine
from jaxlm.parallel import processes

_END = ""  # no message of an engine


def lead(engine: Engine) -> Callable[[], None]:
    """Let the engine of the first process tell the others, before it is asked for anything. Returns what ends them."""
    if processes.process_count() == 1:
        return lambda: None
    engine.tell(processes.tell_others)
    return lambda: processes.tell_others(_END)


def follow(engine: Engine) -> None:
    """Step the engine of another process as the first steps its own, until that ends."""
    while (message := processes.told_by_first()) != _END:
        for command in decode_commands(message):
            if command.method == "submit":
                assert command.request is not None
                salt = bytes.fromhex(command.salt)
                engine.submit(command.request, priority=command.priority, seed=command.seed, salt=salt)
            else:
                getattr(engine, command.method)(command.id)
        engine.step()
