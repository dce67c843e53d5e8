"""Events as tests of the ledger write them: what does not matter there is filled in."""

from headway.events import Admitted, Finished, GroupDropped, Ready, RolloutDropped


def admitted(group, prompt="p", *, members=2, birth=0, epoch=0):
    return Admitted(0.0, group, prompt, epoch, members, birth)


def finished(group, member=0, tokens=5):
    return Finished(0.0, group, member, 0, 1.0, tokens + 3, tokens, 0, 0)


def lost(group, member=0, *, final=True, cause="environment_error"):
    return RolloutDropped(0.0, group, member, 0, cause, "", 0, final)


def ready(group, *, zero=False):
    return Ready(0.0, group, zero)


def dropped(group, cause="incomplete", *, requeued=False):
    return GroupDropped(0.0, group, cause, "", 0, requeued)
