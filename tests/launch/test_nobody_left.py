"""Who ends his descendants ends those too that are started meanwhile, and those whose parents went before."""

import signal
import subprocess
import sys
import textwrap

from headway.lifeline import kill_found

SLEEP = ["sleep", "600"]


def test_who_is_found_only_after_the_first_were_killed_is_killed_too():
    first, second, stranger = (subprocess.Popen(SLEEP) for _ in range(3))
    rounds = iter([[first.pid], [first.pid, second.pid], [second.pid]])
    try:
        kill_found(lambda: next(rounds))
        assert [first.wait(60), second.wait(60)] == [-signal.SIGKILL] * 2
        assert stranger.poll() is None
        assert list(rounds) == []
    finally:
        for process in (first, second, stranger):
            process.kill()
            process.wait()


def test_nobody_to_be_found_and_somebody_who_is_gone_are_no_trouble():
    gone = subprocess.Popen(["true"])
    gone.wait()
    rounds = iter([[gone.pid], []])
    kill_found(lambda: next(rounds))
    kill_found(list)


ORPHANS = """
    import os, subprocess
    from headway.lifeline import adopt_orphans, descendants, kill_found
    adopt_orphans()
    shell = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    orphan = int(shell.stdout)
    assert descendants(os.getpid()) == [orphan], descendants(os.getpid())
    kill_found(lambda: descendants(os.getpid()))
    print(os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]))
"""


def test_an_orphan_in_a_session_of_its_own_is_found_by_who_adopts_orphans():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(ORPHANS)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("-9", "")
