import subprocess
import sys
from pathlib import Path

import lightning_hybrid.layout

PACKAGE = Path(lightning_hybrid.layout.__file__).parent

# The package's own __init__ registers strategies and so imports torch; an empty package stands in for it.
PROGRAM = """
import importlib, sys, types
for name in ("torch", "lightning", "numpy"):
    sys.modules[name] = None  # importing it raises
package = types.ModuleType("lightning_hybrid")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_hybrid"] = package
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def test_errors_layout_and_schedule_import_without_torch():
    modules = ["lightning_hybrid.errors", "lightning_hybrid.layout", "lightning_hybrid.schedule"]
    subprocess.run([sys.executable, "-S", "-c", PROGRAM, str(PACKAGE), *modules], check=True)
