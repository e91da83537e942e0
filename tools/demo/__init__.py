"""Parts of `tools/train_demo.py` and `tools/train_parallel_draft.py`: the corpus, the training loop and the published files."""
