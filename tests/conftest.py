"""For all tests: no example of a property is timed, since machines that run tests are shared and slow when they like."""

from hypothesis import settings

settings.register_profile("headway", settings(settings.default, deadline=None))
settings.load_profile("headway")
