"""lctrain: long-context fine-tuning and large-batch training from one trainer core.

Importing the package is cheap on purpose: torch, transformers and datasets are imported by the
functions that need them.
"""

__version__ = "0.1.0"
