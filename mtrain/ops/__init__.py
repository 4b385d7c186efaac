"""Operations that are compiled for the CPU, each equal to a plain PyTorch formula beside it.

`attention`, `layer_norm`, `dropout`, `linear`, `cross_entropy` and `topk` are functions and modules
of tensors, `consistency` a loss without a compiled form; `stacks` and `beam_search` run whole
layers in one call. `build` compiles the C files in `csrc/`, and `native` loads the library and
calls it. This package must not depend on the model, batches or text.
"""
