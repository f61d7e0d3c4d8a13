"""A step of plait's own trainer in sizes alone: its operations, births and deaths, without torch and without values.

| here                        | its original                                                       |
|-----------------------------|--------------------------------------------------------------------|
| `tape`, `ops`               | torch's autograd engine, and what its CPU kernels make and keep    |
| `layers`, `attention`       | `models/layers`, `attention`, `latent`; `parallel/tensor`, `late`  |
| `loss`, `experts`           | `models/loss`, `moe`, `grouped`; `parallel/loss`, `expert`         |
| `context`, `collectives`    | `parallel/context`, `ring`, `collectives`                          |
| `again`, `states`           | `parallel/recompute`; `row`, `zero`                                |
| `blocks`, `passes`, `step`  | `models/decoder`; `parallel/stage`, `pipeline`                     |

A name keeps a tensor alive as it does in the original; a tensor that is made and gets no name only raises the peak;
`del` marks where the original lets go. `tests/planner/test_counted.py` holds the two against each other.
"""
