"""A secret that a thread learns while another conceals a text (an engine joins while a line is logged) breaks nothing."""

from headway.secrecy import HIDDEN, concealed, keep_secret


class Text(str):
    """A text that is searched so slowly that another secret is learnt meanwhile."""

    __slots__ = ()

    def __contains__(self, what: object) -> bool:
        keep_secret(f"{what}-and-another")
        return super().__contains__(str(what))


def test_a_secret_that_is_learnt_while_a_text_is_searched_breaks_nothing():
    keep_secret("hunter-hunter")
    assert concealed(Text("the password is hunter-hunter")) == f"the password is {HIDDEN}"
