"""Change a module after its import; used by the other modules of this folder."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder


class AfterImport(MetaPathFinder):
    """Calls `change(module)` after the module `name` has run; put it first on `sys.meta_path`."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec
