"""Who joins and who leaves: each wanted engine is there once, and no server has two clients at a time."""

from hypothesis import given
from hypothesis import strategies as st

from headway.rules.scheduling import RosterChange, roster_change
from headway.types import EngineAddress, EngineKind

KINDS: tuple[EngineKind, ...] = ("vllm", "sglang")
ADDRESSES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(KINDS)).map(
    lambda named: {url: EngineAddress(url, kind) for url, kind in named.items()}
)


@given(ADDRESSES, ADDRESSES, st.sets(st.sampled_from("abcd")))
def test_what_is_to_be_done_leaves_each_wanted_engine_there_once(joined, wanted, fixed):
    here = {f"engine-{number}": address for number, address in enumerate(joined.values()) if address.url not in fixed}
    change = roster_change(here, wanted, fixed)
    assert sorted([*change.leave, *change.stay]) == sorted(here)
    after = {here[name].url for name in change.stay} | set(change.join)
    blocked = {here[name].url for name in change.leave} | fixed
    assert after | blocked >= set(wanted)
    assert after <= set(wanted) - fixed
    assert not set(change.join) & {address.url for address in here.values()}
    settled = {name: here[name] for name in change.stay} | {f"new-{url}": wanted[url] for url in change.join}
    again = roster_change(settled, wanted, fixed)  # once those that leave have left
    assert not again.leave
    assert set(again.join) == set(wanted) - fixed - after


def test_a_server_that_is_another_kind_of_engine_by_now_leaves_before_it_joins():
    here, wanted = {"engine-0": EngineAddress("a", "vllm")}, {"a": EngineAddress("a", "sglang")}
    assert roster_change(here, wanted, ()) == RosterChange(join=(), leave=("engine-0",), stay=())
    assert roster_change({}, wanted, ()) == RosterChange(join=("a",), leave=(), stay=())
    assert roster_change({}, wanted, ("a",)) == RosterChange((), (), ())
