"""Operations that are compiled for the CPU, each equal to a plain PyTorch formula beside it.

Callers see functions and modules of tensors. How the C in `csrc/` is compiled and called is known
to `native` alone; nothing here knows the model, batches or text.
"""
