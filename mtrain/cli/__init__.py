"""The command line: the verbs, one file each in `verbs`, their options, and what they print.

The only package that turns a user's error into a message and an exit code.
"""
