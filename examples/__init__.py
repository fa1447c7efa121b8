"""Models and data to try the compiler on: plain PyTorch, with no knowledge of pipelines.

Each model file (`gpt`, `llama`, `bert`, `mamba`, `resnet`) has the same names:

- `build(**sizes)`: the model. Without arguments it is small enough for a laptop's CPU.
- `PAPER`: the keyword arguments of `build` that give the size a paper measured.
- `example_batch(model, batch=..., seed=...)`: `(args, target)` for one batch, the same at every call.
- `loss_fn(output, target)`: the scalar mean loss.

Every model keeps its layers in a list called `blocks`, so that `blocks.2` is a natural place to begin a stage.
"""
