"""Training data: files to examples, examples to token ids and masks, and the order they are taken in.

``readers`` files and built-in sets to ``Example``s, ``formats`` one row to one ``Example``, ``masks`` an example to ids
and the tokens that are trained, ``tokens`` the memory-mapped store, ``order`` which examples make a step,
``micro`` how a step's examples are shared out over micro-batches. No torch anywhere in here.
"""
