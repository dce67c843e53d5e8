"""For all tests: no example of a property is timed, since machines that run tests are shared and slow when they like.

Where the variable CI is set hypothesis draws the same examples each time, so that a change is judged by itself; elsewhere new ones.
"""

from hypothesis import settings

settings.register_profile("headway", settings(settings.default, deadline=None))
settings.load_profile("headway")
