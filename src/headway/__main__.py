"""`python -m headway`: the command line."""

from headway.cli import main

main()
