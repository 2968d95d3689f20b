"""Where users train: Accelerate, transformers' Trainer and Lightning, with the engine under them.

Each framework keeps its own loop, its own calls and its own files. `faces` gives the model and the
optimizer what those loops ask for; the other files hand them over. One process: several ranks
have shares of the weights that these frameworks' files cannot hold.
"""
