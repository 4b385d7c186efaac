"""The process and its machine: device, threads, signals, process group, prefetching, versions.

Knows nothing of models, batches and run folders.
"""
