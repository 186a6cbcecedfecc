"""Make pictures fail, by file name, in a data worker when LLaMA-Factory's collator receives them.

`gone*` is deleted, `once*` cannot be read the first time.
"""

import functools
import multiprocessing
import sys
from pathlib import Path

from after_import import AfterImport


def fade(path):
    if path.name.startswith("gone"):
        path.unlink(missing_ok=True)
    elif path.name.startswith("once") and not path.with_suffix(".failed").exists():
        path.with_suffix(".failed").touch()
        raise OSError(116, "Stale file handle", str(path))


def change(module):
    stock = module.SFTDataCollatorWith4DAttentionMask.__call__

    @functools.wraps(stock)
    def collate(self, features):
        if multiprocessing.parent_process() is not None:
            for feature in features:
                for image in feature.get("images") or ():
                    fade(Path(image))
        return stock(self, features)

    module.SFTDataCollatorWith4DAttentionMask.__call__ = collate


sys.meta_path.insert(0, AfterImport("llamafactory.data.collator", change))
