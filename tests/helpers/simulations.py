"""`headway simulate` called as a person calls it, and a scenario that takes a moment."""

from headway.cli import command_line

TINY = """
[workload]
tokens = {kind = "lognormal", mean = 100, sigma = 1.5}
[training]
seconds = 2
[rollout]
groups_per_batch = 2
group_size = 2
max_concurrent = 16
%s
[run]
steps = %d
"""


def called(capsys, *arguments):
    """Call `headway` with these arguments; return exit code, stdout and stderr."""
    code = command_line(list(map(str, arguments)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulated(capsys, *arguments):
    """Call `headway simulate`, as `called` does."""
    return called(capsys, "simulate", *arguments)


def tiny(directory, rollout, *, steps):
    """Write a scenario with one more line in [rollout]; return its path."""
    path = directory / "tiny.toml"
    path.write_text(TINY % (rollout, steps))
    return path
