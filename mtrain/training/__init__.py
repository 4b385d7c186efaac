"""Training: the loop, gradients, schedule, optimizer state, checkpoints, and what is logged.

Independent of evaluation on test sets, exports and the command line.
"""
