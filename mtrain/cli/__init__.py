"""The command line: one file for each verb, their options, and what they print.

The only package that turns a user's error into a message and an exit code.
"""
