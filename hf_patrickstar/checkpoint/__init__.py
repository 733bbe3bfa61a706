"""Saves chunks to files and loads them: the model's weights in common formats, and the training state.

``torch.distributed.checkpoint`` is not used. Tried with torch 2.13: a reader and a planner of 48 lines load today's
files straight into views of chunks, but replace only the 15 lines that read them; checks, names, other states, updates
that wait for the writer, and directories that appear complete stay ours. Its writers cannot write these files: one has
a format of its own; the one for safetensors needed 245 MB more memory for 128 MB (``write_safetensors``: 1 MB).
"""
