"""The command line: one file for each verb, their options, and what they print.

The only package that turns a user's error into a message and an exit code.
"""

import os
import sys

from mtrain.errors import NEEDS_POSIX

if os.name != "posix":
    print(f"mtrain: {NEEDS_POSIX}", file=sys.stderr)
    sys.exit(2)
