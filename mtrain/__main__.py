"""Run the command line, as `mtrain` or `python -m mtrain`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports end at once, without a traceback

from mtrain.cli.main import main

if __name__ == "__main__":
    main()
