"""Ends well, but leaves a process behind, as a tracker that still uploads would be."""

import subprocess
import sys

child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(120)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
print(f"pid={child.pid}")
