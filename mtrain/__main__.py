"""Run the command line as `python -m mtrain`."""

from mtrain.cli import main

main()
