"""Operations that are compiled for the CPU, each equal to a plain PyTorch formula beside it.

`attention`, `layer_norm`, `dropout`, `linear`, `cross_entropy` and `topk` are functions and modules
of tensors; `csrc/` holds the C, which `native` compiles and calls. Outside this package nothing
imports `native` but for the name of the library. It must not know the model, batches or text.
"""
