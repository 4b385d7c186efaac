"""Run the command line as `python -m mtrain`."""

from mtrain.cli.main import main

main()
