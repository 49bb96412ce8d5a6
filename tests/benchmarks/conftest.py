import sys
from pathlib import Path

# The benchmarks are scripts: they find each other in their own folder.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
