"""`python -m harvester.cli`, for where the `rosemux` script is not on the path."""

from harvester.cli.root import main

main()
