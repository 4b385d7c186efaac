"""The process and its machine: device, threads, signals, process group, prefetching, versions.

Independent of models, batches and run folders.
"""
